"""What a thousand samples cost: transactions, statements, requests, calls of the operating system, calls of our own code.

Counted in the thread that iterates, with a storage that answers in it: the same numbers in every run.
"""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import sqlstream
from sqlstream import StreamingDataset
from sqlstream.testing.storage import ScriptedFetcher
from sqlstream.transforms.presets import LoadFromDiskTransform

NUM_SAMPLES, NUM_ACCESSES, OBJECT_BYTES = 1000, 200, 100
CHARGED_BYTES = 4096
SQUEEZED_BYTES = NUM_SAMPLES * CHARGED_BYTES * 3 // 10
assert sqlstream.__file__ is not None
PACKAGE = str(Path(sqlstream.__file__).parent)
SYSTEM = frozenset(("posix", "fcntl", "_io", "io"))
"""Modules whose functions are calls of the operating system, or few of them."""
STATEMENTS = frozenset(("execute", "executemany", "executescript"))


@contextlib.contextmanager
def counted(fetcher: ScriptedFetcher) -> Iterator[dict[str, int]]:
    """Count what the body costs."""
    seen: Counter[str] = Counter()
    ours: dict[object, bool] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code not in ours:
                ours[code] = code.co_filename.startswith(PACKAGE)
            seen["calls"] += ours[code]
            seen["transactions"] += code.co_qualname == "LedgerTransaction.__init__"
            seen["statements"] += code.co_qualname == "Index._fetched"  # SQLite is called by C there, which no profile sees
        elif event == "c_call":
            owner = getattr(argument, "__self__", None)
            if isinstance(owner, sqlite3.Connection | sqlite3.Cursor):
                seen["statements"] += argument.__name__ in STATEMENTS
            else:
                seen["system"] += (getattr(argument, "__module__", None) or "") in SYSTEM

    requests = sum(fetcher.num_gets.values())
    found: dict[str, int] = {}
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
    found |= {"calls": seen["calls"], "statements": seen["statements"], "system calls": seen["system"]}
    found["transactions"] = seen["transactions"]
    found["requests"] = sum(fetcher.num_gets.values()) - requests


@contextlib.contextmanager
def opened(directory: Path, name: str, *, limit: int | None, keeps_paths: bool) -> Iterator[tuple[StreamingDataset, Any]]:
    """Open a dataset of a thousand objects over the storage."""
    table = directory / "rows.csv"
    if not table.exists():
        table.write_text("index,object\n" + "".join(f"{i},http://nowhere.invalid/{i}.bin\n" for i in range(NUM_SAMPLES)))
    objects = {f"http://nowhere.invalid/{i}.bin": b"%d" % i * (OBJECT_BYTES // 4) for i in range(NUM_SAMPLES)}
    with StreamingDataset(
        table,
        directory / name,
        columns_to_download=["object"],
        transforms=[] if keeps_paths else [LoadFromDiskTransform(["object"])],
        shuffle_seed=5,
        batch_size=8,
        cache_limit=limit,
        show_progress=False,
    ) as dataset:
        fetcher = ScriptedFetcher(objects)
        dataset.cache.fetcher = fetcher
        yield dataset, fetcher


def read_all(dataset: StreamingDataset) -> None:
    """Take one epoch."""
    assert sum(1 for _ in dataset) == NUM_SAMPLES


def compute(directory: Path) -> dict[str, Any]:
    """Return the counts of epochs and of single accesses, on average over some."""
    found: dict[str, dict[str, float]] = {}
    for kind, keeps_paths in (("bytes", False), ("paths", True)):
        with opened(directory, kind, limit=None, keeps_paths=keeps_paths) as (dataset, fetcher):
            for what in ("miss", "hit"):
                with counted(fetcher) as counts:
                    read_all(dataset)
                found[f"{NUM_SAMPLES} samples, {kind}, {what}"] = dict(counts)
            with counted(fetcher) as counts:
                for row in range(NUM_ACCESSES):
                    dataset[row]
            found[f"one access, {kind}"] = {name: number / NUM_ACCESSES for name, number in counts.items()}
    with opened(directory, "squeezed", limit=SQUEEZED_BYTES, keeps_paths=False) as (dataset, fetcher):
        read_all(dataset)
        with counted(fetcher) as counts:
            read_all(dataset)
        found[f"{NUM_SAMPLES} samples, bytes, squeeze"] = dict(counts)
    with opened(directory, "bytes", limit=None, keeps_paths=False) as (dataset, fetcher):
        urls = list(fetcher.objects)[:NUM_ACCESSES]
        with counted(fetcher) as counts:
            for url in urls:
                with dataset.cache.pinned(url):
                    pass
        found["one pinned object"] = {name: number / NUM_ACCESSES for name, number in counts.items()}
    return {"counts": found}
