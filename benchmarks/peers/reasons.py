"""What people had to say by hand: why a bar does not hold, as found by the profiles, and what cannot be compared."""

from __future__ import annotations

_ENGINE = (
    "reading is a fifth of the time, the rest is Python for each sample: plan, row, reference, hold, path, transform "
    "(`benchmarks/results/profiles/warm-bytes-0.txt`); SQL is not the cost: a statement for nine samples"
)
_MAPPED = (
    "PSS counts the pages of the index that are mapped and were touched; they are page cache, given back when memory is short"
)
REASONS: dict[tuple[str, str], str] = {
    ("warm-bytes-0", "at least 0.75 of plain torch"): _ENGINE,
    ("warm-bytes-0", "above every peer with loose samples"): _ENGINE,
    (
        "warm-bytes-2",
        "1.5 times the best with loose samples",
    ): "what workers do for a sample limits now, not the way to the trainer: " + _ENGINE,
    ("warm-tensors", "1.4 times the best peer"): "decoding is nearly all of a sample, and all decode with libjpeg-turbo",
    (
        "warm-same-decoder",
        "at least the best peer, same decoder",
    ): "one of two rounds ran beside other work; in the other, 0.91 of HF's mapped Arrow files",
    (
        "start-1000000",
        "not slower than MosaicML",
    ): "opening the cache, its ledger and the index, and a plan of the first window",
    ("memory-1000000", "below every peer"): _MAPPED,
    ("memory-10000000", "flat: 1.2 times 1e+05 rows"): _MAPPED,
    ("random", "p50 at most 100 µs"): "a transaction of the ledger for each access, under two file locks",
    (
        "random",
        "p99 at most 500 µs",
    ): "a transaction of the ledger for each access, under two file locks; then the noise of the machine",
    ("scale-8", "flat: 1.2 times 1 worker"): "eight workers and a trainer take turns on two cores",
}
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
    "MosaicML waited a minute for its first shard from this server in every cold run (why was not found): rates of cold cases "
    "begin with the first batch, the seconds below each table at the start; its squeeze was ended after 30 s and is not shown.",
    "Rates of cold cases begin with the first batch, so they leave out how workers start, but count what is prefetched by then "
    "as free: up to a tenth for sqlstream, nothing for raw obstore. Seconds from opening to the end have neither fault.",
    "The page's run of 2026-11-21: the tree changed while it ran (71a4bb5 came before the last of the four rounds), so the "
    "commit named is that of the report; warm-same-decoder was run a second time because the first looked odd, both "
    "rounds are shown; "
    "MosaicML's squeeze was ended by hand after 30 s, it was left out at 20 ms, its memory was measured after the rest.",
    "WebDataset takes no part in random access; raw obstore is no dataset: it is what the storage floor could do at most.",
]
