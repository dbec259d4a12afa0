"""The names of `streaming.base.format.xsv`."""

from sqlstream.compat.streaming.base.format.writers import CSVWriter, TSVWriter, XSVWriter

__all__ = ["CSVWriter", "TSVWriter", "XSVWriter"]
