"""WebDataset: TAR shards, read in sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import webdataset as wds

from benchmarks.peers import users
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.data import once
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Stream, names

TITLE = "WebDataset"
FORMAT = SHARDS
SETTINGS = (
    "TAR shards of 500 photos, shards shuffled, a buffer of 1000 samples (its order is not a shuffle of all rows), batches "
    "made in workers, WebLoader; cold: over HTTP by curl, it does not sign S3 requests"
)
SHARD = 500


def _shards(job: Job) -> Path:
    return job.data_path / "bench" / "tar"


def prepare(job: Job) -> None:
    """Write the photos as TAR."""

    _write(job, "tar", SHARD)


def prepare_shuffled(job: Job) -> None:
    """Write the photos as small archives."""
    _write(job, job.shuffled_folder("tar"), job.shuffled_shard)


def _write(job: Job, folder: str, maxcount: int) -> None:
    def write() -> None:
        out = _shards(job).with_name(folder)
        out.mkdir(parents=True, exist_ok=True)
        with wds.ShardWriter(str(out / "%04d.tar"), maxcount=maxcount, verbose=0) as writer:
            for name in names(job.num_samples):
                writer.write({"__key__": name[:6], "jpg": (job.photos / name).read_bytes()})

    once(job.data_path / f"{folder}.made", write)


def _bytes_of(sample: tuple[bytes]) -> bytes:
    return sample[0]


def _decoded(sample: tuple[bytes]) -> Any:
    return decode_with_pillow(sample[0])


def _transformed(transform: users.Read) -> Any:
    wrapped = users.Wrap(transform)
    return lambda sample: wrapped(sample[0])


def _stream(job: Job, urls: list[str], make: Any, collate: Any = list, **options: Any) -> Stream:
    dataset = wds.WebDataset(urls, shardshuffle=len(urls), workersplitter=wds.split_by_worker, empty_check=False, **options)
    dataset = dataset.shuffle(1000).to_tuple("jpg").map(make).batched(job.batch_size, collation_fn=collate)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=job.num_workers, persistent_workers=job.has_persistent_workers)
    return Stream(batches=loader, payload=lambda batch: batch)


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes."""
    if job.as_users:
        return _stream(job, sorted(map(str, _shards(job).glob("*.tar"))), _transformed(users.Read()), users.listed)
    return _stream(job, sorted(map(str, _shards(job).glob("*.tar"))), _bytes_of)


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    if job.as_users:
        return _stream(job, sorted(map(str, _shards(job).glob("*.tar"))), _transformed(users.Decode()), users.stacked)
    return _stream(job, sorted(map(str, _shards(job).glob("*.tar"))), _decoded, torch.stack)


def cold_shards(job: Job) -> Stream:
    """Return the photos from shards on the server."""
    urls = [f"{job.endpoint}/bench/tar/{path.name}" for path in sorted(_shards(job).glob("*.tar"))]
    if job.as_users:
        return _stream(job, urls, _transformed(users.Read()), users.listed)
    return _stream(job, urls, _bytes_of)


def _hundred(job: Job) -> list[str]:
    folder = job.shuffled_folder("tar")
    return [f"{job.endpoint}/bench/{folder}/{path.name}" for path in sorted(_shards(job).with_name(folder).glob("*.tar"))]


def cold_hundred(job: Job) -> Stream:
    """The same from a hundred shards."""
    return _stream(job, _hundred(job), _transformed(users.Read()), users.listed)


def shuffled_shards(job: Job) -> Stream:
    """The same, with its cache; its buffer of 1000 samples is no shuffle of all."""
    cache = job.work_path / "cache"
    cache.mkdir()
    return _stream(job, _hundred(job), _bytes_of, cache_dir=str(cache), cache_size=job.limit_bytes)
