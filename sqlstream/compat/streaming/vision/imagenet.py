"""The name of `streaming.vision.imagenet`."""

from sqlstream.compat.streaming.vision.pictures import StreamingImageNet

__all__ = ["StreamingImageNet"]
