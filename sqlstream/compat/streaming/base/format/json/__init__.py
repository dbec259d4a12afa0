"""The name of `streaming.base.format.json`."""

from sqlstream.compat.streaming.base.format.writers import JSONWriter

__all__ = ["JSONWriter"]
