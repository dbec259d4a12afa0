"""What is run: cases, each one figure of some contenders, and the bars that sqlstream should clear."""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.peers import as_users, on_mixtures, on_shards
from benchmarks.peers.case import LOOSE_PEERS, SHORT_RUNS, TENSOR_PEERS, Bar, Case

VIEWS = "1.5 times the best with loose samples, as views"
ALL = ("sqlstream", "plain_torch", "litdata_raw", "sds", "mosaicml", "litdata_chunks", "webdataset", "huggingface")


def _warm() -> list[Case]:
    cases = [
        Case(
            name=f"warm-bytes-{workers}",
            group="warm",
            title=f"warm, bytes only, {workers} workers",
            workload="warm_bytes",
            measure="throughput",
            figure="samples_per_second",
            unit="samples/s",
            contenders=ALL if not workers else (*ALL, "sqlstream_views"),
            options={"num_workers": workers},
        )
        for workers in (0, 2)
    ]
    tensors = Case(
        name="warm-tensors",
        group="warm",
        title="warm, JPEG to 256×256 tensors, 2 workers",
        workload="warm_tensors",
        measure="throughput",
        figure="samples_per_second",
        unit="samples/s",
        contenders=("sqlstream", "sqlstream_pillow", *TENSOR_PEERS),
        options={"num_workers": 2, "num_warmup_batches": 8},
    )
    return [*cases, tensors]


def _cold() -> list[Case]:
    shared: dict[str, Any] = {"group": "cold", "measure": "one_pass", "figure": "samples_per_second", "unit": "samples/s"}
    shared |= {"needs_server": True, "options": {"num_workers": 2}}
    shards = dict.fromkeys(("mosaicml", "litdata_chunks", "webdataset"), "cold_shards")
    cases = [
        Case(
            name=f"cold-s3-{latency}",
            title=f"cold over S3, {latency} ms, 2 workers",
            workload="cold_loose",
            contenders=("sqlstream", "litdata_raw", "raw_obstore", "mosaicml", "litdata_chunks", "webdataset"),
            functions=shards,
            latency_ms=latency,
            **shared,
        )
        for latency in (0, 20, 50)
    ]
    threads = {"num_workers": 0, "num_threads": 32}
    equal = Case(
        name="cold-threads",
        title="cold over S3, 20 ms, no workers, 32 at a time",
        workload="cold_loose",
        contenders=("sqlstream", "raw_obstore"),
        latency_ms=20,
        **{**shared, "options": threads},
    )
    http = Case(
        name="cold-http-20",
        title="cold over HTTP, 20 ms, 2 workers",
        workload="cold_loose",
        contenders=("sqlstream", "raw_obstore", "webdataset"),
        functions=shards,
        latency_ms=20,
        **{**shared, "options": {"num_workers": 2, "scheme": "http"}},
    )
    return [*cases, equal, http]


def _squeeze() -> list[Case]:
    return [
        Case(
            name="squeeze",
            group="squeeze",
            title="two epochs under a limit of 30 % of the data: bytes from the server, no workers",
            workload="squeeze",
            measure="two_passes",
            figure="sent_share",
            unit="of the data's bytes",
            is_higher_better=False,
            contenders=("sqlstream", "sqlstream_belady", "mosaicml", "litdata_chunks"),
            needs_server=True,
            limit_share=0.3,
        )
    ]


MAPPED_PEERS = ("mosaicml", "huggingface")
TABLE_PEERS = ("plain_torch", *MAPPED_PEERS)
RESUMED_ROWS = 1_000_000
"""Of the case that resumes, and of the fresh start that it is compared with."""


def _start(name: str, num_rows: int, workload: str, title: str, peers: tuple[str, ...]) -> Case:
    is_resume = workload == "resume"
    return Case(
        name=name,
        group="resume" if is_resume else "start",
        title=f"first batch, {num_rows:.0e} rows, {title}",
        workload=workload,
        measure="first_batch",
        figure="first_batch_seconds",
        unit="s",
        is_higher_better=False,
        contenders=("sqlstream", *peers),
        options={"num_rows": num_rows},
        prepares="prepare_resume" if is_resume else "prepare_rows",
        runs_a_round=SHORT_RUNS if num_rows == RESUMED_ROWS else 1,
    )


def _memory(num_rows: int, peers: tuple[str, ...]) -> Case:
    return Case(
        name=f"memory-{num_rows}",
        group="memory",
        title=f"memory of a worker, {num_rows:.0e} rows, 2 workers",
        workload="start",
        measure="memory",
        figure="worker_pss_mb",
        unit="MB (PSS)",
        is_higher_better=False,
        contenders=("sqlstream", *peers),
        options={"num_rows": num_rows, "num_workers": 2},
        prepares="prepare_rows",
    )


