"""Hugging Face datasets: Arrow files, mapped into memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Features, Image, Value, config, interleave_datasets, load_dataset, load_from_disk
from datasets.utils.file_utils import xopen
from torch.utils.data import DataLoader

from benchmarks.peers import contenders, users
from benchmarks.peers import mixture as mixtures
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.contenders.sqlstream_zip import ARCHIVE
from benchmarks.peers.data import once, rows_path
from benchmarks.peers.decode import decode_with_pillow
from benchmarks.peers.job import Job, Lookup, Stream, names

TITLE = "HF datasets"
FORMAT = SHARDS
SETTINGS = (
    "save_to_disk / load_from_disk (Arrow, mapped), plain DataLoader, shuffle=True, persistent workers; mixtures: "
    "load_dataset('parquet', streaming=True), files of 500 photos, row groups of 100, shuffle(buffer_size=100), "
    "interleave_datasets(probabilities=…), first_exhausted, without its sleeps of 5 s at the end of an "
    "epoch of Parquet; to resume: torchdata's StatefulDataLoader"
)
FILE_ROWS, GROUP_ROWS = 500, 100
MIN_FILES = 2
"""Of a stream: workers share its files."""
BUFFER = 100
"""Samples; what is in it at the end of an epoch was read for nothing."""


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


def _stream(job: Job, name: str) -> Path:
    return job.data_path / "bench" / f"parquet-mixture-{name}"


def prepare_mixture(job: Job) -> None:
    """Write the photos of each stream as Parquet."""

    def write() -> None:
        photos = names(job.num_samples)
        for name, part in mixtures.parts(job.num_samples).items():
            _stream(job, name).mkdir(parents=True, exist_ok=True)
            num_rows = min(FILE_ROWS, -(-len(part) // MIN_FILES))
            for start in range(0, len(part), num_rows):
                images = [(job.photos / photos[number]).read_bytes() for number in part[start : start + num_rows]]
                path = _stream(job, name) / f"{start:06}.parquet"
                pq.write_table(pa.table({"image": images}), path, row_group_size=GROUP_ROWS, compression="none")

    once(job.data_path / "parquet-mixture.made", write)


def _mixed(job: Job) -> Any:
    config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    streams = []
    for name in mixtures.WEIGHTS:
        files = sorted(str(path) for path in _stream(job, name).glob("*.parquet"))
        stream = load_dataset("parquet", data_files=files, split="train", streaming=True)
        streams.append(stream.shuffle(seed=job.seed, buffer_size=BUFFER))
    probabilities = list(mixtures.WEIGHTS.values())
    return interleave_datasets(streams, probabilities=probabilities, seed=job.seed).map(users.Read())


def load_mixed(job: Job, dataset: Any, loader: type[DataLoader[Any]]) -> Stream:
    """Return the batches of a mixture."""
    batches = loader(dataset, batch_size=job.batch_size, num_workers=job.num_workers, collate_fn=users.gathered)
    num_samples = mixtures.epoch_size(job.num_samples)
    return Stream(batches=batches, payload=lambda batch: batch["image"], num_samples=num_samples)


def mixture(job: Job) -> Stream:
    """Return the photos' bytes, of three streams."""
    return load_mixed(job, _mixed(job), DataLoader)


def mixture_with_state(job: Job) -> Stream:
    """The same, by a loader that has a state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return load_mixed(job, _mixed(job), StatefulDataLoader)


def random_access(job: Job) -> Lookup:
    """Return a photo by its number."""
    dataset = load_from_disk(str(_place(job)))
    return Lookup(get=lambda index: dataset[index]["image"])


def start(job: Job) -> Stream:
    """Return rows of a table."""
    return _loader(job, load_from_disk(str(_rows(job))), "caption")
