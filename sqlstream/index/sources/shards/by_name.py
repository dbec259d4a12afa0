"""Which file is a shard, by its name."""

from __future__ import annotations

import re

from sqlstream.index.sources.shards.layout import ShardLayout
from sqlstream.index.sources.shards.tar_shard import TarShard

_TAR = re.compile(r"\.(tar(\.(gz|bz2|xz|zst|zstd))?|tgz|tbz2?|txz)$", re.IGNORECASE)


def layout_of(url: str) -> ShardLayout | None:
    """Return how a file is read by its name; None: it is no shard.

    Example:
        >>> layout_of("s3://bucket/train-000.tar")
        TarShard()
    """
    return TarShard() if _TAR.search(re.split(r"[?#]", url, maxsplit=1)[0]) else None
