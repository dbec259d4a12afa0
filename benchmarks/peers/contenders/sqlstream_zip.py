"""sqlstream on one ZIP archive, member by member."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence

from benchmarks.peers import users
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.sqlstream import load
from benchmarks.peers.contenders.sqlstream_mds import open_shards
from benchmarks.peers.data import once
from benchmarks.peers.job import Job, Stream, names

TITLE = "sqlstream, ZIP"
FORMAT = SHARDS
SETTINGS = "the archive as it lies, shards='members': a request a member, as `datasets` reads it"
ARCHIVE = "photos.zip"


def prepare_zip(job: Job) -> None:
    """Write the photos into one archive, stored as they are."""

    def write() -> None:
        with zipfile.ZipFile(job.data_path / "bench" / ARCHIVE, "w") as archive:
            for name in names(job.num_samples):
                archive.write(job.photos / name, name)

    once(job.data_path / "zip.made", write)


class Read:
    """The transform of a user whose members are called `jpg`, and hold bytes."""

    def __call__(self, sample: users.Sample) -> users.Sample:
        """Return the sample."""
        return sample


def listed(samples: Sequence[users.Sample]) -> list[bytes]:
    """Collate bytes: a list of them."""
    return [sample["jpg"] for sample in samples]


def cold_zip(job: Job) -> Stream:
    """Return the photos of the archive on the server."""
    dataset = open_shards(job, job.url(ARCHIVE), job.work_path / "cache", Read(), shards="members")
    return load(dataset, job, collate_fn=listed)
