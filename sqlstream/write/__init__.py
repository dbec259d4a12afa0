"""Writes datasets: MDS, JSON lines, separated values, tar, ZIP and Parquet; to a directory, to an object store, or to both.

    >>> import tempfile
    >>> from sqlstream.write import MdsWriter
    >>> with MdsWriter(tempfile.mkdtemp(), {"text": "str"}) as writer:
    ...     writer.write({"text": "a"})

What all writers promise: the same samples give the same bytes; an index is the last file that is stored, so what ended early
claims nothing; full shards are noted in a journal beside them, and a writing that ended early goes on behind them
(`WriteOptions(resume=True)`, then the samples from `writer.num_samples` on); memory and the local disk hold a bounded number of
shards, whatever the speed of the store.

Words: an *output* is a directory, a URL, or both; a *draft* is a shard that is being written; a *part file* has the bytes of a
shard until it is stored; a *part* (i, n) is one of n writings whose outputs `merge` joins.

    tar_writer → energon → check | merge → formats → base
"""

from sqlstream.write.base.journal import SourcePoint
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.formats.mds import MdsWriter
from sqlstream.write.formats.parquet import ParquetWriter
from sqlstream.write.formats.split import CsvWriter, JsonWriter, TsvWriter, XsvWriter
from sqlstream.write.formats.zip import ZipWriter
from sqlstream.write.merge import Merged, merge
from sqlstream.write.tar_writer import TarWriter

__all__ = [
    "CsvWriter",
    "JsonWriter",
    "MdsWriter",
    "Merged",
    "Out",
    "ParquetWriter",
    "SourcePoint",
    "TarWriter",
    "TsvWriter",
    "WriteOptions",
    "XsvWriter",
    "ZipWriter",
    "merge",
]
