"""The names of wids, over those of `sqlstream`: TAR shards with an index, as a map-style dataset, and its samplers."""

from sqlstream.compat.wids.dataset import ShardListDataset, Transformation, interpret_transformations
from sqlstream.compat.wids.samplers import ChunkedSampler, DistributedChunkedSampler, ShardedSampler, ShardListSampler

__all__ = [
    "ChunkedSampler",
    "DistributedChunkedSampler",
    "ShardListDataset",
    "ShardListSampler",
    "ShardedSampler",
    "Transformation",
    "interpret_transformations",
]
