"""Options as frozen values, checked once.

Public constructors take what users know (many loose parameters) and turn it at once into these.
"""

from sqlstream.config.batches import BucketMap, Buckets
from sqlstream.config.bucket_maps import AspectBuckets, BucketValue, Lengths, VideoBuckets
from sqlstream.config.checks import Word, check_at_least, names_of, word_of
from sqlstream.config.packs import LengthFunction, OnLong, PackFunction, Packs
from sqlstream.config.samples import (
    DEFAULT_PREFETCH,
    DEFAULT_RETAINED,
    MemberForm,
    OnCacheError,
    OnError,
    SampleOptions,
    ShardUnit,
    cache_error_policy,
)
from sqlstream.config.sources import (
    DEFAULT_KEY_COLUMN,
    DamagedShards,
    IndexOptions,
    JoinOptions,
    LazyOptions,
    Missing,
    NewParts,
    SourceOptions,
)
from sqlstream.config.storage import StorageOptions
from sqlstream.environment import default_cache_directory
from sqlstream.sizes import AS_IT_IS, AsItIs, Limit, parse_bytes, parse_duration, parse_limit

__all__ = [
    "AS_IT_IS",
    "DEFAULT_KEY_COLUMN",
    "DEFAULT_PREFETCH",
    "DEFAULT_RETAINED",
    "AsItIs",
    "AspectBuckets",
    "BucketMap",
    "BucketValue",
    "Buckets",
    "DamagedShards",
    "IndexOptions",
    "JoinOptions",
    "LazyOptions",
    "LengthFunction",
    "Lengths",
    "Limit",
    "MemberForm",
    "Missing",
    "NewParts",
    "OnCacheError",
    "OnError",
    "OnLong",
    "PackFunction",
    "Packs",
    "SampleOptions",
    "ShardUnit",
    "SourceOptions",
    "StorageOptions",
    "VideoBuckets",
    "Word",
    "cache_error_policy",
    "check_at_least",
    "default_cache_directory",
    "names_of",
    "parse_bytes",
    "parse_duration",
    "parse_limit",
    "word_of",
]
