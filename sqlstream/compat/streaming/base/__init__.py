"""The names of `streaming.base`."""

from sqlstream.compat.streaming.base.dataloader import StreamingDataLoader
from sqlstream.compat.streaming.base.dataset import StreamingDataset
from sqlstream.compat.streaming.base.format import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter
from sqlstream.compat.streaming.base.local import LocalDataset
from sqlstream.compat.streaming.base.stream import Stream

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
]
