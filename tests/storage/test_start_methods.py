"""Every way to start a process, before and after the parent read, by iteration and by random access: no hang, nothing left."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import pytest

from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import FaultyHttpServer
from tests.storage.downloads import Downloads

pytestmark = pytest.mark.usefixtures("starts_anew")
NUM_OBJECTS = 40
PATIENCE_SECONDS = 300.0  # for a machine that does much else
Counts = tuple[int, int]


def counted() -> Counts:
    """Open descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def iterate(fetcher: Fetcher, url: str, directory: Path) -> list[bytes]:
    """Read as an iteration does: windows of downloads."""
    directory.mkdir()
    downloads = Downloads(fetcher, directory)
    for start in range(0, NUM_OBJECTS, 20):
        downloads.submit(*[f"{url}/{i}" for i in range(start, start + 20)])
        assert {done.error for done in downloads.wait_done()} == {None}
    return [downloads.read(str(i)) for i in range(NUM_OBJECTS)]


def access(fetcher: Fetcher, url: str, directory: Path) -> list[bytes]:
    """Read as random access does: one after the other."""
    directory.mkdir()
    for i in range(NUM_OBJECTS):
        fetcher.download(f"{url}/{i}", directory / str(i))
    return [(directory / str(i)).read_bytes() for i in range(NUM_OBJECTS)]


WAYS = {"iteration": iterate, "random access": access}


def child(fetcher: Fetcher, way: str, url: str, directory: Path, answers: SimpleQueue[Any]) -> None:
    """What the started process does."""
    gc.collect()  # what a forked child has inherited of earlier tests may not be found while we count
    before = counted()
    found = WAYS[way](fetcher, url, directory)
    fetcher.stop()
    answers.put((found, before, counted()))


@pytest.fixture(scope="module")
def objects() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({f"/{i}": str(i).encode() * 999 for i in range(NUM_OBJECTS)}) as server:
        yield server


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("is_used_before", [True, False], ids=["used before", "not used before"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_started_process_reads_and_leaves_nothing(
    objects: FaultyHttpServer, tmp_path: Path, method: str, is_used_before: bool, way: str
) -> None:
    expected = [objects.objects[f"/{i}"] for i in range(NUM_OBJECTS)]
    fetcher = Fetcher(StorageOptions())
    if is_used_before:
        assert WAYS[way](fetcher, objects.url, tmp_path / "before") == expected
    context: Any = multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    process = context.Process(target=child, args=(fetcher, way, objects.url, tmp_path / "child", answers))
    process.start()
    found, before, after = answers.get()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0
    assert found == expected
    assert after == before
    assert WAYS[way](fetcher, objects.url, tmp_path / "after") == expected
    fetcher.stop()


def use_and_stop(directory: Path, answers: SimpleQueue[Any]) -> None:
    """Read in both ways, three times; say what was open before and after each."""
    fetcher = Fetcher(StorageOptions())
    counts = [counted()]
    for i in range(3):
        iterate(fetcher, str(directory), directory / f"iteration-{i}")
        access(fetcher, str(directory), directory / f"access-{i}")
        fetcher.stop()
        counts.append(counted())
    answers.put(counts)


def test_the_parent_has_nothing_left_either(tmp_path: Path) -> None:
    """In a process of its own: what earlier tests left in this one may end while we count."""
    for i in range(NUM_OBJECTS):
        (tmp_path / str(i)).write_bytes(b"x")
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=use_and_stop, args=(tmp_path, answers))
    process.start()
    counts = answers.get()
    process.join(PATIENCE_SECONDS)
    assert counts == [counts[0]] * 4


def wait_for_queues_of_torch() -> None:
    """Wait for the threads of queues that torch closes behind a DataLoader and does not wait for, with two pipe ends each."""
    for thread in threading.enumerate():
        if thread.name == "QueueFeederThread":
            thread.join(PATIENCE_SECONDS)


def use_datasets(method: str, index: str, directory: Path, answers: SimpleQueue[Any]) -> None:
    """Use and close datasets, with and without workers; say what was open before and after the second one."""
    from torch.utils.data import DataLoader

    from sqlstream import StreamingDataset

    def use(name: str) -> None:
        with StreamingDataset(index, str(directory / name), columns_to_download=["file"]) as dataset:
            assert Path(dataset[0]["file"]).read_bytes() == b"0" * 999
            for num_workers in (0, 1):
                context = multiprocessing.get_context(method) if num_workers else None
                samples = DataLoader(dataset, batch_size=None, num_workers=num_workers, multiprocessing_context=context)
                assert sorted(int(sample["index"]) for sample in samples) == list(range(NUM_OBJECTS))
        wait_for_queues_of_torch()

    use("warm")  # what torch and pyarrow open once
    before = counted()
    use("cache")
    answers.put((before, counted()))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_closed_dataset_leaves_no_thread_socket_or_descriptor(objects: FaultyHttpServer, tmp_path: Path, method: str) -> None:
    lines = ["index,file", *[f"{i},{objects.url}/{i}" for i in range(NUM_OBJECTS)]]
    (tmp_path / "index.csv").write_text("\n".join(lines))
    context = multiprocessing.get_context("spawn")  # a process of its own: other tests' threads may end while we count
    answers = context.SimpleQueue()
    process = context.Process(target=use_datasets, args=(method, str(tmp_path / "index.csv"), tmp_path, answers))
    process.start()
    before, after = answers.get()
    process.join(PATIENCE_SECONDS)
    assert process.exitcode == 0
    assert after == before
