"""The last transform of each stream of a mixture."""

from __future__ import annotations

from dataclasses import dataclass

from sqlstream.transforms.base import Sample

STREAM = "__stream__"
"""The field of a sample that names its stream."""


@dataclass(frozen=True, slots=True)
class NameStream:
    """Names the stream of a sample, behind all other transforms: these see, and draw, what they do without a mixture."""

    name: str

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the name."""
        sample[STREAM] = self.name
        return sample
