"""sqlstream: loose objects behind the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.peers import mixture as mixtures
from benchmarks.peers import users
from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.data import LINKS_A_FILE, SMALL_BYTES, once, rows_path, write_small_files
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.disks import read_all
from benchmarks.peers.job import Job, Lookup, Stream, names
from sqlstream import Cache, MixedDataset, StreamingDataLoader, StreamingDataset
from sqlstream import Stream as MixedStream
from sqlstream.cache.model.refs import ObjectRef, charged_bytes
from sqlstream.transforms.presets import DecodeResizedImageTransform, LoadFromDiskTransform

NO_SERVER = {"anon": True, "endpoint_url": "http://127.0.0.1:9", "region": "us-east-1"}
"""Of entries that were put into a cache without a download."""

TITLE = "sqlstream"
FORMAT = LOOSE
SETTINGS = (
    "every sample through cache and ledger, shuffled over all rows, StreamingDataLoader, persistent workers; tensors: "
    "DecodeResizedImageTransform"
)


def storage_options(job: Job) -> dict[str, Any]:
    """Return how the server is reached."""
    options = {"anon": True, "endpoint_url": job.endpoint or _filled_from(job), "region": "us-east-1"}
    return options if job.scheme == "s3" else {}


def _filled_from(job: Job) -> str:
    """Return the server that the warm cache was filled from: objects of another endpoint are other objects."""
    return (job.data_path / "sqlstream-cache.endpoint").read_text()


def open_dataset(job: Job, cache: Path, **options: Any) -> StreamingDataset:
    """Return the photos as a dataset."""
    return StreamingDataset(
        job.url("photos.parquet") if job.endpoint else str(job.data_path / "bench" / "photos.parquet"),
        cache,
        columns_to_download=["image"],
        storage_options=storage_options(job),
        source_options={"path_prefix": job.url("")},
        shuffle_seed=job.seed,
        cache_limit=job.limit_bytes,
        num_downloading_workers=job.num_threads or None,
        show_progress=False,
        **options,
    )


def warm_cache(job: Job) -> Path:
    """Return the cache that `prepare` filled; an empty one, where there is a server."""
    return job.work_path / "cache" if job.endpoint else job.data_path / "sqlstream-cache"


def prepare(job: Job) -> None:
    """Fill the cache from the server, once."""

    def fill() -> None:
        (job.data_path / "sqlstream-cache.endpoint").write_text(job.endpoint)
        with open_dataset(job, job.data_path / "sqlstream-cache") as dataset:
            for _ in dataset:
                pass

    once(job.data_path / "sqlstream-cache.made", fill)


def load(dataset: StreamingDataset, job: Job, field: str = "image", **options: Any) -> Stream:
    """Return the dataset's batches."""
    loader = StreamingDataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        persistent_workers=job.has_persistent_workers,
        **options,
    )
    if "collate_fn" in options:
        return Stream(batches=loader, payload=lambda batch: batch)
    return Stream(batches=loader, payload=lambda batch: views_of(batch[field]), rows=lambda batch: batch["__row__"].tolist())


def views_of(values: Any) -> Any:
    """Return packed bytes without a copy, anything else as it is."""
    return values.views() if hasattr(values, "views") else values


def read_by_user(job: Job, cache: Path, read: users.Read, **options: Any) -> Stream:
    """Return photos that a user's transform reads, in lists that a user's function makes."""
    return load(open_dataset(job, cache, transforms=[read], **options), job, collate_fn=users.listed)


def _bytes(job: Job, cache: Path, **options: Any) -> Stream:
    if job.as_users:
        return read_by_user(job, cache, users.Read(), **options)
    return load(open_dataset(job, cache, transforms=[LoadFromDiskTransform(["image"])], **options), job)


