"""What people had to say by hand: why a bar may not hold, as the profiles show it, and what cannot be compared.

A reason is shown only where its bar fails. It says what the time goes to, never how one run came out: that is in the tables.
"""

from __future__ import annotations

from benchmarks.peers.as_users import COLD_SAMPLES
from benchmarks.peers.on_shards import COLD_HUNDRED, DROP_INS
from benchmarks.peers.workloads import VIEWS

_ENGINE = (
    "beside the open, read and close that plain torch does too, a sample is planned, looked up, held and let go, and goes "
    "through its transforms, in Python (`benchmarks/results/profiles/warm-bytes-0.txt`)"
)
_LOOKUP = "one access is a plan, a row, a hold in the cache and a file (`benchmarks/results/profiles/random.txt`)"
_MEMORY = (
    "a worker shares torch and numpy with its trainer; what is its own are its batches, 2 MiB of index pages and what "
    "reference counts copy"
)
_TWO_CORES = (
    "workers and trainer share the cores of this machine: with more workers than cores they take turns, and caches go cold"
)
_FILE = (
    "each object is written under a lock, renamed and entered in the ledger, in the process that also runs the trainer, on the "
    "two cores that the server uses too (`benchmarks/results/profiles/cold-s3-20.txt`)"
)
_HELPER = "each worker has a helper process of its own, forked at its first miss from one that has imported"
_HTTP = f"{_HELPER}; then urllib3 and http.client take most of a sample, in Python, and check each answer"
_SHARDS = (
    "archives without an index are fetched, and their headers walked, by the process that opens the dataset, before workers "
    "begin: more than half of the CPU of a cold epoch; with few samples the start of helpers is most of the rest "
    "(`benchmarks/results/profiles/shards-cold-http-20.txt`)"
)
_MAPPED = (
    "LitData's chunks are mapped into memory, with the place of each sample at their start; here a sample is planned, its "
    "place read from the index, its shard read and compared with its version, and it goes through its transforms, in Python "
    "(`benchmarks/results/profiles/shards-warm-0-{}.txt`)"
)
_MIXED = "mixing is in the plan of a sample, which is a part of what it takes (`benchmarks/results/profiles/{}.txt`); "
_SCRIPTS = (
    "what the script itself does to a sample runs beside what the engine does, in Python "
    "(`benchmarks/results/profiles/shards-warm-0-{}.txt`)"
)
_STARTS = "with few samples the start of workers and helpers, and the opening of the cache, are most of the epoch"
_LAZY_TARS = (
    "the script names no index: workers index the archives as they come, for a third of the time that they hold Python's lock "
    "(py-spy at 218bd8c)"
)
_FIRST = [(latency, num) for num in COLD_SAMPLES for latency in (20, 50)]
REASONS: dict[tuple[str, str], str] = {
    ("users-warm-bytes-2", "1.5 times the best with loose samples"): _ENGINE,
    ("users-warm-bytes-0", "at least 0.75 of plain torch"): _ENGINE,
    ("users-warm-bytes-0", "at least LitData raw, which keeps files"): _ENGINE,
    **{
        (f"users-cold-s3-{latency}-{num}", "1.5 times the best with loose files"): f"{_HELPER}; {_FILE}"
        for latency, num in _FIRST
    },
    **{(f"users-cold-http-{latency}-{num}", "1.2 times the best with loose files"): _HTTP for latency, num in _FIRST},
    ("users-random", "p50 at most 4 times plain torch's"): _LOOKUP,
    (
        "users-random",
        "p99 at most 5 times plain torch's",
    ): f"{_LOOKUP}; what takes 50 µs meets the timer of this machine, every 4 ms, more often than one time in a hundred",
    ("users-cpu", "at most 1.6 times plain torch's"): _ENGINE,
    **{
        (f"shards-cold-{latency}", "1.2 times the best of MosaicML and WebDataset, by sqlstream_tar"): _SHARDS
        for latency in (20, 50)
    },
    **{
        (f"shards-{COLD_HUNDRED.format(latency)}", "1.2 times the best of MosaicML and WebDataset, by drop_in_tar"): _LAZY_TARS
        for latency in (20, 50)
    },
    **{
        ("shards-warm-0", f"0.75 of LitData's chunks, by {ours}"): _MAPPED.format(ours)
        for ours in ("sqlstream_mds", "sqlstream_tar", "drop_in_mds", "drop_in_tar")
    },
    **{
        (f"shards-warm-{workers}", f"2.0 times {peer}'s script on its own shards"): _SCRIPTS.format(drop_in)
        for peer, drop_in in DROP_INS.items()
        for workers in (0, 2)
    },
    **{
        (f"mixture-loose-{workers}", "loose files: 1.5 times the best peer that mixes them (HF)"): _MIXED.format(
            "mixture-loose-0"
        )
        + "HF gives paths of files that nothing may evict, and holds, checks and accounts for none"
        for workers in (0, 2)
    },
    **{
        (f"mixture-shards-{workers}", "shards: 0.95 of LitData, on its chunks of the same photos"): _MIXED.format(
            "mixture-shards-0-sqlstream_mds"
        )
        + "LitData's chunks are mapped into memory, with the place of each sample at their start"
        for workers in (0, 2)
    },
    **{
        (f"shards-cold-{latency}", f"1.2 times the best of MosaicML and WebDataset, by {ours}"): _STARTS
        for latency in (20, 50)
        for ours in ("sqlstream_mds", "drop_in_mds", "drop_in_tar")
    },
    ("cold-s3-20", "1.5 times the best with loose files"): _FILE,
    ("cold-s3-50", "1.5 times the best with loose files"): _FILE,
    (
        "cold-threads",
        "0.85 of raw obstore at equal threads: at most 1.18 times its seconds, from opening to the end",
    ): _FILE,
    ("warm-bytes-0", "at least 0.75 of plain torch"): _ENGINE,
    ("warm-bytes-0", "above every peer with loose samples"): _ENGINE,
    (
        "warm-bytes-2",
        "1.5 times the best with loose samples",
    ): "the trainer copies each sample once, out of shared memory, so that `bytes` are `bytes` for as long as they are kept: "
    "see the row with views, which was the default before; then " + _ENGINE,
    ("warm-bytes-2", VIEWS): "what workers do for a sample limits, not the way to the trainer: " + _ENGINE,
    ("warm-tensors", "1.4 times the best peer"): "decoding is nearly all of a sample, and all decode with libjpeg-turbo",
    (
        "warm-tensors",
        "at least the best peer, same decoder",
    ): "decoding by the same Pillow is nearly all of a sample; shards save the open and close of a file",
    (
        "start-1000000",
        "not slower than MosaicML",
    ): "opening the cache, its ledger and the index, and a plan of the first window",
    (
        "resume",
        "1.2 times a fresh start",
    ): "a fresh start takes a hundredth of a second; to read a state, check it and take it over takes two or three "
    "ten-thousandths more",
    ("memory-1000000", "below every peer"): _MEMORY,
    ("memory-10000000", "below every peer"): _MEMORY,
    ("memory-10000000", "flat: 1.2 times 1e+05 rows"): _MEMORY,
    ("random", "p50 at most 100 µs"): _LOOKUP,
    ("random", "p99 at most 500 µs"): f"{_LOOKUP}; the rest is the noise of the machine: compare the peers' p99",
    (
        "flat-1000000",
        "flat: 1.2 times 1e+04 samples",
    ): "a row of the index and an entry of the ledger are each a page that SQLite must read first, from files that are larger "
    "than any cache worth its memory; the kernel's part, opening and reading, is flat "
    "(`benchmarks/results/profiles/flat-1000000.txt`)",
    ("scale-8", "flat: 1.2 times 1 worker"): f"{_TWO_CORES}; the trainer also copies each sample, which views spare it",
    ("scale-8", "flat: 1.2 times 1 worker, as views"): _TWO_CORES,
}
"""By case and text of the bar; shown only where it does not hold."""

