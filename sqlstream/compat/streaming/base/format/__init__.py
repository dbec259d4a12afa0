r"""MosaicML's writers over ours: the same parameters by name, the same bytes where shards are not compressed.

    >>> import tempfile
    >>> with MDSWriter(out=tempfile.mkdtemp() + "/train", columns={"text": "str"}) as writer:
    ...     writer.write({"text": "a"})

An exception leaves no index here, and `exist_ok` removes nothing.
"""

from sqlstream.compat.streaming.base.format.writers import CSVWriter, JSONWriter, MDSWriter, TSVWriter, XSVWriter

__all__ = ["CSVWriter", "JSONWriter", "MDSWriter", "TSVWriter", "XSVWriter"]
