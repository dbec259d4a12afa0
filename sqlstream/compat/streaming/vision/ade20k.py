"""The name of `streaming.vision.ade20k`."""

from sqlstream.compat.streaming.vision.pictures import StreamingADE20K

__all__ = ["StreamingADE20K"]
