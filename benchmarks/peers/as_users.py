"""Cases as users write them: own transforms, own collate functions, whole epochs from `iter`, the start of workers in it.

README's headline figures are of these cases. They are measured under no setting that favours a contender.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.case import LOOSE_PEERS, SHORT_RUNS, TENSOR_PEERS, Bar, Case

COLD_SAMPLES = (2000, 20_000)
ROWS = (100_000, 1_000_000)
SHARDS = ("mosaicml", "webdataset")
_LOOSE = ("plain_torch", *LOOSE_PEERS)


def _case(name: str, title: str, *, num_workers: int = 2, **fields: Any) -> Case:
    options = {"as_users": True, "num_workers": num_workers} | fields.pop("options", {})
    rates = {"figure": "samples_per_second", "unit": "samples/s"}
    return Case(name=f"users-{name}", group="users", title=f"as users write it: {title}", options=options, **rates | fields)


def _warm() -> list[Case]:
    shared: dict[str, Any] = {"measure": "second_epoch", "needs_server": True}
    peers = ("sqlstream", "plain_torch", "litdata_raw", *SHARDS)
    return [
        *[
            _case(
                f"warm-bytes-{workers}",
                f"a second epoch, bytes, {workers} workers",
                num_workers=workers,
                workload="warm_bytes",
                contenders=(*peers, "sqlstream_drawing", "sds"),
                **shared,
            )
            for workers in (0, 2)
        ],
        _case(
            "warm-tensors",
            "a second epoch, JPEG to 256×256 tensors by the same Pillow function, 2 workers",
            workload="warm_tensors",
            num_samples=2000,
            contenders=peers,
            **shared,
        ),
        _case(
            "cpu",
            "CPU in a worker of a warm sample, 1 worker",
            num_workers=1,
            workload="warm_bytes",
            measure="throughput",
            figure="worker_cpu_us_per_sample",
            unit="µs of CPU",
            is_higher_better=False,
            contenders=("sqlstream", "plain_torch", "sqlstream_drawing"),
        ),
    ]


def _cold(scheme: str, latency: int, num_samples: int) -> Case:
    is_small = num_samples == min(COLD_SAMPLES)
    loose = ("sqlstream", "litdata_raw") if scheme == "s3" else ("sqlstream", "litdata_raw", "plain_torch")
    shards = () if not is_small else SHARDS if scheme == "s3" else ("webdataset",)
    return _case(
        f"cold-{scheme}-{latency}-{num_samples}",
        f"cold over {scheme.upper()}, {latency} ms, {num_samples} samples, 2 workers",
        workload="cold_loose",
        functions=dict.fromkeys(SHARDS, "cold_shards"),
        measure="first_epoch",
        contenders=(*loose, *shards),
        needs_server=True,
        latency_ms=latency,
        num_samples=num_samples,
        prepares="prepare" if is_small else "",
        options={"scheme": scheme},
    )


def _start(num_rows: int) -> Case:
    return _case(
        f"start-{num_rows}",
        f"first batch of a second start, {num_rows:.0e} rows, 2 workers",
        workload="start",
        measure="first_batch",
        figure="first_batch_seconds",
        unit="s",
        is_higher_better=False,
        contenders=("sqlstream", "litdata_raw", "mosaicml", "plain_torch"),
        options={"num_rows": num_rows},
        prepares="prepare_rows",
        runs_a_round=SHORT_RUNS,
    )


def cases() -> list[Case]:
    colds = [(scheme, latency, num) for num in COLD_SAMPLES for scheme in ("s3", "http") for latency in (20, 50)]
    lookups = _case(
        "random",
        "random access, cached, median",
        num_workers=0,
        workload="random_access",
        measure="lookups",
        figure="p50_us",
        unit="µs",
        is_higher_better=False,
        contenders=("sqlstream", "plain_torch", "litdata_raw", "mosaicml", "sqlstream_drawing"),
    )
    return [
        *_warm(),
        lookups,
        *[_cold(*cold) for cold in colds],
        *[_start(num_rows) for num_rows in ROWS],
    ]


BARS = [
    Bar(case="users-warm-bytes-2", text="1.5 times the best with loose samples", against=_LOOSE, limit=1.5),
    Bar(case="users-warm-bytes-0", text="at least 0.75 of plain torch", against=("plain_torch",), limit=0.75),
    Bar(case="users-warm-bytes-0", text="at least LitData raw, which keeps files", against=("litdata_raw",), limit=1.0),
    Bar(case="users-warm-tensors", text="at least the best peer", against=TENSOR_PEERS, limit=1.0),
    *[
        Bar(case=f"users-cold-s3-{latency}-{num}", text="1.5 times the best with loose files", against=LOOSE_PEERS, limit=1.5)
        for num in COLD_SAMPLES
        for latency in (20, 50)
    ],
    *[
        Bar(case=f"users-cold-http-{latency}-{num}", text="1.2 times the best with loose files", against=_LOOSE, limit=1.2)
        for num in COLD_SAMPLES
        for latency in (20, 50)
    ],
    Bar(case="users-random", text="p50 at most 4 times plain torch's", against=("plain_torch",), limit=4.0, is_at_least=False),
    Bar(
        case="users-random",
        text="p99 at most 5 times plain torch's",
        against=("plain_torch",),
        figure="p99_us",
        limit=5.0,
        is_at_least=False,
    ),
    Bar(case="users-cpu", text="at most 1.6 times plain torch's", against=("plain_torch",), limit=1.6, is_at_least=False),
    *[
        Bar(
            case=f"users-start-{num_rows}",
            text=f"at most {title}'s",
            against=(name,),
            limit=1.0,
            is_at_least=False,
        )
        for num_rows in ROWS
        for name, title in (("litdata_raw", "LitData raw"), ("mosaicml", "MosaicML"))
    ],
]

HEADLINES = [
    (
        "a second epoch of bytes, 2 workers",
        "{:.2f} times the best peer with loose samples",
        (("users-warm-bytes-2", "1.5 times the best with loose samples"),),
    ),
    (
        "a second epoch of bytes, no workers",
        "{:.2f} of a plain torch dataset over the same files; {:.2f} times LitData raw, which keeps files",
        (
            ("users-warm-bytes-0", "at least 0.75 of plain torch"),
            ("users-warm-bytes-0", "at least LitData raw, which keeps files"),
        ),
    ),
    (
        "a second epoch of tensors by one Pillow function, 2 workers",
        "{:.2f} times the best peer",
        (("users-warm-tensors", "at least the best peer"),),
    ),
    *[
        (
            f"a first epoch of {num} samples over {scheme.upper()}, 20 and 50 ms of latency",
            "{:.2f} and {:.2f} times the best peer with loose files",
            tuple((f"users-cold-{scheme}-{latency}-{num}", f"{least} times the best with loose files") for latency in (20, 50)),
        )
        for num in COLD_SAMPLES
        for scheme, least in (("s3", 1.5), ("http", 1.2))
    ],
    (
        "random access to a cached sample",
        "{:.1f} times plain torch's median; {:.1f} times its 99th percentile",
        (
            ("users-random", "p50 at most 4 times plain torch's"),
            ("users-random", "p99 at most 5 times plain torch's"),
        ),
    ),
    (
        "CPU of a cached sample in a worker",
        "{:.2f} times plain torch's",
        (("users-cpu", "at most 1.6 times plain torch's"),),
    ),
    (
        "first batch of a second start, 10^5 and 10^6 rows, 2 workers",
        "{:.2f} and {:.2f} of LitData raw's; {:.2f} and {:.2f} of MosaicML's",
        tuple((f"users-start-{num_rows}", f"at most {title}'s") for title in ("LitData raw", "MosaicML") for num_rows in ROWS),
    ),
]
"""Lines of the README, before those of cases that take what a library brings."""
