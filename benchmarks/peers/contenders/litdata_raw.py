"""LitData's StreamingRawDataset: loose files, the nearest rival."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from litdata import StreamingRawDataset
from litdata.raw.indexer import BaseIndexer, FileMetadata
from torch.utils.data import DataLoader

from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.contenders.litdata_http import allow_http
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "LitData raw"
FORMAT = LOOSE
SETTINGS = (
    "StreamingRawDataset, the list of files given (nothing is listed), plain DataLoader, shuffle=True, persistent workers; "
    "warm: the local directory itself; cold: cache_files=True, as sqlstream keeps what it brings"
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


def _loader(job: Job, dataset: StreamingRawDataset) -> Stream:
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=job.num_workers > 0,
        worker_init_fn=allow_http if job.endpoint else None,
        multiprocessing_context="spawn"
        if job.num_workers and job.endpoint
        else None,  # its advice: S3 clients hang after a fork
    )
    return Stream(batches=loader, payload=lambda batch: batch)


def warm_bytes(job: Job) -> Stream:
    """Return the files' bytes."""
    return _loader(job, open_local(job))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    return _loader(job, open_local(job, decode_with_pillow))


def random_access(job: Job) -> Lookup:
    """Return a file by its number."""
    return Lookup(get=open_local(job).__getitem__)


def cold_loose(job: Job) -> Stream:
    """Return the photos from the server."""
    allow_http()
    dataset = StreamingRawDataset(
        input_dir="s3://bench/photos",
        cache_dir=str(job.work_path / "cache"),
        storage_options={"endpoint_url": job.endpoint, "aws_access_key_id": "x", "aws_secret_access_key": "x"},
        cache_files=True,
        indexer=KnownFiles(job, "s3://bench/photos"),
        max_concurrent_downloads=job.num_threads or None,
    )
    return _loader(job, dataset)
