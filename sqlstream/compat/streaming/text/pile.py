"""The name of `streaming.text.pile`."""

from sqlstream.compat.streaming.text.tokenized import StreamingPile

__all__ = ["StreamingPile"]
