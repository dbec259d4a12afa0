"""A map-style torch Dataset that opens, reads and closes files: the floor under every system, and torchvision's ImageFolder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow.parquet as pq
import urllib3
from torch.utils.data import ConcatDataset, DataLoader, Dataset, WeightedRandomSampler

from benchmarks.peers import mixture as mixtures
from benchmarks.peers import users
from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.data import rows_path
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "plain torch"
FORMAT = LOOSE
SETTINGS = (
    "map-style Dataset that opens, reads and closes local files, shuffle=True, persistent workers; tensors: Pillow, as "
    "torchvision's ImageFolder decodes by default; rows: a list of dicts; cold HTTP: `__getitems__` gets a batch with 16 "
    "threads in each worker, by one urllib3 pool, and keeps nothing; mixtures: a ConcatDataset with a WeightedRandomSampler"
)
NUM_THREADS = 16
"""Of each worker that gets objects: with two workers as many requests at a time as raw obstore."""


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


class Samples(Dataset[Any]):
    """Samples that name something, through a transform.

    Args:
        samples: Dicts.
        transform: Takes a sample, and gives one.
    """

    def __init__(self, samples: Sequence[users.Sample], transform: Callable[[users.Sample], Any]) -> None:
        self._samples = samples
        self._transform = transform

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self._transform(dict(self._samples[index]))


class Remote(Samples):
    """Samples that name objects of a web server; those of a batch are got together."""

    _pool: urllib3.PoolManager | None = None
    """Of this process, made at its first batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self._pool is None:
            self._pool = urllib3.PoolManager(maxsize=NUM_THREADS)
            self._threads = ThreadPoolExecutor(NUM_THREADS)
        return list(self._threads.map(self._get, indices))

    def _get(self, index: int) -> Any:
        assert self._pool is not None
        answer = self._pool.request("GET", self._samples[index]["image"])
        if answer.status != 200:
            raise RuntimeError(f"{self._samples[index]['image']}: {answer.status}")
        return self._transform({"image": answer.data})


def _files(job: Job, transform: Callable[[users.Sample], Any]) -> Samples:
    return Samples([{"image": str(job.photos / name)} for name in names(job.num_samples)], transform)


def _loader(job: Job, dataset: Dataset[Any], collate: Callable[[Any], Any] | None = None) -> Stream:
    loader = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=job.has_persistent_workers,
        collate_fn=collate,
    )
    return Stream(batches=loader, payload=lambda batch: batch)


def warm_bytes(job: Job) -> Stream:
    """Return the files' bytes."""
    if job.as_users:
        return _loader(job, _files(job, users.Read()), users.listed)
    return _loader(job, Files(job))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    if job.as_users:
        return _loader(job, _files(job, users.Decode()), users.stacked)
    return _loader(job, Files(job, decode_with_pillow))


def cold_loose(job: Job) -> Stream:
    """Return the photos from a web server, as users write it."""
    samples = [{"image": job.url(f"photos/{name}")} for name in names(job.num_samples)]
    return _loader(job, Remote(samples, users.Read()), users.listed)


def mixture(job: Job) -> Stream:
    """Return the files' bytes, drawn with the streams' weights."""
    photos, streams, weights = names(job.num_samples), [], []
    for name, part in mixtures.parts(job.num_samples).items():
        streams.append(Samples([{"image": str(job.photos / photos[number])} for number in part], users.Read()))
        weights += [mixtures.WEIGHTS[name] / len(part)] * len(part)
    num_samples = mixtures.epoch_size(job.num_samples)
    loader: DataLoader[Any] = DataLoader(
        ConcatDataset(streams),
        batch_size=job.batch_size,
        sampler=WeightedRandomSampler(weights, num_samples),
        num_workers=job.num_workers,
        collate_fn=users.gathered,
    )
    return Stream(batches=loader, payload=lambda batch: batch["image"], num_samples=num_samples)


def random_access(job: Job) -> Lookup:
    """Return a file by its number."""
    if job.as_users:
        files = _files(job, users.Read())
        return Lookup(get=lambda index: files[index]["image"])
    return Lookup(get=Files(job).__getitem__)


def _caption(row: users.Sample) -> Any:
    return row["caption"]


def start(job: Job) -> Stream:
    """Return rows of a table as a list of dicts: what a script does that reads its annotations at start."""
    rows = pq.read_table(rows_path(job.data_path, job.num_rows)).to_pylist()
    if job.as_users:
        return _loader(job, Samples(rows, users.Lower()), users.captions)
    return _loader(job, Samples(rows, _caption))