def _rows() -> list[Case]:
    sizes = {100_000: TABLE_PEERS, 1_000_000: TABLE_PEERS, 10_000_000: MAPPED_PEERS}  # 10^7 dicts in a list are 6 GB
    return [
        *[_start(f"start-{num_rows}", num_rows, "start", "index built", peers) for num_rows, peers in sizes.items()],
        _start("lazy", 10_000_000, "start_lazily", "no index (lazy)", ()),
        _start("resume", RESUMED_ROWS, "resume", "from the middle of an epoch, by a saved state", ()),
        *[_memory(num_rows, peers) for num_rows, peers in sizes.items()],
    ]


_cpu_case = partial(Case, measure="throughput", figure="cpu_us_per_sample", unit="µs of CPU", is_higher_better=False)


def _scale() -> list[Case]:
    return [
        _cpu_case(
            name=f"scale-{workers}",
            group="scale",
            title=f"CPU of a warm sample, {workers} workers",
            workload="warm_bytes",
            contenders=("sqlstream", "sqlstream_views", "plain_torch"),
            options={"num_workers": workers},
        )
        for workers in (0, 1, 2, 4, 8)
    ]


def _flat() -> list[Case]:
    return [
        _cpu_case(
            name=f"flat-{num_entries}",
            group="flat",
            title=f"CPU of a warm sample of 1 KB, {num_entries:.0e} cached samples, no workers",
            workload="warm_entries",
            contenders=("sqlstream",),
            options={"num_rows": num_entries, "num_warmup_batches": 160},
            prepares="prepare_entries",
        )
        for num_entries in (10_000, 1_000_000)
    ]


RANDOM = Case(
    name="random",
    group="random",
    title="random access, cached, median",
    workload="random_access",
    measure="lookups",
    figure="p50_us",
    unit="µs",
    is_higher_better=False,
    contenders=("sqlstream", "plain_torch", "litdata_raw", "mosaicml", "litdata_chunks", "huggingface"),
)
CASES = [
    *as_users.cases(),
    *on_shards.cases(),
    *on_mixtures.cases(),
    *_warm(),
    RANDOM,
    *_cold(),
    *_squeeze(),
    *_rows(),
    *_scale(),
    *_flat(),
]
BARS = [
    *as_users.BARS,
    *on_shards.BARS,
    *on_mixtures.BARS,
    Bar(case="warm-bytes-0", text="at least 0.75 of plain torch", against=("plain_torch",), limit=0.75),
    Bar(case="warm-bytes-0", text="above every peer with loose samples", against=LOOSE_PEERS, limit=1.0),
    Bar(case="warm-bytes-2", text="1.5 times the best with loose samples", against=("plain_torch", *LOOSE_PEERS), limit=1.5),
    Bar(case="warm-bytes-2", text=VIEWS, contender="sqlstream_views", against=("plain_torch", *LOOSE_PEERS), limit=1.5),
    Bar(case="warm-tensors", text="1.4 times the best peer", against=TENSOR_PEERS, limit=1.4),
    Bar(
        case="warm-tensors",
        text="at least the best peer, same decoder",
        contender="sqlstream_pillow",
        against=TENSOR_PEERS,
        limit=1.0,
    ),
    Bar(case="cold-s3-20", text="1.5 times the best with loose files", against=LOOSE_PEERS, limit=1.5),
    Bar(case="cold-s3-50", text="1.5 times the best with loose files", against=LOOSE_PEERS, limit=1.5),
    Bar(
        case="cold-threads",
        text="0.85 of raw obstore at equal threads: at most 1.18 times its seconds, from opening to the end",
        against=("raw_obstore",),
        figure="seconds",
        limit=1.18,
        is_at_least=False,
    ),
    Bar(case="squeeze", text="no more bytes than LRU by simulation (1 %)", over="lru_share", limit=1.01, is_at_least=False),
    Bar(case="squeeze", text="fewer bytes with belady", against=("sqlstream_belady",), limit=1.0),
    Bar(case="squeeze", text="disk never above the limit", figure="disk_over_limit", limit=1.0, is_at_least=False),
    Bar(case="start-1000000", text="not slower than MosaicML", against=("mosaicml",), limit=1.0, is_at_least=False),
    Bar(case="start-10000000", text="within 2 s", limit=2.0, is_at_least=False),
    Bar(case="lazy", text="within 5 s", limit=5.0, is_at_least=False),
    Bar(case="resume", text="1.2 times a fresh start", over="start-1000000", limit=1.2, is_at_least=False),
    Bar(case="memory-1000000", text="below every peer", against=TABLE_PEERS, limit=1.0, is_at_least=False),
    Bar(case="memory-10000000", text="below every peer", against=MAPPED_PEERS, limit=1.0, is_at_least=False),
    Bar(case="memory-10000000", text="flat: 1.2 times 1e+05 rows", over="memory-100000", limit=1.2, is_at_least=False),
    Bar(case="random", text="p50 at most 100 µs", limit=100, is_at_least=False),
    Bar(case="random", text="p99 at most 500 µs", figure="p99_us", limit=500, is_at_least=False),
    Bar(case="flat-1000000", text="flat: 1.2 times 1e+04 samples", over="flat-10000", limit=1.2, is_at_least=False),
    Bar(case="scale-8", text="flat: 1.2 times 1 worker", over="scale-1", limit=1.2, is_at_least=False),
    Bar(
        case="scale-8",
        text="flat: 1.2 times 1 worker, as views",
        contender="sqlstream_views",
        over="scale-1",
        limit=1.2,
        is_at_least=False,
    ),
]

