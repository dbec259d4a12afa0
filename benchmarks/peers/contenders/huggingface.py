"""Hugging Face datasets: Arrow files, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from datasets import Dataset, Features, Image, Value, load_dataset, load_from_disk
from datasets.utils.file_utils import xopen
from torch.utils.data import DataLoader

from benchmarks.peers import contenders
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.sqlstream_zip import ARCHIVE
from benchmarks.peers.data import once, rows_path
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "HF datasets"
FORMAT = SHARDS
SETTINGS = "save_to_disk / load_from_disk (Arrow, mapped), plain DataLoader, shuffle=True, persistent workers"


def _place(job: Job) -> Path:
    return job.data_path / "arrow"


def prepare(job: Job) -> None:
    """Write the photos as Arrow."""

    def write() -> None:
        def samples() -> Any:
            for number, name in enumerate(names(job.num_samples)):
                yield {"image": (job.photos / name).read_bytes(), "label": number % 1000}

        features = Features({"image": Value("binary"), "label": Value("int64")})
        Dataset.from_generator(samples, features=features, cache_dir=str(job.work_path / "hf")).save_to_disk(str(_place(job)))

    once(job.data_path / "arrow.made", write)


def prepare_rows(job: Job) -> None:
    """Write the table of rows as Arrow."""

    def write() -> None:
        Dataset(pq.read_table(rows_path(job.data_path, job.num_rows))).save_to_disk(str(_rows(job)))

    once(job.data_path / f"arrow-rows-{job.num_rows}.made", write)


def _rows(job: Job) -> Path:
    return job.data_path / f"arrow-rows-{job.num_rows}"


def _loader(job: Job, dataset: Any, field: str = "image") -> Stream:
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=job.batch_size,
        shuffle=True,
        num_workers=job.num_workers,
        persistent_workers=job.num_workers > 0,
    )
    return Stream(batches=loader, payload=lambda batch: batch[field])


def warm_bytes(job: Job) -> Stream:
    """Return the photos' bytes."""
    return _loader(job, load_from_disk(str(_place(job))))


def prepare_zip(job: Job) -> None:
    """Have the archive written."""
    contenders.load("sqlstream_zip").prepare_zip(job)


def cold_zip(job: Job) -> Stream:
    """Return the photos of a ZIP on the server, as streaming reads one; a single archive is one worker's."""
    url = job.url(ARCHIVE)
    dataset = load_dataset("imagefolder", data_files={"train": [url]}, split="train", streaming=True)
    paths = dataset.cast_column("image", Image(decode=False))  # bytes alone, as for all others

    def batches() -> Iterator[list[bytes]]:
        for row in paths:
            found = row["image"]
            if found["bytes"] is not None:
                yield [found["bytes"]]
                continue
            with xopen(found["path"], "rb") as file:
                yield [file.read()]

    return Stream(batches=batches(), payload=lambda batch: batch)


def _decoded(rows: dict[str, Any]) -> dict[str, Any]:
    return {"image": [decode_with_pillow(data) for data in rows["image"]], "label": rows["label"]}


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    return _loader(job, load_from_disk(str(_place(job))).with_transform(_decoded))


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = load_from_disk(str(_place(job)))
    return Lookup(get=lambda index: dataset[index]["image"])


def start(job: Job) -> Stream:
    """Return rows of a table."""
    return _loader(job, load_from_disk(str(_rows(job))), "caption")
