"""Cases on shards as their own libraries wrote them: who reads them, each as a user writes it."""

from __future__ import annotations

from typing import Any

from benchmarks.peers.case import Bar, Case

DROP_INS = {"mosaicml": "drop_in_mds", "webdataset": "drop_in_tar"}
"""A peer, and its own script with the imports changed."""
OURS = ("sqlstream_mds", "sqlstream_tar", *DROP_INS.values())
THEIRS = ("mosaicml", "webdataset", "litdata_chunks")
COLD_SAMPLES = 2000
HUNDRED_SAMPLES = 20_000
"""In 100 shards of 200. Under a whole shuffle MosaicML brings a shard again for nearly every sample and would take hours: there
it has `FEWER_SAMPLES`."""
FEWER_SAMPLES = 5000
"""In 100 shards of 50."""
COLD, COLD_HUNDRED = "cold-{}", f"cold-{{}}-{HUNDRED_SAMPLES}"
"""Names of cases, by latency."""
ZIP_MEMBERS = 20_000
LATENCIES = (20, 50)
SHUFFLED_SECONDS = 300
"""Three epochs in which each sample is a request."""


def _case(name: str, title: str, **fields: Any) -> Case:
    options = {"as_users": True} | fields.pop("options", {})
    rates = {"figure": "samples_per_second", "unit": "samples/s"}
    return Case(name=f"shards-{name}", group="shards", title=f"shards: {title}", options=options, **rates | fields)


def cases() -> list[Case]:
    """Return them."""
    return [
        *[
            _case(
                f"warm-{workers}",
                f"a second epoch, bytes, {workers} workers",
                workload="warm_bytes",
                measure="second_epoch",
                contenders=(*OURS, *THEIRS),
                options={"num_workers": workers},
            )
            for workers in (0, 2)
        ],
        *[
            _case(
                name.format(latency),
                f"cold over S3 (WebDataset: HTTP), {latency} ms, {samples}, 2 workers, from opening on",
                measure="opened_epoch",
                contenders=(*OURS, "mosaicml", "webdataset"),
                needs_server=True,
                latency_ms=latency,
                options={"num_workers": 2, "scheme": "s3"},
                **fields,
            )
            for name, samples, fields in (
                (COLD, f"{COLD_SAMPLES} samples", {"num_samples": COLD_SAMPLES, "workload": "cold_shards"}),
                (
                    COLD_HUNDRED,
                    f"{HUNDRED_SAMPLES} samples in shards of 200",
                    {"num_samples": HUNDRED_SAMPLES, "workload": "cold_hundred", "prepares": "prepare_shuffled"},
                ),
            )
            for latency in LATENCIES
        ],
        *[
            _case(
                name,
                f"a whole shuffle of 100 shards of {num_samples // 100}, limit of 30 % of the data: bytes of epochs 2 and 3",
                workload="shuffled_shards",
                prepares="prepare_shuffled",
                measure="later_passes",
                figure="later_share",
                unit="of the data's bytes, an epoch",
                is_higher_better=False,
                contenders=contenders,
                needs_server=True,
                num_samples=num_samples,
                limit_share=0.3,
                limit_seconds=SHUFFLED_SECONDS,
                options={"num_workers": 0},
            )
            for name, num_samples, contenders in (
                ("shuffled", FEWER_SAMPLES, (*OURS, "mosaicml", "webdataset")),
                ("shuffled-200", HUNDRED_SAMPLES, (*OURS, "webdataset")),
            )
        ],
        _case(
            "zip-20",
            f"a ZIP of {ZIP_MEMBERS} photos over HTTP, 20 ms, 2 workers, from opening on",
            workload="cold_zip",
            prepares="prepare_zip",
            measure="bounded_epoch",
            contenders=("sqlstream_zip", "huggingface"),
            needs_server=True,
            latency_ms=20,
            num_samples=ZIP_MEMBERS,
            options={"num_workers": 2, "scheme": "http"},
        ),
        _case(
            "random",
            "random access, local shards, median",
            workload="random_access",
            measure="lookups",
            figure="p50_us",
            unit="µs",
            is_higher_better=False,
            contenders=("sqlstream_mds", "sqlstream_tar", "drop_in_mds", "mosaicml"),
            options={"num_workers": 0},
        ),
    ]


