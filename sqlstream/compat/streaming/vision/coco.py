"""The name of `streaming.vision.coco`."""

from sqlstream.compat.streaming.vision.pictures import StreamingCOCO

__all__ = ["StreamingCOCO"]
