"""The data sets of pictures that MosaicML's documentation converts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from sqlstream.compat.streaming.base.documented import Documented, DocumentedDataset, shows_all_parameters
from sqlstream.compat.streaming.vision.base import StreamingVisionDataset


class StreamingCIFAR10(StreamingVisionDataset):
    """CIFAR-10."""


class StreamingImageNet(StreamingVisionDataset):
    """ImageNet."""


class StreamingADE20K(DocumentedDataset):
    """ADE20K: the columns `x`, a picture, and `y`, its segments.

    Args:
        joint_transform: From the pair to the pair; it comes first.
        transform: For the picture.
        target_transform: For the segments.
        options: Parameters of `StreamingDataset`.
    """

    @shows_all_parameters
    def __init__(
        self,
        *,
        joint_transform: Callable[[tuple[Any, Any]], tuple[Any, Any]] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        **options: Unpack[Documented],
    ) -> None:
        self.joint_transform, self.transform, self.target_transform = joint_transform, transform, target_transform
        super().__init__(**options)

    def get_item(self, sample_id: int, retry: int = 7) -> tuple[Any, Any]:
        """Return picture and segments of a sample."""
        found = super().get_item(sample_id, retry)
        x, y = found["x"], found["y"]
        if self.joint_transform is not None:
            x, y = self.joint_transform((x, y))
        x = x if self.transform is None else self.transform(x)
        return x, y if self.target_transform is None else self.target_transform(y)


class StreamingCOCO(DocumentedDataset):
    """COCO: pictures with their boxes.

    Args:
        transform: From picture, (height, width), boxes and labels to the same.
        options: Parameters of `StreamingDataset`.
    """

    @shows_all_parameters
    def __init__(self, *, transform: Callable[..., Any] | None = None, **options: Unpack[Documented]) -> None:
        self.transform = transform
        super().__init__(**options)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return picture, its number, its size, boxes and labels of a sample."""
        found = super().get_item(sample_id, retry)
        picture, size = found["img"].convert("RGB"), (found["htot"], found["wtot"])
        boxes, labels = found["bbox_sizes"], found["bbox_labels"]
        if self.transform is not None:
            picture, size, boxes, labels = self.transform(picture, size, boxes, labels)
        return picture, found["img_id"], size, boxes, labels
