"""One process has one set of global generators: threads that make samples take turns, and the trainer's state comes back."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.chain.global_rng import GlobalGenerators, Turns
from sqlstream.transforms import rng
from sqlstream.transforms.cached import CacheTransform
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


def take_and_give_back(turns: Turns) -> None:
    turns.take()
    turns.give_back()


def test_that_threads_take_turns_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    turns = Turns()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            turns.take()
            other = threading.Thread(target=take_and_give_back, args=(turns,))
            other.start()
            while not turns._has_warned:
                pass
            turns.give_back()
            other.join()
    assert [record.message for record in caplog.records if "run one at a time" in record.message] == [caplog.messages[0]]


def test_a_transform_that_waits_for_a_thread_that_draws_ends_in_an_error(tmp_path: Path) -> None:
    turns, errors = Turns(patience_seconds=0.05), []

    def draw_in_another_thread() -> None:
        try:
            turns.take()
        except ConfigError as error:
            errors.append(str(error))

    turns.take()
    other = threading.Thread(target=draw_in_another_thread)
    other.start()
    other.join()
    turns.give_back()
    assert "must not wait for a thread that makes samples" in errors[0]
    take_and_give_back(turns)


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
    with GlobalGenerators((1, 2, 3)):
        expected = np.random.rand()  # Python seeds its own anew in a child
    with GlobalGenerators((1, 2, 3)):
        receiver, sender = os.pipe()
        child = os.fork()
        if not child:
            os.write(sender, repr(np.random.rand()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert float(os.read(receiver, 100)) == expected
        os.close(receiver)
        os.close(sender)
        assert np.random.rand() == expected


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


class HandlerError(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("place", ["begin", "end"])
def test_a_handler_that_raises_as_a_sample_takes_or_gives_back_the_generators_keeps_no_turn(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def raise_error(*_: object) -> None:
        raise HandlerError

    original = getattr(GlobalGenerators, f"_{place}")

    def interrupted(generators: GlobalGenerators) -> None:
        os.kill(os.getpid(), signal.SIGUSR1)  # handed over as the section ends
        original(generators)

    before, handler = global_states(), signal.signal(signal.SIGUSR1, raise_error)
    try:
        monkeypatch.setattr(GlobalGenerators, f"_{place}", interrupted)
        with pytest.raises(HandlerError), GlobalGenerators((1, 2, 3)):
            random.random()
        monkeypatch.undo()
    finally:
        signal.signal(signal.SIGUSR1, handler)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(takes_its_turn).result(60)
    assert global_states() == before


def takes_its_turn() -> bool:
    with GlobalGenerators((4, 5, 6)):
        return True
