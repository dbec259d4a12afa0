"""Pictures with a label, as MosaicML's classes and torchvision have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

import numpy as np
import torch

from sqlstream.compat.streaming.base.documented import DocumentedDataset, Shared, shows_all_parameters
from sqlstream.errors import ConfigError


class StandardTransform:
    """Applies one function to the picture and one to the target.

    Args:
        transform: For the picture; None: it becomes a tensor.
        target_transform: For the target; None: it stays.
    """

    def __init__(
        self, transform: Callable[[Any], Any] | None = None, target_transform: Callable[[Any], Any] | None = None
    ) -> None:
        self.transform = transform
        self.target_transform = target_transform

    def __call__(self, x: Any, y: Any) -> tuple[Any, Any]:
        """Return picture and target."""
        x = _to_tensor(x) if self.transform is None else self.transform(x)
        return x, y if self.target_transform is None else self.target_transform(y)


class StreamingVisionDataset(DocumentedDataset):
    """Pairs of the columns `x`, a picture, and `y`, its target.

    Args:
        batch_size: Samples of a rank's batch.
        transforms: From picture and target to both.
        transform: For the picture; None: it becomes a float tensor [c, h, w] between 0 and 1.
        target_transform: For the target.
        options: Parameters of `StreamingDataset`.

    Raises:
        ConfigError: There is `transforms`, and one of the others.
    """

    @shows_all_parameters
    def __init__(
        self,
        *,
        batch_size: int,
        transforms: Callable[..., Any] | None = None,
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        **options: Unpack[Shared],
    ) -> None:
        if transforms is not None and (transform is not None or target_transform is not None):
            raise ConfigError("transforms= is for picture and target together: leave transform= and target_transform= out")
        self.transform, self.target_transform = transform, target_transform
        self.transforms = StandardTransform(transform, target_transform) if transforms is None else transforms
        super().__init__(batch_size=batch_size, **options)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return picture and target of a sample."""
        found = super().get_item(sample_id, retry)
        return self.transforms(found["x"], found["y"])


def _to_tensor(picture: Any) -> torch.Tensor:  # [c, h, w]
    """Return a picture as torchvision's `to_tensor` does: bytes become floats between 0 and 1."""
    values = np.array(picture)  # [h, w, c] or [h, w]
    found = torch.from_numpy(values[..., None] if values.ndim == 2 else values).movedim(-1, 0).contiguous()  # [c, h, w]
    return found.float().div(255) if found.dtype is torch.uint8 else found
