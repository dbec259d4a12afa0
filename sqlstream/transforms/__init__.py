"""Transforms: callables from sample to sample, or to several samples."""

from sqlstream.transforms.base import Sample, Transform, apply

__all__ = ["Sample", "Transform", "apply"]
