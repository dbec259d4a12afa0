"""Datasets for PyTorch.

    loader ┬ dataset ─ pipeline ┬ engine (rows, window, samples) ─ chain (global generators of transforms)
           │                    └ transport.handover (pins of workers that ended)
           ├ frameworks (loaders of others, Accelerate)
           ├ run (which positions, state)
           └ transport (batches by shared memory)

Order comes from sqlstream.order, objects from sqlstream.cache, rows from sqlstream.index.
"""
