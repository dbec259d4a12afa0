"""What users write by hand, the same for every contender: transforms that are plain classes, and collate functions.

A job with `as_users` has these in place of what a library brings for the purpose.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.peers.decode import decode_with_pillow

Sample = dict[str, Any]


class Read:
    """Opens and reads the file that a sample names; where a library gives bytes there is nothing to open."""

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with bytes."""
        if isinstance(sample["image"], str):
            with open(sample["image"], "rb") as file:
                sample["image"] = file.read()
        return sample


class ReadAndDraw(Read):
    """Reads, and draws a number, as what augments samples does."""

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with bytes and a number."""
        sample = super().__call__(sample)
        sample["drawn"] = random.random()
        return sample


class Decode(Read):
    """Reads, and decodes by the Pillow function that all share."""

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with a tensor `[c, h, w]`."""
        sample = super().__call__(sample)
        sample["image"] = decode_with_pillow(sample["image"])  # [c, h, w]
        return sample


class Lower:
    """Changes a caption: rows of a table have no file."""

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with its caption in small letters."""
        sample["caption"] = sample["caption"].lower()
        return sample


class Wrap:
    """Makes a sample of what libraries give that have no samples, and transforms it.

    Args:
        transform: Takes the sample.
    """

    def __init__(self, transform: Read) -> None:
        self._transform = transform

    def __call__(self, data: bytes) -> Sample:
        """Return the sample of an object's bytes."""
        return self._transform({"image": data})


def listed(samples: Sequence[Sample]) -> list[bytes]:
    """Collate bytes: a list of them."""
    return [sample["image"] for sample in samples]


def gathered(samples: Sequence[Sample]) -> dict[str, list[bytes]]:
    """Collate bytes: a dict of lists. MosaicML counts what it has given by the length of a dict's first value."""
    return {"image": [sample["image"] for sample in samples]}


def captions(samples: Sequence[Sample]) -> list[str]:
    """Collate captions: a list of them."""
    return [sample["caption"] for sample in samples]


def stacked(samples: Sequence[Sample]) -> torch.Tensor:
    """Collate pictures of one size: a tensor `[b, c, h, w]`."""
    return torch.stack([sample["image"] for sample in samples])
