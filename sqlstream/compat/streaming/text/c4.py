"""The name of `streaming.text.c4`."""

from sqlstream.compat.streaming.text.tokenized import StreamingC4

__all__ = ["StreamingC4"]
