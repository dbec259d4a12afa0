"""LitData's StreamingDataset: its own optimized chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, optimize

from benchmarks.peers import mixture as mixtures
from benchmarks.peers import users
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.litdata_http import allow_http
from benchmarks.peers.data import once
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "LitData chunks"
FORMAT = SHARDS
SETTINGS = (
    "optimize(chunk_bytes='64MB', for the squeeze '16MB'), StreamingDataset(shuffle=True), its StreamingDataLoader, "
    "persistent workers"
)


def _chunks(job: Job) -> Path:
    return job.data_path / "bench" / "litdata"


def _sample(name: str, photos: str) -> dict[str, Any]:
    return {"image": (Path(photos) / name).read_bytes(), "label": int(name[:6]) % 1000}


def prepare(job: Job) -> None:
    """Write the photos as chunks."""

    photos = names(job.num_samples)
    once(job.data_path / "litdata.made", lambda: _write(job, _chunks(job), photos, "64MB"))
    once(job.data_path / "litdata-small.made", lambda: _write(job, _chunks(job).with_name("litdata-small"), photos, "16MB"))


def _write(job: Job, output: Path, photos: list[str], chunk_bytes: str) -> None:
    optimize(
        fn=partial(_sample, photos=str(job.photos)),
        inputs=photos,
        output_dir=str(output),
        chunk_bytes=chunk_bytes,
        num_workers=1,
    )


def prepare_mixture(job: Job) -> None:
    """Write the photos of each stream."""
    photos = names(job.num_samples)
    for name, part in mixtures.parts(job.num_samples).items():
        output, inputs = _stream(job, name), [photos[number] for number in part]
        once(job.data_path / f"{output.name}.made", partial(_write, job, output, inputs, "64MB"))


def _stream(job: Job, name: str) -> Path:
    return _chunks(job).with_name(f"litdata-mixture-{name}")


def _decoded(sample: dict[str, Any]) -> dict[str, Any]:
    return {"image": decode_with_pillow(sample["image"]), "label": sample["label"]}


def _loader(job: Job, dataset: StreamingDataset) -> Stream:
    loader = StreamingDataLoader(
        dataset, batch_size=job.batch_size, num_workers=job.num_workers, persistent_workers=job.num_workers > 0
    )
    return Stream(batches=loader, payload=lambda batch: batch["image"])


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes."""
    return _loader(job, StreamingDataset(str(_chunks(job)), shuffle=True, seed=job.seed))


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    return _loader(job, StreamingDataset(str(_chunks(job)), shuffle=True, seed=job.seed, transform=_decoded))


def mixture(job: Job) -> Stream:
    """Return the photos' bytes, of three streams."""
    streams = [
        StreamingDataset(str(_stream(job, name)), shuffle=True, seed=job.seed, transform=users.Read())
        for name in mixtures.WEIGHTS
    ]
    combined = CombinedStreamingDataset(streams, seed=job.seed, weights=list(mixtures.WEIGHTS.values()), iterate_over_all=False)
    loader = StreamingDataLoader(combined, batch_size=job.batch_size, num_workers=job.num_workers, collate_fn=users.gathered)
    num_samples = mixtures.epoch_size(job.num_samples)
    return Stream(batches=loader, payload=lambda batch: batch["image"], num_samples=num_samples)


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = StreamingDataset(str(_chunks(job)))
    return Lookup(get=lambda index: dataset[index]["image"])


def _remote(job: Job, name: str = "litdata", **options: Any) -> StreamingDataset:
    allow_http()
    keys = {"endpoint_url": job.endpoint, "aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    return StreamingDataset(
        f"s3://bench/{name}", cache_dir=str(job.work_path / "cache"), shuffle=True, storage_options=keys, **options
    )


def cold_shards(job: Job) -> Stream:
    """Return the photos from chunks on the server."""
    return _loader(job, _remote(job))


def squeeze(job: Job) -> Stream:
    """The same, under a limit."""
    return _loader(job, _remote(job, "litdata-small", max_cache_size=job.limit_bytes))
