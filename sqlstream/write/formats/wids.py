"""The JSON index of wids, which says the shards of a dataset of tars: how many samples each has, its size and its MD5."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

WIDS_NAME = "index.json"


def wids_index(shards: Iterable[Mapping[str, Any]], name: str = "") -> bytes:
    """Return the index of shards, in this order.

    Args:
        shards: `url`, relative to the index, `nsamples`, `filesize`, and perhaps `md5sum`, of each.
        name: Of the dataset.

    Example:
        >>> wids_index([{"url": "shard-000000.tar", "nsamples": 2, "filesize": 10240}]).split()[:4]
        [b'{', b'"__kind__":', b'"wids-shard-index-v1",', b'"wids_version":']
    """
    document = {"__kind__": "wids-shard-index-v1", "wids_version": 1, **({"name": name} if name else {})}
    return json.dumps({**document, "shardlist": list(shards)}, indent=2).encode()
