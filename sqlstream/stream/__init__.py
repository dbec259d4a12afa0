"""Datasets for PyTorch.

dataset ─ pipeline ─ engine ─ rows     order from sqlstream.order, objects from sqlstream.cache, rows from sqlstream.index
"""
