"""Options as frozen values, checked once.

Public constructors take what users know (many loose parameters) and turn it at once into these.


Names are resolved when they are used (PEP 562): a helper reads `StorageOptions` only; the others were a fifth of its start (m).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlstream.config.batches import BucketMap, Buckets
    from sqlstream.config.bucket_maps import AspectBuckets, BucketValue, Lengths, VideoBuckets
    from sqlstream.config.checks import (
        INT64_MAX,
        Word,
        check_at_least,
        check_word,
        flag_of,
        is_word,
        list_of,
        names_of,
        plain_number,
        word_of,
    )
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
        MissingShards,
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
    "INT64_MAX",
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
    "MissingShards",
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
    "check_word",
    "default_cache_directory",
    "flag_of",
    "is_word",
    "list_of",
    "names_of",
    "parse_bytes",
    "parse_duration",
    "parse_limit",
    "plain_number",
    "word_of",
]

_HOMES = {
    "INT64_MAX": "sqlstream.config.checks",
    "AS_IT_IS": "sqlstream.sizes",
    "AsItIs": "sqlstream.sizes",
    "AspectBuckets": "sqlstream.config.bucket_maps",
    "BucketMap": "sqlstream.config.batches",
    "BucketValue": "sqlstream.config.bucket_maps",
    "Buckets": "sqlstream.config.batches",
    "DEFAULT_KEY_COLUMN": "sqlstream.config.sources",
    "DEFAULT_PREFETCH": "sqlstream.config.samples",
    "DEFAULT_RETAINED": "sqlstream.config.samples",
    "DamagedShards": "sqlstream.config.sources",
    "IndexOptions": "sqlstream.config.sources",
    "JoinOptions": "sqlstream.config.sources",
    "LazyOptions": "sqlstream.config.sources",
    "LengthFunction": "sqlstream.config.packs",
    "Lengths": "sqlstream.config.bucket_maps",
    "Limit": "sqlstream.sizes",
    "MemberForm": "sqlstream.config.samples",
    "Missing": "sqlstream.config.sources",
    "MissingShards": "sqlstream.config.sources",
    "NewParts": "sqlstream.config.sources",
    "OnCacheError": "sqlstream.config.samples",
    "OnError": "sqlstream.config.samples",
    "OnLong": "sqlstream.config.packs",
    "PackFunction": "sqlstream.config.packs",
    "Packs": "sqlstream.config.packs",
    "SampleOptions": "sqlstream.config.samples",
    "ShardUnit": "sqlstream.config.samples",
    "SourceOptions": "sqlstream.config.sources",
    "StorageOptions": "sqlstream.config.storage",
    "VideoBuckets": "sqlstream.config.bucket_maps",
    "Word": "sqlstream.config.checks",
    "cache_error_policy": "sqlstream.config.samples",
    "check_at_least": "sqlstream.config.checks",
    "check_word": "sqlstream.config.checks",
    "default_cache_directory": "sqlstream.environment",
    "flag_of": "sqlstream.config.checks",
    "is_word": "sqlstream.config.checks",
    "list_of": "sqlstream.config.checks",
    "names_of": "sqlstream.config.checks",
    "parse_bytes": "sqlstream.sizes",
    "parse_duration": "sqlstream.sizes",
    "parse_limit": "sqlstream.sizes",
    "plain_number": "sqlstream.config.checks",
    "word_of": "sqlstream.config.checks",
}


def __getattr__(name: str) -> Any:
    """Import a name from its home."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
