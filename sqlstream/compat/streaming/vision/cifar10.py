"""The name of `streaming.vision.cifar10`."""

from sqlstream.compat.streaming.vision.pictures import StreamingCIFAR10

__all__ = ["StreamingCIFAR10"]
