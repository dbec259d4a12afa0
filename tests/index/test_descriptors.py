"""A signal handler that raises at any place leaves no file of an index open, and no lock."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sqlstream.config import IndexOptions
from sqlstream.index.file.index import Index
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.sums import SumsFile
from sqlstream.index.file.workplace import sweep_dead, sync, workplace
from sqlstream.process import locks
from sqlstream.testing.storage import ScriptedFetcher
from tests.handlers import HandlerError, fail, handler, raised_everywhere
from tests.index.sources import build, write_csv
from tests.processes import open_files

Work = Callable[[Path], object]


def build_alone(directory: Path) -> None:
    with workplace(directory, "key") as place:
        sync(place.publish(_written(place.temporary()), "made"))


def sweep_what_the_dead_left(directory: Path) -> None:
    _written(directory / "key.dead.part.tmp")
    sweep_dead(directory)


def make_room(directory: Path) -> None:
    _written(directory / "unused.sqlite")
    IndexRoom(directory, IndexOptions(src="", index_limit=1 << 20)).need(1 << 20)


def open_and_close(directory: Path) -> None:
    index = Index(next(directory.glob("*.sqlite")))
    try:
        index.hold(index.path)
    finally:
        index.close()


def search_sums(directory: Path) -> None:
    if not (directory / "sums.npy").exists():
        np.save(directory / "sums.npy", np.arange(10))
    SumsFile(directory / "sums.npy")


def download(directory: Path) -> None:
    ScriptedFetcher({"s3://bucket/table": b"bytes"}).download("s3://bucket/table", directory / "table")


def _written(path: Path) -> Path:
    path.write_bytes(b"bytes")
    return path


@pytest.mark.parametrize(
    ("work", "inside"),
    [
        (build_alone, "workplace"),
        (build_alone, "_acquire"),
        (build_alone, "_release"),
        (build_alone, "sync"),
        (sweep_what_the_dead_left, "sweep_dead"),
        (make_room, "_remove_unused"),
        (search_sums, "__init__"),
        (download, "download"),
        (download, "close_descriptors"),
    ],
)
def test_no_file_stays_open(tmp_path: Path, work: Work, inside: str) -> None:
    for nth in raised_everywhere(TimeoutError, inside, lambda: work(tmp_path)):
        assert open_files(tmp_path) == [], nth


@pytest.mark.parametrize("inside", ["_opened", "_mark_in_use"])
def test_no_index_stays_in_use(tmp_path: Path, inside: str) -> None:
    index = build(tmp_path, write_csv(tmp_path / "t.csv", "index,name\n1,a\n"))
    index.close()
    for nth in raised_everywhere(TimeoutError, inside, lambda: open_and_close(index.path.parent)):
        assert open_files(tmp_path) == [], nth


def test_a_wait_for_another_builder_that_a_handler_ends_leaves_the_lock_to_it(tmp_path: Path) -> None:
    with workplace(tmp_path, "key"):
        before = open_files(tmp_path)
        with handler(fail), pytest.raises(HandlerError), locks.uninterrupted():  # noqa: PT012 - the wait begins with it
            signal.raise_signal(signal.SIGUSR1)
            with workplace(tmp_path, "key", is_brief=True):
                raise AssertionError("two builders have one lock")
        assert open_files(tmp_path) == before
        assert os.listdir(tmp_path) == ["key.lock"]