NOT_COMPARABLE = [
    "As users write it, LitData raw and plain torch take bytes over HTTP from the same server: LitData by its S3 client, plain "
    "torch by threads that keep nothing on the disk. A first batch of LitData raw is one of small files, that of the others "
    "one of rows. Plain torch has no second epoch of its own: its files are local in both.",
    "Loose files and shards are different things: a shard is one request for hundreds of samples, and cannot be filtered, "
    "reweighted or shuffled sample by sample. Shards are shown beside, not against, loose files; bars are about loose files.",
    "WebDataset's order is a buffer over shuffled shards, LitData's chunks are shuffled within chunks; sqlstream, "
    "plain torch, LitData raw and HF shuffle all rows, MosaicML within blocks of shards.",
    "Plain torch, LitData raw (warm) and HF read files that are on the disk already; no account, no "
    "limit, nothing that may be evicted.",
    "HF datasets has no cache of remote objects of its own, WebDataset's caches whole shards without a limit: neither is "
    "in the squeeze.",
    "Over HTTP only WebDataset and bare obstore take part, but for cases as users write them: MosaicML, LitData raw and "
    "LitData's chunks have no client for it.",
    "Rates of cold cases begin with the first batch, so they leave out how workers start, but count what is prefetched by then "
    "as free: up to a tenth for sqlstream, nothing for raw obstore. Seconds from opening to the end have neither fault.",
    "WebDataset takes no part in random access; raw obstore is no dataset: it is what the storage floor could do at most.",
    "Mixtures: MosaicML and LitData mix shards of their own only, so the bar with loose files is against HF alone (a map-style "
    "dataset of paths); plain torch's weighted sampler draws rows with replacement, and stands beside. On shards sqlstream "
    "reads the MDS files that MosaicML wrote; LitData reads its chunks and HF its Parquet files, of the same photos.",
    "Shares of a mixture are exact over an epoch for sqlstream and MosaicML, and drawn for LitData and HF, whose epochs end "
    "with the first stream, within some percent of the others' size. HF shuffles in a buffer of 100 samples a stream: with its "
    "default of 1000 each worker would read three thousand samples ahead and throw them away. The 5 s that it sleeps for each "
    "stream at the end of an epoch of Parquet are switched off.",
    "Plain torch is left out at 10^7 rows: its list of dicts takes 6 GB and most of a minute to make.",
    "The million cached samples of 1 KB have names and ledger rows of their own, but share the bytes of twenty files: the "
    "kernel's cost of a million inodes is not in it.",
]
