"""All ranks of a job in one process, each with a MultiStreamDataLoader, taking their micro-batches in turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from sqlstream import Batch, MultiStreamDataLoader, StreamingDataset, StreamOptions, World
from tests.stream.tables import make_table

SIZES = {"a": 22, "b": 7, "c": 13}
"""Rows of each stream."""


def rows_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function: (epoch, row) of each sample."""
    return {"rows": [(sample["__epoch__"], sample["__row__"]) for sample in samples]}


def opened(folder: Path, num_rows: int, **options: Any) -> StreamingDataset:
    defaults = {"shuffle_seed": 5, "show_progress": False}
    return StreamingDataset(make_table(folder, num_rows), folder / "cache", **{**defaults, **options})


def streams_of(**ratios: float) -> list[StreamOptions]:
    """Streams of 12 samples a step, each with rounds of its own on one rank: 12, 4 and 6."""
    micro = {"a": 1, "b": 3, "c": 2}
    return [
        StreamOptions(name=name, ratio=ratio, mixing_group_id=index, batch_size=12, batch_gpu=micro[name])
        for index, (name, ratio) in enumerate(ratios.items())
    ]


@dataclass(frozen=True)
class Step:
    """What all ranks took in one step."""

    number: int
    samples: frozenset[tuple[str, int, int]]
    """Stream, epoch and row."""
    num_rounds: int


@dataclass
class Job:
    """The ranks."""

    folder: Path
    options: Sequence[StreamOptions]
    num_ranks: int = 1
    num_workers: int = 0
    loader_options: Mapping[str, Any] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=lambda: SIZES)

    def __post_init__(self) -> None:
        defaults = {"collate_fn": rows_of, "multiprocessing_context": "fork" if self.num_workers else None}
        self.loaders = [
            MultiStreamDataLoader(
                [opened(self.folder, self.sizes[one.name]) for one in self.options],
                self.options,
                num_workers=self.num_workers,
                world=World(rank=rank, world_size=self.num_ranks, local_rank=rank, local_world_size=self.num_ranks),
                **{**defaults, **self.loader_options},
            )
            for rank in range(self.num_ranks)
        ]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *exception: object) -> None:
        for loader in self.loaders:
            loader.close()

    def round(self) -> list[Batch]:
        """The next micro-batch of each rank."""
        batches = [next(iter(loader)) for loader in self.loaders]
        assert len({(batch.step, batch.num_accum_rounds_left) for batch in batches}) == 1, "ranks are in step"
        return batches

    def steps(self, num: int) -> Iterator[Step]:
        """The next steps."""
        for _ in range(num):
            rounds = [self.round()]
            while rounds[-1][0].num_accum_rounds_left:
                rounds.append(self.round())
            samples = [(str(batch.stream_name), *row) for batches in rounds for batch in batches for row in batch["rows"]]
            first = rounds[0][0]
            assert len(samples) == first.num_samples_in_step
            assert first.step is not None
            yield Step(first.step, frozenset(samples), len(rounds))

    def state(self) -> dict[str, Any]:
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states), "ranks disagree on where they are"
        return states[0]

    def load(self, state: Mapping[str, Any], **options: Any) -> None:
        for loader in self.loaders:
            loader.load_state_dict(state, **options)


def samples_of(steps: Iterator[Step]) -> list[tuple[int, frozenset[tuple[str, int, int]]]]:
    """Numbers and samples, without the rounds, which depend on the ranks."""
    return [(step.number, step.samples) for step in steps]


def names_of(loader: MultiStreamDataLoader, num: int) -> str:
    """The streams of the next batches, by their first letters."""
    return "".join(str(batch.stream_name)[0] for batch in islice(loader, num))