_PEERS_LOOSE, _DECODED = "1.5 times the best with loose files", "1.4 times the best peer"
_OWN = "with `LoadFromDiskTransform` and no collate function of one's own"
HEADLINES = [
    *as_users.HEADLINES,
    *on_shards.HEADLINES,
    (
        "cold over S3, 20 and 50 ms of latency, with `LoadFromDiskTransform`, after the first batch",
        "{:.1f} and {:.1f} times the best peer with loose objects",
        (("cold-s3-20", _PEERS_LOOSE), ("cold-s3-50", _PEERS_LOOSE)),
    ),
    (
        "cold over S3 at 32 requests at a time, no workers, seconds of the whole run",
        "{:.2f} of bare obstore threads that write files",
        (("cold-threads", "0.85 of raw obstore at equal threads: at most 1.18 times its seconds, from opening to the end"),),
    ),
    (
        "two epochs under a limit of 30 % of the data: bytes downloaded",
        "{:.2f} of a simulated LRU; {:.2f} times fewer with `belady`; disk at {:.3f} of the limit",
        (
            ("squeeze", "no more bytes than LRU by simulation (1 %)"),
            ("squeeze", "fewer bytes with belady"),
            ("squeeze", "disk never above the limit"),
        ),
    ),
    (
        "time to the first batch, 10^6 rows, index built, no workers",
        "{:.2f} of MosaicML's",
        (("start-1000000", "not slower than MosaicML"),),
    ),
    (
        "memory of a worker",
        "{:.2f} of the best peer's at 10^6 rows; {:.2f} times as much at 10^7 rows as at 10^5",
        (("memory-1000000", "below every peer"), ("memory-10000000", "flat: 1.2 times 1e+05 rows")),
    ),
    (
        "cached JPEGs to 256×256 tensors, 2 workers, with `DecodeResizedImageTransform`",
        "{:.2f} times the best peer; {:.2f} with the decoder that peers have and `seed_transforms=False`",
        (("warm-tensors", _DECODED), ("warm-tensors", "at least the best peer, same decoder")),
    ),
    (
        f"cached bytes, no workers, {_OWN}",
        "{:.2f} of a plain torch dataset over the same files; {:.2f} times the best peer with loose samples",
        (("warm-bytes-0", "at least 0.75 of plain torch"), ("warm-bytes-0", "above every peer with loose samples")),
    ),
    (
        f"the same, 2 workers, {_OWN}",
        "{:.2f} times the best of them",
        (("warm-bytes-2", "1.5 times the best with loose samples"),),
    ),
    (
        f"CPU of a cached sample, {_OWN}",
        "{:.2f} times as much with 10^6 cached samples as with 10^4; {:.2f} times with 8 workers as with 1",
        (("flat-1000000", "flat: 1.2 times 1e+04 samples"), ("scale-8", "flat: 1.2 times 1 worker")),
    ),
]
"""Lines of the README: what, in words with places for figures, and the bars (case, text) that give them."""


def judged(case: Case) -> set[str]:
    """Return the contenders of a case whose figures some bar needs; the others are shown beside them."""
    against = {name for bar in BARS if bar.case == case.name for name in (bar.contender, *bar.against)}
    return against | {bar.contender for bar in BARS if bar.over == case.name}
