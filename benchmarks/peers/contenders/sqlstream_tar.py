"""sqlstream on the archives of WebDataset, as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import contenders, users
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.sqlstream import load
from benchmarks.peers.contenders.sqlstream_mds import open_shards
from benchmarks.peers.job import Job, Lookup, Stream
from sqlstream import StreamingDataset

TITLE = "sqlstream, TAR"
FORMAT = SHARDS
SETTINGS = (
    "TAR shards of 500 photos, as WebDataset wrote them; shards shuffled, and the rows of 64 of them mixed; shards='auto'"
)


def prepare(job: Job) -> None:
    """Have WebDataset write its archives."""
    contenders.load("webdataset").prepare(job)


def prepare_shuffled(job: Job) -> None:
    """Have WebDataset write small archives."""
    contenders.load("webdataset").prepare_shuffled(job)


class Read:
    """The transform of a user whose archives call the picture `jpg`, and hold its bytes."""

    def __call__(self, sample: users.Sample) -> users.Sample:
        """Return the sample."""
        return sample


def listed(samples: Sequence[users.Sample]) -> list[bytes]:
    """Collate bytes: a list of them."""
    return [sample["jpg"] for sample in samples]


def _local(job: Job) -> StreamingDataset:
    return open_shards(job, str(_tars(job) / "*.tar"), job.work_path / "cache", Read())


def _tars(job: Job) -> Path:
    return job.data_path / "bench" / "tar"


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes, of local shards."""
    return load(_local(job), job, collate_fn=listed)


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = _local(job)
    return Lookup(get=lambda index: dataset[index]["jpg"])


def _remote(job: Job, folder: str, **options: Any) -> Stream:
    last = len(list(_tars(job).with_name(folder).glob("*.tar"))) - 1
    src = job.url(f"{folder}/{{0000..{last:04}}}.tar")
    return load(open_shards(job, src, job.work_path / "cache", Read(), **options), job, collate_fn=listed)


def cold_shards(job: Job) -> Stream:
    """Return the photos from shards on the server."""
    return _remote(job, "tar")


def cold_hundred(job: Job) -> Stream:
    """The same from a hundred shards."""
    return _remote(job, job.shuffled_folder("tar"))


def shuffled_shards(job: Job) -> Stream:
    """The same, all samples shuffled."""
    return _remote(job, job.shuffled_folder("tar"), shuffle_block_size=None)
