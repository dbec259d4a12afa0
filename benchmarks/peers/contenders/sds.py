"""sds, the streaming dataset of Snap Research: loose objects; only when a checkout is named with SDS=path."""

from __future__ import annotations

import sys
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.peers import users
from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.job import Job, Stream

TITLE = "sds"
FORMAT = LOOSE
SETTINGS = "StreamingDataset over the local directory's table, LoadFromDiskTransform, plain DataLoader, persistent workers"


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes."""
    sys.path.insert(0, job.sds)
    from sds import StreamingDataset
    from sds.transforms.presets import LoadFromDiskTransform

    transform: Any = users.Read() if job.as_users else LoadFromDiskTransform(["image"])
    dataset: Any = StreamingDataset(
        str(job.data_path / "bench" / "photos.parquet"),
        dst=str(job.work_path / "cache"),
        columns_to_download=["image"],
        transforms=[transform],
        shuffle_seed=job.seed,
        cache_limit="1tb",
    )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        num_workers=job.num_workers,
        persistent_workers=job.has_persistent_workers,
        collate_fn=users.listed if job.as_users else None,
    )
    return Stream(batches=loader, payload=lambda batch: batch if job.as_users else batch["image"])
