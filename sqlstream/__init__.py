"""sqlstream: streams training samples from anywhere into PyTorch, with its index and cache ledger in SQLite.

    >>> from sqlstream import StreamingDataset

Names are resolved when they are used (PEP 562): `sqlstream cache stats` never imports torch.
"""

import sys
from importlib import import_module
from os.path import dirname, exists, join
from typing import TYPE_CHECKING, Any

if exists(join(dirname(__file__), "core", "query.py")):
    raise ImportError(
        f"{dirname(__file__)} holds files of two packages: `sqlstream` on the package index is another project, a SQL shell; "
        "this one is `sqlstream-data`. Run: pip uninstall sqlstream sqlstream-data; pip install sqlstream-data"
    )

if sys.platform != "linux":
    raise ImportError(
        f"sqlstream needs Linux, whose locks of open files keep the account of the cache exact; this is {sys.platform}: use a "
        "Linux machine, a container, or WSL2"
    )

if TYPE_CHECKING:
    from sqlstream.cache import Cache
    from sqlstream.config import AS_IT_IS, AspectBuckets, Buckets, Lengths, Packs, VideoBuckets
    from sqlstream.order.streams.schedules import ScheduleType
    from sqlstream.sample_types import DataSampleType
    from sqlstream.stream.dataset import StreamingDataset
    from sqlstream.stream.loader import StreamingDataLoader
    from sqlstream.stream.mixed.dataset import MixedDataset
    from sqlstream.stream.mixed.streams import Stream
    from sqlstream.stream.mixture.mixture_plan import weight_ramp
    from sqlstream.stream.multi.loader import MultiStreamDataLoader
    from sqlstream.stream.multi.options import Batch, StreamOptions
    from sqlstream.stream.transport.packed_collate import PackedCollate
    from sqlstream.stream.transport.padding_collate import PaddingCollate
    from sqlstream.world import World

__version__ = "0.1.0"
__all__ = [
    "AS_IT_IS",
    "AspectBuckets",
    "Batch",
    "Buckets",
    "Cache",
    "DataSampleType",
    "Lengths",
    "MixedDataset",
    "MultiStreamDataLoader",
    "PackedCollate",
    "Packs",
    "PaddingCollate",
    "ScheduleType",
    "Stream",
    "StreamOptions",
    "StreamingDataLoader",
    "StreamingDataset",
    "VideoBuckets",
    "World",
    "__version__",
    "weight_ramp",
]

_HOMES = {
    "AS_IT_IS": "sqlstream.config",
    "AspectBuckets": "sqlstream.config",
    "Batch": "sqlstream.stream.multi.options",
    "Buckets": "sqlstream.config",
    "Cache": "sqlstream.cache",
    "DataSampleType": "sqlstream.sample_types",
    "Lengths": "sqlstream.config",
    "MixedDataset": "sqlstream.stream.mixed.dataset",
    "MultiStreamDataLoader": "sqlstream.stream.multi.loader",
    "PackedCollate": "sqlstream.stream.transport.packed_collate",
    "Packs": "sqlstream.config",
    "PaddingCollate": "sqlstream.stream.transport.padding_collate",
    "ScheduleType": "sqlstream.order.streams.schedules",
    "Stream": "sqlstream.stream.mixed.streams",
    "StreamOptions": "sqlstream.stream.multi.options",
    "StreamingDataLoader": "sqlstream.stream.loader",
    "StreamingDataset": "sqlstream.stream.dataset",
    "VideoBuckets": "sqlstream.config",
    "World": "sqlstream.world",
    "weight_ramp": "sqlstream.stream.mixture.mixture_plan",
}


def __dir__() -> list[str]:
    """Return the public names, for tab completion."""
    return __all__


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module 'sqlstream' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
