"""One process has one set of global generators: threads that make samples take turns, and the trainer's state comes back."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.chain.global_rng import GeneratorLoan, GeneratorTurns, GlobalGenerators
from sqlstream.transforms import rng
from sqlstream.transforms.cached import CacheTransform
from tests.handlers import HandlerError, Injector, handler, raised_everywhere
from tests.stream.kit import global_states, whole
from tests.stream.tables import make_table

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def draw_slowly(sample: dict[str, Any]) -> dict[str, Any]:
    """Draws that leave other threads time to draw in between."""
    sample["drawn"] = [(random.random(), random.gauss(), np.random.randn(), float(torch.rand(()))) for _ in range(3)]
    time.sleep(0)
    sample["late"] = random.random(), np.random.rand(), float(torch.rand(())), rng(sample).random()
    return sample


def make_dataset(folder: Path, num: int = 96, **options: Any) -> StreamingDataset:
    options.setdefault("transforms", [draw_slowly])
    return StreamingDataset(make_table(folder, num), folder / "cache", show_progress=False, **options)


def test_threads_draw_what_one_thread_draws_and_leave_the_trainers_generators_alone(tmp_path: Path) -> None:
    with make_dataset(tmp_path) as dataset, ThreadPoolExecutor(8) as pool:
        alone = [dataset[row] for row in range(96)]
        before = global_states()
        for _ in range(3):
            assert list(pool.map(dataset.__getitem__, range(96))) == alone
        assert global_states() == before


def test_loaders_in_several_threads_each_put_back_what_the_trainer_had(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
        datasets = [stack.enter_context(make_dataset(tmp_path, 24, shuffle_seed=number)) for number in range(4)]
        loaders = [StreamingDataLoader(dataset, batch_size=4, collate_fn=whole) for dataset in datasets]
        alone = [list(loader) for loader in loaders]
        for loader in loaders:
            loader.set_epoch(0)
        running = [iter(loader) for loader in loaders]  # torch draws here
        before = global_states()
        assert list(pool.map(list, running)) == alone
        assert global_states() == before


@contextlib.contextmanager
def taken(turns: GeneratorTurns) -> Iterator[None]:
    """Have a turn as a sample has it."""
    with turns.lock:
        turns.begin()
        yield
        turns.is_taken = False


def test_that_threads_take_turns_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    turns = GeneratorTurns()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with taken(turns):
                other = threading.Thread(target=turns.wait)
                other.start()
                while not turns._has_warned:
                    pass
            other.join()
    assert [record.message for record in caplog.records if "run one at a time" in record.message] == [caplog.messages[0]]


def test_a_transform_that_waits_for_a_thread_that_draws_ends_in_an_error(tmp_path: Path) -> None:
    turns, errors = GeneratorTurns(patience_seconds=0.05), []

    def draw_in_another_thread() -> None:
        try:
            turns.wait()
        except ConfigError as error:
            errors.append(str(error))

    with taken(turns):
        other = threading.Thread(target=draw_in_another_thread)
        other.start()
        other.join()
    assert "must not wait for a thread that makes samples" in errors[0]
    turns.wait()


def test_a_child_forked_while_another_thread_draws_makes_samples_of_its_own(tmp_path: Path) -> None:
    is_drawing, may_end = threading.Event(), threading.Event()

    def draw_and_wait(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 0 and os.getpid() == trainer:
            is_drawing.set()
            may_end.wait()
        return draw_slowly(sample)

    trainer = os.getpid()
    with make_dataset(tmp_path, 8, transforms=[draw_and_wait]) as dataset:
        expected = dataset[1]
        thread = threading.Thread(target=lambda: dataset[0])
        thread.start()
        is_drawing.wait()
        receiver, sender = multiprocessing.get_context("fork").Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(target=lambda: sender.send(dataset[1]))
        child.start()
        assert receiver.poll(60)
        assert receiver.recv() == expected
        child.join()
        may_end.set()
        thread.join()


def test_a_forking_transform_has_the_generators_in_its_child_too(tmp_path: Path) -> None:
    def fork_and_draw() -> tuple[float, float]:
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            os.write(sender, repr(np.random.rand()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        drawn = float(os.read(receiver, 100))
        os.close(receiver)
        os.close(sender)
        return drawn, np.random.rand()

    expected = drawn_by(np.random.rand)  # Python seeds its own anew in a child
    assert drawn_by(fork_and_draw) == (expected, expected)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_dataset_that_a_transform_reads_draws_apart_from_it_in_workers_too(tmp_path: Path, num_workers: int) -> None:
    with make_dataset(tmp_path, 8) as other:

        def read_other(sample: dict[str, Any]) -> dict[str, Any]:
            sample["first"] = random.random()
            sample["other"] = str(other[3])
            return draw_slowly(sample)

        def without(sample: dict[str, Any]) -> dict[str, Any]:
            sample["first"] = random.random()
            return draw_slowly(sample)

        drawn = []
        for transform in (without, read_other):
            with make_dataset(tmp_path, 8, transforms=[transform]) as dataset:
                options: dict[str, Any] = {"multiprocessing_context": "fork"} if num_workers else {}
                loader = StreamingDataLoader(
                    dataset, batch_size=4, num_workers=num_workers, collate_fn=whole, prefetch_factor=None, **options
                )
                drawn.append([dict(sample)["late"] for batch in loader for sample in batch])
        assert drawn[0] == drawn[1]


def test_threads_store_samples_at_a_cache_point_and_lose_none(tmp_path: Path) -> None:
    with make_dataset(tmp_path, transforms=[CacheTransform("drawn", [draw_slowly])]) as dataset, ThreadPoolExecutor(8) as pool:
        first = list(pool.map(dataset.__getitem__, range(96)))
        assert list(pool.map(dataset.__getitem__, range(96))) == first
        assert dataset.cache.statistics().entries == 96


def test_ctrl_c_in_a_transform_lets_other_threads_draw(tmp_path: Path) -> None:
    def interrupt(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 0:
            raise KeyboardInterrupt
        return draw_slowly(sample)

    with make_dataset(tmp_path, 4, transforms=[interrupt]) as dataset, ThreadPoolExecutor(1) as pool:
        before, expected = global_states(), dataset[1]
        with pytest.raises(KeyboardInterrupt):
            dataset[0]
        assert pool.submit(dataset.__getitem__, 1).result() == expected
        assert global_states() == before


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_handler_that_raises_anywhere_as_a_sample_is_made_keeps_no_turn_and_no_generator(is_lent: bool) -> None:
    expected, before = drawn_by(draws), global_states()
    with ThreadPoolExecutor(1) as pool, GeneratorLoan() if is_lent else contextlib.nullcontext():
        for _ in raised_everywhere(HandlerError, None, partial(drawn_by, draws)):
            assert is_lent or global_states() == before
            if is_lent:
                GeneratorLoan().put_back()
                assert global_states() == before
            assert pool.submit(drawn_by, draws).result(60) == expected
            assert drawn_by(draws) == expected


def test_a_handler_that_makes_samples_anywhere_as_a_sample_is_made_leaves_all_generators_as_they_were() -> None:
    np.random.randn()  # of a pair of normal numbers one is left
    expected, before = drawn_by(draws), global_states()
    made: list[list[float]] = []
    with handler(lambda: made.append(drawn_by(draws))):
        for nth in itertools.count(1):
            made.clear()
            with Injector(nth) as injector:
                assert drawn_by(draws) == expected, nth
            assert global_states() == before, nth
            assert made == [expected] * len(made)
            if injector.num_places < nth:
                assert nth > 20
                return


def draws() -> list[float]:
    return [random.random(), random.gauss(), np.random.randn(), np.random.rand(), float(torch.rand(()))]


def drawn_by(make: Callable[[], Any]) -> Any:
    """Return what a sample draws."""
    return GlobalGenerators((4, 5, 6, 1)).run(make, lambda _: False)


def test_the_trainers_second_normal_number_and_its_own_kind_of_generator_come_back() -> None:
    original = np.random.mtrand.get_bit_generator()
    try:
        for kind in (np.random.MT19937, np.random.PCG64):
            np.random.mtrand.set_bit_generator(kind(3))
            alone = [np.random.randn() for _ in range(5)]
            np.random.mtrand.set_bit_generator(kind(3))
            samples, own = [], []
            for _ in range(5):
                own.append(np.random.randn())
                samples.append(drawn_by(draws))
            assert own == alone
            assert samples == [samples[0]] * 5
            assert type(np.random.mtrand.get_bit_generator()) is kind
    finally:
        np.random.mtrand.set_bit_generator(original)


def test_a_transform_that_first_draws_at_its_last_sample_draws_what_it_draws_if_all_do(tmp_path: Path) -> None:
    def draw_at_last(sample: dict[str, Any]) -> dict[str, Any]:
        return draw_slowly(sample) if sample["__row__"] == 999 else sample

    in_worker: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
    last: list[Any] = []
    for transform, options in ((draw_slowly, {}), (draw_at_last, {}), (draw_at_last, in_worker)):
        with make_dataset(tmp_path, 1000, transforms=[transform]) as dataset:
            batches = iter(StreamingDataLoader(dataset, 32, collate_fn=whole, **options))  # torch draws here
            before = global_states()
            last.append([sample for batch in batches for sample in batch][999])
            assert global_states() == before
    assert last == [last[0]] * 3


def test_in_a_thread_worker_of_torch_the_trainers_generators_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    info = torch.utils.data._utils.worker.WorkerInfo(
        id=0, num_workers=1, seed=3, dataset=torch.utils.data.Dataset(), worker_method="thread"
    )
    monkeypatch.setattr(torch.utils.data._utils.worker, "_worker_info", info)
    before = global_states()
    with ThreadPoolExecutor(1) as pool:
        expected = pool.submit(drawn_by, draws).result()
        assert pool.submit(drawn_by, draws).result() == expected
    assert global_states() == before