def _bars() -> list[Bar]:
    """Each of ours against those whose format it reads, and all against all where the bar is for the best of them."""
    bars: list[Bar] = []
    for workers in (0, 2):
        for ours, theirs, title in (
            ("sqlstream_mds", "mosaicml", "MosaicML"),
            ("sqlstream_tar", "webdataset", "WebDataset"),
            *((drop_in, peer, f"{peer}'s script") for peer, drop_in in DROP_INS.items()),
        ):
            text = f"2.0 times {title} on its own shards"
            bars.append(Bar(case=f"shards-warm-{workers}", text=text, contender=ours, against=(theirs,), limit=2.0))
            least = 1.0 if workers else 0.75
            text = f"{least} of LitData's chunks, by {ours}"
            bars.append(Bar(case=f"shards-warm-{workers}", text=text, contender=ours, against=("litdata_chunks",), limit=least))
    for ours in OURS:
        text = f"a whole shuffle: at most 1.02 of the data, by {ours}"
        both = ("shards-shuffled", "shards-shuffled-200")
        bars += [Bar(case=case, text=text, contender=ours, limit=1.02, is_at_least=False) for case in both]
    name, ours = "shards-zip-20", "sqlstream_zip"
    bars += [
        Bar(case=name, text="a ZIP: 100 times datasets", contender=ours, against=("huggingface",), limit=100),
        Bar(
            case=name,
            text="a ZIP: a HEAD and at most 2 requests for the index",
            contender=ours,
            figure="opening_requests",
            limit=3,
            is_at_least=False,
        ),
        Bar(
            case=name,
            text="a ZIP: at most one request a member",
            contender=ours,
            figure="requests_per_sample",
            limit=1,
            is_at_least=False,
        ),
    ]
    for latency in LATENCIES:
        for ours in OURS:
            text = f"1.2 times the best of MosaicML and WebDataset, by {ours}"
            for name in (COLD_HUNDRED, COLD):
                case = f"shards-{name.format(latency)}"
                bars.append(Bar(case=case, text=text, contender=ours, against=("mosaicml", "webdataset"), limit=1.2))
    return bars


BARS = _bars()


HEADLINES = [
    *[
        (
            f"{kind} shards as they lie: a first epoch of {HUNDRED_SAMPLES} samples over S3 (WebDataset: HTTP), "
            "20 and 50 ms of latency",
            "{:.2f} and {:.2f} times the best of MosaicML and WebDataset",
            tuple(
                (f"shards-{COLD_HUNDRED.format(latency)}", f"1.2 times the best of MosaicML and WebDataset, by {ours}")
                for latency in LATENCIES
            ),
        )
        for kind, ours in (("MosaicML's MDS", "sqlstream_mds"), ("WebDataset's TAR", "sqlstream_tar"))
    ],
    (
        "shards as they lie: a second epoch of bytes, 2 workers",
        "MDS {:.2f} times MosaicML, {:.2f} times LitData's chunks of the same photos; TAR {:.2f} times WebDataset",
        (
            ("shards-warm-2", "2.0 times MosaicML on its own shards"),
            ("shards-warm-2", "1.0 of LitData's chunks, by sqlstream_mds"),
            ("shards-warm-2", "2.0 times WebDataset on its own shards"),
        ),
    ),
    (
        "shards under a limit of 30 % of the data, all rows shuffled: bytes of an epoch, to those of the data",
        "{:.2f} by members of MDS, {:.2f} of TAR",
        tuple(
            ("shards-shuffled", f"a whole shuffle: at most 1.02 of the data, by {ours}")
            for ours in ("sqlstream_mds", "sqlstream_tar")
        ),
    ),
]
"""Lines of the README, as `workloads.HEADLINES` has them."""
