"""The names of `streaming.vision`."""

from sqlstream.compat.streaming.vision.pictures import (
    StreamingADE20K,
    StreamingCIFAR10,
    StreamingCOCO,
    StreamingImageNet,
)

__all__ = ["StreamingADE20K", "StreamingCIFAR10", "StreamingCOCO", "StreamingImageNet"]
