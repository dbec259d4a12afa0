"""The names of `streaming.text`."""

from sqlstream.compat.streaming.text.enwiki import StreamingEnWiki
from sqlstream.compat.streaming.text.tokenized import StreamingC4, StreamingPile

__all__ = ["StreamingC4", "StreamingEnWiki", "StreamingPile"]