def warm_bytes(job: Job) -> Stream:
    """Return the bytes of cached photos."""
    return _bytes(job, warm_cache(job))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos, by our own decoder."""
    if job.as_users:
        return load(open_dataset(job, warm_cache(job), transforms=[users.Decode()]), job, collate_fn=users.stacked)
    transforms = [DecodeResizedImageTransform("image", resolution=(256, 256))]
    return load(open_dataset(job, warm_cache(job), transforms=transforms), job)


def decode_field(sample: dict[str, Any], field: str) -> dict[str, Any]:
    """Decode as all others do."""
    sample[field] = decode_with_pillow(sample[field])
    return sample


def warm_same_decoder(job: Job) -> Stream:
    """Return decoded photos, by the decoder that all share."""
    transforms = [LoadFromDiskTransform(["image"]), partial(decode_field, field="image")]
    return load(open_dataset(job, warm_cache(job), transforms=transforms, seed_transforms=False), job)


def _table(job: Job, name: str) -> Path:
    return job.data_path / "bench" / f"mixture-{name}.parquet"


def prepare_mixture(job: Job) -> None:
    """Write a table for each stream, which names its photos."""

    def write() -> None:
        photos = names(job.num_samples)
        for name, part in mixtures.parts(job.num_samples).items():
            pq.write_table(pa.table({"image": [f"photos/{photos[number]}" for number in part]}), _table(job, name))

    once(job.data_path / "mixture-tables.made", write)


def mix(job: Job, sources: Mapping[str, str], **options: Any) -> Stream:
    """Return the batches of a mixture, as its documentation shows."""
    streams = {
        name: MixedStream(src, proportion=mixtures.WEIGHTS[name], transforms=[users.Read()], show_progress=False, **options)
        for name, src in sources.items()
    }
    num_samples = mixtures.epoch_size(job.num_samples)
    mixed = MixedDataset(streams, epoch_size=num_samples, shuffle_seed=job.seed, dst=job.work_path / "cache")
    loader = StreamingDataLoader(mixed, batch_size=job.batch_size, num_workers=job.num_workers, collate_fn=users.gathered)
    return Stream(batches=loader, payload=lambda batch: batch["image"], num_samples=num_samples)


def mixture(job: Job) -> Stream:
    """Return the bytes of loose local files, three streams of them."""
    return mix(job, {name: str(_table(job, name)) for name in mixtures.WEIGHTS}, columns_to_download=["image"])


def random_access(job: Job) -> Lookup:
    """Return a cached photo by its row."""
    transform = users.Read() if job.as_users else LoadFromDiskTransform(["image"])
    dataset = open_dataset(job, warm_cache(job), transforms=[transform])
    return Lookup(get=lambda index: dataset[index]["image"])


def cold_loose(job: Job) -> Stream:
    """Return the photos from the server, with an empty cache."""
    return _bytes(job, job.work_path / "cache")


def squeeze(job: Job) -> Stream:
    """The same, under a limit."""
    return cold_loose(job)


def squeeze_belady(job: Job) -> Stream:
    """The same, with the policy that knows the order."""
    return _bytes(job, job.work_path / "cache", eviction_policy="belady")


def _rows(job: Job, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        str(rows_path(job.data_path, job.num_rows)),
        job.data_path / "sqlstream-rows",
        columns_to_download=[],
        shuffle_seed=job.seed,
        batch_size=job.batch_size,
        show_progress=False,
        **options,
    )


def prepare_rows(job: Job) -> None:
    """Build the index of the table of rows."""
    _rows(job).close()


def start(job: Job) -> Stream:
    """Return rows of a table whose index is built."""
    if job.as_users:
        return load(_rows(job, transforms=[users.Lower()]), job, collate_fn=users.captions)
    return load(_rows(job), job, "caption")


def start_lazily(job: Job) -> Stream:
    """Return rows of a table without an index."""
    dataset = StreamingDataset(
        str(rows_path(job.data_path, job.num_rows)),
        job.work_path / "cache",
        columns_to_download=[],
        shuffle_seed=job.seed,
        lazy_index_chunk_size=16384,
        show_progress=False,
    )
    return load(dataset, job, "caption")


def _state_path(job: Job) -> Path:
    return job.data_path / f"sqlstream-state-{job.num_rows}.json"


def prepare_resume(job: Job) -> None:
    """Build the index, and write the state of a run that stands in the middle of an epoch."""
    with _rows(job) as dataset:
        num_steps = len(StreamingDataLoader(dataset, batch_size=job.batch_size)) // 2
        _state_path(job).write_text(json.dumps(dataset.state_dict(num_samples=num_steps * job.batch_size)))


def resume(job: Job) -> Stream:
    """Return rows from where a saved state says."""
    stream = start(job)
    assert isinstance(stream.batches, StreamingDataLoader)
    stream.batches.load_state_dict(json.loads(_state_path(job).read_text()))
    return stream


def _entries(job: Job) -> Path:
    return job.data_path / f"sqlstream-entries-{job.num_rows}"


def _row_url(number: int) -> str:
    return f"s3://bench/rows/{number:09}.jpg"


def prepare_entries(job: Job) -> None:
    """Fill a cache with a small object for every row of the table.

    Names in the cache directory and rows of the ledger are real, one each; the bytes are those of a few files with many names,
    so that it takes seconds, not minutes, and so that the kernel's own cost of a million files is not what is measured.
    """

    def fill() -> None:
        with Cache(_entries(job), limit=None, storage_options=NO_SERVER) as cache:
            for start in range(0, job.num_rows, LINKS_A_FILE):
                numbers = range(start, min(start + LINKS_A_FILE, job.num_rows))
                _add_entries(cache, [ObjectRef.of(_row_url(number), identity=cache.identity) for number in numbers])

    once(job.data_path / f"sqlstream-entries-{job.num_rows}.made", fill)
    with _entry_dataset(job):
        pass


def _add_entries(cache: Cache, refs: Sequence[ObjectRef]) -> None:
    paths = [cache._directory.disk.data_path(ref.key, ref.ext) for ref in refs]
    write_small_files(paths)
    charge = charged_bytes(SMALL_BYTES)
    with cache._directory.ledger.transaction() as tx:
        tx.connection.executemany(
            "INSERT INTO entry (key, url, size, charged_bytes, state, tick, ext, created_at) "
            "VALUES (?, ?, ?, ?, 'ready', 0, ?, 0)",
            [(ref.key, ref.url, SMALL_BYTES, charge, ref.ext) for ref in refs],
        )


def _entry_dataset(job: Job) -> StreamingDataset:
    return StreamingDataset(
        str(rows_path(job.data_path, job.num_rows)),
        _entries(job),
        columns_to_download=["url"],
        transforms=[LoadFromDiskTransform(["url"])],
        storage_options=NO_SERVER,
        cache_limit=None,  # else the larger cache is beyond its half, and the smaller one is not: other ways of a hit
        shuffle_seed=job.seed,
        show_progress=False,
    )


def warm_entries(job: Job) -> Stream:
    """Return the bytes of small cached objects; names, ledger and index are in memory, as in an epoch that is under way."""
    read_all(_entries(job), but="data")
    for directory in (_entries(job) / "data").iterdir():
        for file in os.scandir(directory):
            file.stat()
    return load(_entry_dataset(job), job, "url")
