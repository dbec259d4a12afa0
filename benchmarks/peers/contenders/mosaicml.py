"""MosaicML Streaming: its own MDS shards."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming import Stream as MixedStream
from streaming.base.util import clean_stale_shared_memory

from benchmarks.peers import mixture as mixtures
from benchmarks.peers import users
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.data import once, rows_path
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "MosaicML"
FORMAT = SHARDS
SETTINGS = (
    "MDS shards of 64 MiB, shuffle=True (py1e, its default), StreamingDataLoader, persistent workers; cold: remote=s3://, "
    "local empty, its S3 client dropped before workers fork (they would share a connection and wait a minute); squeeze: "
    "shards of 16 MiB (its limit must hold four), shuffled within two shards, 128 samples ahead: with its defaults a shard is "
    "fetched again for nearly every sample"
)


SMALL_BYTES = 1 << 24
"""Of the squeeze's shards: its limit must be at least four of them."""
PHOTO_BYTES = 44_700
"""Mean size of a photo in a shard, by which a hundred shards have as many bytes each."""
SQUEEZE_BLOCK = 700
"""Samples that are shuffled together under a limit: two shards."""


def _shards(job: Job) -> Path:
    return job.data_path / "bench" / "mds"


def prepare(job: Job) -> None:
    """Write the photos as MDS."""

    _write(job, "mds")
    _write(job, "mds-small", size_limit=SMALL_BYTES)


def _write(job: Job, folder: str, part: range | None = None, **options: Any) -> None:
    photos = names(job.num_samples)

    def write() -> None:
        out = str(_shards(job).with_name(folder))
        with MDSWriter(out=out, columns={"image": "bytes", "label": "int"}, exist_ok=True, **options) as writer:
            for number in range(job.num_samples) if part is None else part:
                writer.write({"image": (job.photos / photos[number]).read_bytes(), "label": number % 1000})

    once(job.data_path / f"{folder}.made", write)


def prepare_shuffled(job: Job) -> None:
    """Write the photos as small shards."""
    _write(job, job.shuffled_folder("mds"), size_limit=job.shuffled_shard * PHOTO_BYTES)


def prepare_mixture(job: Job) -> None:
    """Write the photos of each stream."""
    for name, part in mixtures.parts(job.num_samples).items():
        _write(job, f"mds-mixture-{name}", part)


def prepare_rows(job: Job) -> None:
    """Write the table of rows as MDS."""

    def write() -> None:
        columns = {"index": "str", "url": "str", "caption": "str", "score": "float64"}
        with MDSWriter(out=str(_rows(job)), columns=columns, exist_ok=True) as writer:
            for batch in pq.ParquetFile(rows_path(job.data_path, job.num_rows)).iter_batches():
                for row in batch.to_pylist():
                    writer.write(row)

    once(job.data_path / f"mds-rows-{job.num_rows}.made", write)


def _rows(job: Job) -> Path:
    return job.data_path / f"mds-rows-{job.num_rows}"


def _dataset(job: Job, kind: type[StreamingDataset] = StreamingDataset, **options: Any) -> StreamingDataset:
    clean_stale_shared_memory()
    return kind(batch_size=job.batch_size, shuffle=True, shuffle_seed=job.seed, **options)


def _loader(job: Job, dataset: StreamingDataset, field: str = "image", collate: Callable[[Any], Any] | None = None) -> Stream:
    loader = StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        persistent_workers=job.has_persistent_workers,
        collate_fn=collate,
    )
    return Stream(batches=loader, payload=lambda batch: batch if collate else batch[field])


class Decoded(StreamingDataset):  # type: ignore[misc]  # untyped
    """Decodes in `__getitem__`, as its documentation shows."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        return {"image": decode_with_pillow(sample["image"]), "label": sample["label"]}


class Transformed(StreamingDataset):  # type: ignore[misc]  # untyped
    """Transforms in `__getitem__`, as its documentation shows."""

    def __init__(self, *, transform: Callable[[users.Sample], Any], **options: Any) -> None:
        super().__init__(**options)
        self._transform = transform

    def __getitem__(self, index: int) -> Any:
        return self._transform(super().__getitem__(index))


def _transformed(job: Job, shards: Path, transform: Callable[[users.Sample], Any]) -> StreamingDataset:
    return _dataset(job, Transformed, local=str(shards), transform=transform)


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes."""
    if job.as_users:
        return _loader(job, _transformed(job, _shards(job), users.Read()), collate=users.listed)
    return _loader(job, _dataset(job, local=str(_shards(job))))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    if job.as_users:
        return _loader(job, _transformed(job, _shards(job), users.Decode()), collate=users.stacked)
    return _loader(job, _dataset(job, Decoded, local=str(_shards(job))))


def mixture(job: Job) -> Stream:
    """Return the photos' bytes, of three streams."""
    streams = [
        MixedStream(local=str(_shards(job).with_name(f"mds-mixture-{name}")), proportion=weight)
        for name, weight in mixtures.WEIGHTS.items()
    ]
    num_samples = mixtures.epoch_size(job.num_samples)
    dataset = _dataset(job, Transformed, streams=streams, epoch_size=num_samples, transform=users.Read())
    return replace(_loader(job, dataset, collate=users.gathered), payload=lambda batch: batch["image"], num_samples=num_samples)


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = _transformed(job, _shards(job), users.Read()) if job.as_users else _dataset(job, local=str(_shards(job)))
    return Lookup(get=lambda index: dataset[index]["image"])


def _remote(job: Job, name: str = "mds", **options: Any) -> StreamingDataset:
    os.environ |= {"S3_ENDPOINT_URL": job.endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    dataset = _dataset(job, remote=f"s3://bench/{name}", local=str(job.work_path / "cache"), **options)
    for stream in dataset.streams:  # workers that fork would read each other's answers, and wait for its timeout of 60 s
        if hasattr(stream, "_downloader"):  # the drop-in's has none
            stream._downloader.clean_up()
    return dataset


def cold_shards(job: Job) -> Stream:
    """Return the photos from shards on the server."""
    if job.as_users:
        return _loader(job, _remote(job, kind=Transformed, transform=users.Read()), collate=users.listed)
    return _loader(job, _remote(job))


def cold_hundred(job: Job) -> Stream:
    """The same from a hundred shards."""
    dataset = _remote(job, job.shuffled_folder("mds"), kind=Transformed, transform=users.Read())
    return _loader(job, dataset, collate=users.listed)


def squeeze(job: Job) -> Stream:
    """The same, under a limit."""
    near = {"num_canonical_nodes": 1, "shuffle_block_size": SQUEEZE_BLOCK, "predownload": 2 * job.batch_size}
    return _loader(job, _remote(job, "mds-small", cache_limit=job.limit_bytes, **near))


def shuffled_shards(job: Job) -> Stream:
    """The same, all samples shuffled."""
    whole = {"num_canonical_nodes": 1, "shuffle_block_size": job.num_samples, "predownload": 2 * job.batch_size}
    return _loader(job, _remote(job, job.shuffled_folder("mds"), cache_limit=job.limit_bytes, **whole))


def start(job: Job) -> Stream:
    """Return rows of a table."""
    if job.as_users:
        return _loader(job, _transformed(job, _rows(job), users.Lower()), collate=users.captions)
    return _loader(job, _dataset(job, local=str(_rows(job))), "caption")
