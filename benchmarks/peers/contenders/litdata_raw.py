"""LitData's StreamingRawDataset: loose files, the nearest rival."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from litdata import StreamingRawDataset
from litdata.raw.indexer import BaseIndexer, FileMetadata
from torch.utils.data import DataLoader

from benchmarks.peers import users
from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.contenders.litdata_http import allow_http
from benchmarks.peers.data import once, write_small_files
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "LitData raw"
FORMAT = LOOSE
SETTINGS = (
    "StreamingRawDataset, the list of files given (nothing is listed), plain DataLoader, shuffle=True, persistent workers; "
    "warm: the local directory itself; cold: cache_files=True, as sqlstream keeps what it brings; over HTTP: as S3, from the "
    "same server; rows: as many files of 1 KB, by the index that it keeps"
)


class KnownFiles(BaseIndexer):
    """The photos, without a listing that the server could not give."""

    def __init__(self, job: Job, prefix: str) -> None:
        self._files = [FileMetadata(f"{prefix}/{name}", (job.photos / name).stat().st_size) for name in names(job.num_samples)]

    def discover_files(self, input_dir: str | None, storage_options: dict[str, Any] | None) -> list[FileMetadata]:
        """Return them."""
        return self._files

    def build_or_load_index(self, *args: Any, **kwargs: Any) -> list[FileMetadata]:
        """Return them."""
        return self._files


def open_local(job: Job, transform: Callable[[Any], Any] | None = None) -> StreamingRawDataset:
    """Return the photos of the local directory."""
    indexer = KnownFiles(job, str(job.photos))
    return StreamingRawDataset(
        input_dir=str(job.photos), cache_dir=str(job.work_path / "index"), transform=transform, indexer=indexer
    )


def _loader(job: Job, dataset: StreamingRawDataset, collate: Callable[[Any], Any] | None = None) -> Stream:
    is_spawned = job.num_workers and job.endpoint and not job.as_users  # its advice: S3 clients hang after a fork
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=job.has_persistent_workers,
        worker_init_fn=allow_http if job.endpoint else None,
        multiprocessing_context="spawn" if is_spawned else None,
        collate_fn=collate,
    )
    return Stream(batches=loader, payload=lambda batch: batch)


def warm_bytes(job: Job) -> Stream:
    """Return the files' bytes."""
    if job.endpoint:  # users: a second epoch, of files that it keeps
        return cold_loose(job)
    return _loader(job, open_local(job))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    if job.endpoint:
        return _loader(job, _remote(job, users.Wrap(users.Decode())), users.stacked)
    return _loader(job, open_local(job, decode_with_pillow))


def random_access(job: Job) -> Lookup:
    """Return a file by its number."""
    if job.as_users:
        dataset = open_local(job, users.Wrap(users.Read()))
        return Lookup(get=lambda index: dataset[index]["image"])
    return Lookup(get=open_local(job).__getitem__)


def _remote(job: Job, transform: Callable[[Any], Any] | None = None) -> StreamingRawDataset:
    allow_http()
    return StreamingRawDataset(
        input_dir="s3://bench/photos",
        cache_dir=str(job.work_path / "cache"),
        storage_options={"endpoint_url": job.endpoint, "aws_access_key_id": "x", "aws_secret_access_key": "x"},
        cache_files=True,
        indexer=KnownFiles(job, "s3://bench/photos"),
        max_concurrent_downloads=job.num_threads or None,
        transform=transform,
    )


def cold_loose(job: Job) -> Stream:
    """Return the photos from the server."""
    if job.as_users:
        return _loader(job, _remote(job, users.Wrap(users.Read())), users.listed)
    return _loader(job, _remote(job))


def _small(job: Job) -> Path:
    return job.data_path / f"litdata-files-{job.num_rows}"


def _open_small(job: Job) -> StreamingRawDataset:
    cache = job.data_path / f"litdata-index-{job.num_rows}"
    return StreamingRawDataset(input_dir=str(_small(job)), cache_dir=str(cache), transform=users.Wrap(users.Read()))


def prepare_rows(job: Job) -> None:
    """Write as many files as the table has rows, and the index of them."""

    def write() -> None:
        write_small_files([str(_small(job) / f"{number // 1000:04}" / f"{number:09}.txt") for number in range(job.num_rows)])
        _open_small(job)

    once(job.data_path / f"litdata-files-{job.num_rows}.made", write)


def start(job: Job) -> Stream:
    """Return small files by an index that is built."""
    return _loader(job, _open_small(job), users.listed)
