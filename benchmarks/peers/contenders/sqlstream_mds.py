"""sqlstream on the shards of MosaicML Streaming, as they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.peers import contenders, users
from benchmarks.peers import mixture as mixtures
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.sqlstream import load, mix, storage_options
from benchmarks.peers.job import Job, Lookup, Stream
from sqlstream import StreamingDataset
from sqlstream.transforms.base import Transform

TITLE = "sqlstream, MDS"
FORMAT = SHARDS
SETTINGS = "MDS shards of 64 MiB, as MosaicML wrote them; shards shuffled, and the rows of 64 of them mixed; shards='auto'"
FOLDER, INDEX = "mds", "index.json"


def prepare(job: Job) -> None:
    """Have MosaicML write its shards."""
    contenders.load("mosaicml").prepare(job)


def prepare_shuffled(job: Job) -> None:
    """Have MosaicML write small shards."""
    contenders.load("mosaicml").prepare_shuffled(job)


def open_shards(job: Job, src: str, cache: Path, transform: Transform, **options: Any) -> StreamingDataset:
    """Return the photos of shards as a dataset."""
    return StreamingDataset(
        src,
        cache,
        transforms=[transform],
        storage_options=storage_options(job) if job.endpoint else {},
        shuffle_seed=job.seed,
        cache_limit=job.limit_bytes,
        show_progress=False,
        **options,
    )


def _local(job: Job) -> StreamingDataset:
    return open_shards(job, str(job.data_path / "bench" / FOLDER / INDEX), job.work_path / "cache", users.Read())


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes, of local shards."""
    return load(_local(job), job, collate_fn=users.listed)


def prepare_mixture(job: Job) -> None:
    """Have MosaicML write the shards of the streams."""
    contenders.load("mosaicml").prepare_mixture(job)


def mixture(job: Job) -> Stream:
    """Return the photos' bytes, of three streams of local shards."""
    folder = job.data_path / "bench"
    return mix(job, {name: str(folder / f"mds-mixture-{name}" / INDEX) for name in mixtures.WEIGHTS})


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = _local(job)
    return Lookup(get=lambda index: dataset[index]["image"])


def _remote(job: Job, folder: str, **options: Any) -> Stream:
    dataset = open_shards(job, job.url(f"{folder}/{INDEX}"), job.work_path / "cache", users.Read(), **options)
    return load(dataset, job, collate_fn=users.listed)


def cold_shards(job: Job) -> Stream:
    """Return the photos from shards on the server."""
    return _remote(job, FOLDER)


def cold_hundred(job: Job) -> Stream:
    """The same from a hundred shards."""
    return _remote(job, job.shuffled_folder(FOLDER))


def shuffled_shards(job: Job) -> Stream:
    """The same, all samples shuffled."""
    return _remote(job, job.shuffled_folder(FOLDER), shuffle_block_size=None)
