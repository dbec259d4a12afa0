"""What people had to say by hand: why a bar does not hold, as found by the profiles, and what cannot be compared."""

from __future__ import annotations

REASONS: dict[tuple[str, str], str] = {}
"""By case and text of the bar; shown only where it does not hold."""

NOT_COMPARABLE = [
    "Loose files and shards are different things: a shard is one request for hundreds of samples, and cannot be filtered, "
    "reweighted or shuffled sample by sample. Shards are shown beside, not against, loose files; bars are about loose files.",
    "WebDataset's order is a buffer over shuffled shards, LitData's chunks are shuffled within chunks; sqlstream, "
    "plain torch, LitData raw and HF shuffle all rows, MosaicML within blocks of shards.",
    "Plain torch, LitData raw (warm) and HF read files that are on the disk already; no account, no "
    "limit, nothing that may be evicted.",
    "HF datasets has no cache of remote objects of its own, WebDataset's caches whole shards without a limit: neither is "
    "in the squeeze.",
    "WebDataset takes no part in random access; raw obstore is no dataset: it is what the storage floor could do at most.",
]
