"""Transforms: callables from sample to sample, or to several samples.

    raw bytes ─ decode ─ resize ─ to tensor ─ normalize → collate

Every class takes field names, is called with the sample (a dict) and can be pickled; `presets` chains them as `sds` does.
Random ones draw from `rng(sample)`. Optional packages are imported when they are needed.
"""

from sqlstream.transforms.base import Sample, Transform, apply
from sqlstream.transforms.rng import rng

__all__ = ["Sample", "Transform", "apply", "rng"]
