"""A map-style torch Dataset that opens, reads and closes files: the floor under every system, and torchvision's ImageFolder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow.parquet as pq
from torch.utils.data import DataLoader, Dataset

from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.data import rows_path
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "plain torch"
FORMAT = LOOSE
SETTINGS = (
    "map-style Dataset that opens, reads and closes local files, shuffle=True, persistent workers; tensors: Pillow, as "
    "torchvision's ImageFolder decodes by default; rows: a list of dicts"
)


class Files(Dataset[Any]):
    """Local files, as bytes or decoded."""

    def __init__(self, job: Job, decode: Callable[[bytes], Any] | None = None) -> None:
        self._paths = [str(job.photos / name) for name in names(job.num_samples)]
        self._decode = decode

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> Any:
        with open(self._paths[index], "rb") as file:
            data = file.read()
        return data if self._decode is None else self._decode(data)


def _loader(job: Job, dataset: Dataset[Any]) -> Stream:
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=job.num_workers > 0,
    )
    return Stream(batches=loader, payload=lambda batch: batch)


def warm_bytes(job: Job) -> Stream:
    """Return the files' bytes."""
    return _loader(job, Files(job))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    return _loader(job, Files(job, decode_with_pillow))


def random_access(job: Job) -> Lookup:
    """Return a file by its number."""
    return Lookup(get=Files(job).__getitem__)


class Rows(Dataset[Any]):
    """A table as a list of dicts: what a script does that reads its annotations at start."""

    def __init__(self, job: Job) -> None:
        self._rows = pq.read_table(rows_path(job.data_path, job.num_rows)).to_pylist()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]["caption"]


def start(job: Job) -> Stream:
    """Return rows of a table."""
    return _loader(job, Rows(job))
