"""The name of `streaming.base.format.mds.writer`."""

from sqlstream.compat.streaming.base.format.writers import MDSWriter

__all__ = ["MDSWriter"]
