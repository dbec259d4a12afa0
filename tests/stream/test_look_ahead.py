"""Lightning takes a batch more than the step was given: a stand-in of its fetcher (the real one: tests/frameworks)."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from sqlstream import MultiStreamDataLoader, StreamingDataLoader
from sqlstream.errors import UnknownLengthError
from tests.stream.mixtures import MixedJob
from tests.stream.multi_jobs import Job, streams_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FETCHER = """
class _DataFetcher:
    def __init__(self, loader, length):
        self.loader, self.length, self.measured, self.prefetch_batches = loader, None, length, 1

    def __iter__(self):
        self.batches, self.iterator, self.length = [], iter(self.loader), self.measured
        if self.length is None:
            self.batches.append(next(self.iterator))
        return self


class _PrefetchDataFetcher(_DataFetcher):
    def __next__(self):
        if not self.batches and self.length is None:
            raise StopIteration
        batch = self.batches.pop(0) if self.batches else next(self.iterator)
        if self.length is None:
            self.batches += [one for one in [next(self.iterator, None)] if one is not None]
        return batch
"""


@pytest.fixture
def fetched() -> Callable[[Any], Iterator[Any]]:
    """Return what iterates a loader as Lightning does."""
    module = types.ModuleType("lightning.pytorch.loops.fetchers")
    exec(FETCHER, module.__dict__)

    def fetch(loader: Any) -> Iterator[Any]:
        try:
            length: int | None = len(loader)
        except UnknownLengthError:
            length = None
        yield from module.__dict__["_PrefetchDataFetcher"](loader, length)

    return fetch


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{"stop": "never", "epoch_size": None}, {}], ids=["no end", "an end"])
def test_a_batch_that_is_held_back_is_not_in_the_state(
    fetched: Callable[[Any], Iterator[Any]], tmp_path: Path, options: dict[str, Any], num_workers: int
) -> None:
    def job(num_workers: int) -> MixedJob:
        return MixedJob(tmp_path, 1, num_workers, 12, **options)

    with job(0) as whole:
        expected = list(islice(whole.loaders[0], 5))
    for num_taken in (3, 5):
        with job(num_workers) as first, job(0) as second:
            assert list(islice(fetched(first.loaders[0]), num_taken)) == expected[:num_taken]
            state = first.loaders[0].state_dict()
            if num_taken < len(expected):
                second.load(state)
                rest = fetched(second.loaders[0])
                assert [next(rest) for _ in expected[num_taken:]] == expected[num_taken:]
            elif options:
                assert state["sample_in_epoch"] == 5 * 12
            else:
                assert (state["epoch"], state["sample_in_epoch"]) == (1, 0)


def test_the_state_counts_what_a_loop_without_a_fetcher_takes_after_one_with_it(
    fetched: Callable[[Any], Iterator[Any]], tmp_path: Path
) -> None:
    with MixedJob(tmp_path, 1, 0, 12, stop="never", epoch_size=None) as job:
        next(fetched(job.loaders[0]))
        (again,) = islice(job.loaders[0], 1)
        assert job.loaders[0].state_dict()["sample_in_epoch"] == 2 * 12
        job.mixed.set_epoch(0)
        assert next(islice(job.loaders[0], 1, None)) == again


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_micro_batch_that_is_held_back_comes_in_the_next_loop(
    fetched: Callable[[Any], Iterator[Any]], tmp_path: Path, num_workers: int
) -> None:
    def rounds(batches: Iterator[Any], num: int) -> list[Any]:
        return [(batch.step, batch.num_accum_rounds_left, batch["rows"]) for batch in islice(batches, num)]

    def job() -> Job:
        return Job(tmp_path, streams_of(a=2, b=1), num_workers=num_workers)

    with job() as whole:
        expected = rounds(iter(whole.loaders[0]), 30)
    with job() as first, job() as second:
        loader: MultiStreamDataLoader | StreamingDataLoader = first.loaders[0]
        iter(loader)  # as Lightning looks whether it can be iterated
        assert rounds(fetched(loader), 13) == expected[:13]
        state = loader.state_dict()
        assert rounds(fetched(loader), 5) == expected[13:18]
        assert rounds(iter(loader), 12) == expected[18:]
        loader._iterator = None
        assert first.round()[0].step == expected[-1][0] + (expected[-1][1] == 0), "with other workers"
        second.loaders[0].load_state_dict(state)
        assert rounds(fetched(second.loaders[0]), 17) == expected[13:]
