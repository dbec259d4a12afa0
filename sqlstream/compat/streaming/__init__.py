"""MosaicML Streaming's names over ours: `from sqlstream.compat.streaming import StreamingDataset` in place of `streaming`.

    index.json + shards ── sqlstream.StreamingDataset ─┐
    several Streams ────── sqlstream.MixedDataset ─────┴── StreamingDataset: their parameters, samples, sizes and states

Modules lie where theirs do: `streaming.base.util` is `sqlstream.compat.streaming.base.util`; they stand on `translation`.
Signatures are those of version 0.13.0. What each parameter becomes: docs/from-mosaicml.md.

Promises:
- With `shuffle=False`, and no stream taken more or less often than once, samples come in their order.
- A sample is their dict, or what the `__getitem__` or `get_item` of a subclass makes of it, also in an iteration.
- Files in `local` are read in place, and neither changed nor removed; what is ours lies in `<local>/.sqlstream`.
"""

from sqlstream.compat.streaming import multimodal, text, vision
from sqlstream.compat.streaming.base import (
    CSVWriter,
    JSONWriter,
    LocalDataset,
    MDSWriter,
    Stream,
    StreamingDataLoader,
    StreamingDataset,
    TSVWriter,
    XSVWriter,
)

__all__ = [
    "CSVWriter",
    "JSONWriter",
    "LocalDataset",
    "MDSWriter",
    "Stream",
    "StreamingDataLoader",
    "StreamingDataset",
    "TSVWriter",
    "XSVWriter",
    "multimodal",
    "text",
    "vision",
]
