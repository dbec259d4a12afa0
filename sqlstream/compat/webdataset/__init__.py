"""The names of WebDataset, over those of `sqlstream`: `import sqlstream.compat.webdataset as wds`.

A chain of stages is data. What it says of shards, order, samples and batches becomes one `StreamingDataset`, with its order,
cache and resumption; stages that cannot be part of it run behind it, as they are. `pipeline.explain()` says which.
"""

from __future__ import annotations

from typing import Any

from sqlstream.compat.webdataset import autodecode, filters, handlers, shardlists, tariterators, utils
from sqlstream.compat.webdataset.autodecode import (
    Continue,
    Decoder,
    DecodingError,
    basichandlers,
    gzfilter,
    handle_extension,
    imagehandler,
    torch_audio,
    torch_video,
)
from sqlstream.compat.webdataset.compat import FluidInterface, FluidWrapper, WebDataset, pipe_cleaner
from sqlstream.compat.webdataset.filters import (
    Cached,
    associate,
    batched,
    decode,
    default_collation_fn,
    detshuffle,
    extract_keys,
    getfirst,
    info,
    log_keys,
    map,  # noqa: A004 - theirs
    map_dict,
    map_tuple,
    pipelinefilter,
    rename,
    rename_keys,
    rsample,
    select,
    shuffle,
    slice,  # noqa: A004 - theirs
    to_tuple,
    transform_with,
    unbatched,
    unlisted,
    xdecode,
)
from sqlstream.compat.webdataset.handlers import (
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from sqlstream.compat.webdataset.loader import WebLoader
from sqlstream.compat.webdataset.mix import MockDataset, RandomMix, RoundRobin
from sqlstream.compat.webdataset.pipeline import DataPipeline
from sqlstream.compat.webdataset.shardlists import (
    ResampledShards,
    SimpleShardList,
    non_empty,
    resampled,
    shardspec,
    single_node_only,
    split_by_node,
    split_by_worker,
)
from sqlstream.compat.webdataset.stages.base import PipelineStage
from sqlstream.compat.webdataset.tariterators import tarfile_samples, tarfile_to_samples
from sqlstream.compat.webdataset.writer import ShardWriter, TarWriter, numpy_dumps, torch_dumps

REFUSED = {
    "LMDBCached": "shards are in the cache of this node after the first epoch: leave it out",
    "LRUCleanup": "the cache keeps its limit itself: give cache_size=",
    "MultiShardSample": "YAML lists of shards are not read: name the shards, or mix datasets with RandomMix",
    "gopen": "the engine opens URLs; open a file with open(), or read one with fsspec",
    "gopen_schemes": "a scheme is read by a function: StreamingDataset(providers={'scheme': 'module:function'})",
    "pytorch_weights_only": "pickles are not read unless a decoder of yours does: wds.handle_extension('pth', f)",
    "repeatedly": "give pipeline.repeat(), or with_epoch()",
    "tenbin": "fields .ten and .tb are decoded by decode()",
    "torch_loads": "pickles are not read unless a decoder of yours does: wds.handle_extension('pth', f)",
    "with_epoch": "it is a method here: pipeline.with_epoch(n)",
    "with_length": "it is a method here: pipeline.with_length(n)",
}
"""Names of theirs that are not here, and what to do."""


def __getattr__(name: str) -> Any:
    """Say why a name of theirs is not here.

    Raises:
        AttributeError: Always.
    """
    reason = f": {REFUSED[name]}" if name in REFUSED else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")


__all__ = [
    "Cached",
    "Continue",
    "DataPipeline",
    "Decoder",
    "DecodingError",
    "FluidInterface",
    "FluidWrapper",
    "MockDataset",
    "PipelineStage",
    "RandomMix",
    "ResampledShards",
    "RoundRobin",
    "ShardWriter",
    "SimpleShardList",
    "TarWriter",
    "WebDataset",
    "WebLoader",
    "associate",
    "autodecode",
    "basichandlers",
    "batched",
    "decode",
    "default_collation_fn",
    "detshuffle",
    "extract_keys",
    "filters",
    "getfirst",
    "gzfilter",
    "handle_extension",
    "handlers",
    "ignore_and_continue",
    "ignore_and_stop",
    "imagehandler",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "non_empty",
    "numpy_dumps",
    "pipe_cleaner",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "reraise_exception",
    "resampled",
    "rsample",
    "select",
    "shardlists",
    "shardspec",
    "shuffle",
    "single_node_only",
    "slice",
    "split_by_node",
    "split_by_worker",
    "tarfile_samples",
    "tarfile_to_samples",
    "tariterators",
    "to_tuple",
    "torch_audio",
    "torch_dumps",
    "torch_video",
    "transform_with",
    "unbatched",
    "unlisted",
    "utils",
    "warn_and_continue",
    "warn_and_stop",
    "xdecode",
]
