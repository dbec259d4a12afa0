"""The name of `streaming.base.format.json.writer`."""

from sqlstream.compat.streaming.base.format.writers import JSONWriter

__all__ = ["JSONWriter"]
