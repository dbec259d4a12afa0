"""Cases of three streams mixed at 0.7, 0.2 and 0.1, as users write them, from local data; and how exactly each library resumes.

MosaicML and LitData mix shards of their own only, so HF alone mixes loose files; plain torch draws with a weighted sampler,
which is no mixture of streams, and stands beside.
"""

from __future__ import annotations

from typing import Any

from benchmarks.peers.case import Bar, Case
from benchmarks.peers.resumed import PART_SECONDS

LOOSE = ("sqlstream", "huggingface_files", "plain_torch")
SHARDS = ("sqlstream_mds", "mosaicml", "litdata_chunks", "huggingface")
RESUMING = ("sqlstream", "sqlstream_mds", "mosaicml", "litdata_chunks", "huggingface", "huggingface_files")
STATEFUL = dict.fromkeys(("huggingface", "huggingface_files"), "mixture_with_state")
"""HF has a state by torchdata's loader, as its documentation says."""
WORKERS = (0, 2)
RESUME_SECONDS = 3 * PART_SECONDS + 10


def _case(name: str, title: str, num_workers: int, **fields: Any) -> Case:
    options = {"as_users": True, "num_workers": num_workers}
    return Case(
        name=f"mixture-{name}-{num_workers}",
        group="mixture",
        title=f"three streams mixed at 0.7/0.2/0.1: {title}, {num_workers} workers",
        workload="mixture",
        prepares="prepare_mixture",
        options=options,
        **fields,
    )


def cases() -> list[Case]:
    """Return them."""
    rates: dict[str, Any] = {"measure": "second_epoch", "figure": "samples_per_second", "unit": "samples/s"}
    exact: dict[str, Any] = {"is_higher_better": False, "limit_seconds": RESUME_SECONDS}
    exact |= {"measure": "resumed", "figure": "out_of_place", "unit": "samples of the rest in another place"}
    found: list[Case] = []
    for workers in WORKERS:
        found.append(_case("loose", "a second epoch of loose files, bytes", workers, contenders=LOOSE, **rates))
        found.append(_case("shards", "a second epoch of shards, bytes", workers, contenders=SHARDS, **rates))
    for workers in WORKERS:
        title = "stopped after a third, gone on in a new process"
        found.append(_case("resume", title, workers, contenders=RESUMING, functions=STATEFUL, **exact))
    return found


def _bars() -> list[Bar]:
    bars: list[Bar] = []
    for workers in WORKERS:
        text = "loose files: 1.5 times the best peer that mixes them (HF)"
        bars.append(Bar(case=f"mixture-loose-{workers}", text=text, against=("huggingface_files",), limit=1.5))
        for text, peer, limit in (
            ("shards: 1.2 times MosaicML, on the same MDS files", "mosaicml", 1.2),
            ("shards: 1.2 times HF, on Parquet of the same photos", "huggingface", 1.2),
            ("shards: 0.95 of LitData, on its chunks of the same photos", "litdata_chunks", 0.95),
        ):
            bars.append(
                Bar(case=f"mixture-shards-{workers}", text=text, contender="sqlstream_mds", against=(peer,), limit=limit)
            )
        for ours, kind in (("sqlstream", "loose files"), ("sqlstream_mds", "MDS shards")):
            for figure in ("out_of_place", "lost", "repeated"):
                text = f"resume is exact, {kind}: none {figure.replace('_', ' ')}"
                bars.append(
                    Bar(
                        case=f"mixture-resume-{workers}",
                        text=text,
                        contender=ours,
                        figure=figure,
                        limit=0,
                        is_at_least=False,
                    )
                )
    return bars


BARS = _bars()
