"""The names of `streaming.base.format.mds`: its writer, and encodings of one's own."""

from sqlstream.compat.streaming.base.format.writers import MDSWriter

__all__ = ["MDSWriter"]
