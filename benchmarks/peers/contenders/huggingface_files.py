"""Hugging Face datasets over loose files: a table of paths in memory."""

from __future__ import annotations

from typing import Any

from datasets import Dataset, interleave_datasets
from torch.utils.data import DataLoader

from benchmarks.peers import mixture as mixtures
from benchmarks.peers import users
from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.contenders.huggingface import load_mixed
from benchmarks.peers.job import Job, Stream, names

TITLE = "HF datasets, files"
FORMAT = LOOSE
SETTINGS = (
    "map-style datasets of paths, shuffle(seed), interleave_datasets(probabilities=…), first_exhausted, the transform by "
    "with_transform, plain DataLoader in that order; to resume: torchdata's StatefulDataLoader"
)


def _read(rows: dict[str, list[str]]) -> dict[str, list[Any]]:
    read = users.Read()
    return {"image": [read({"image": path})["image"] for path in rows["image"]]}


def _mixed(job: Job) -> Any:
    photos = names(job.num_samples)
    streams = [
        Dataset.from_dict({"image": [str(job.photos / photos[number]) for number in part]}).shuffle(seed=job.seed)
        for part in mixtures.parts(job.num_samples).values()
    ]
    probabilities = list(mixtures.WEIGHTS.values())
    return interleave_datasets(streams, probabilities=probabilities, seed=job.seed).with_transform(_read)


def mixture(job: Job) -> Stream:
    """Return the files' bytes, of three streams."""
    return load_mixed(job, _mixed(job), DataLoader)


def mixture_with_state(job: Job) -> Stream:
    """The same, by a loader that has a state."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return load_mixed(job, _mixed(job), StatefulDataLoader)
