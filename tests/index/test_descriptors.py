"""A signal handler that raises at any place leaves no file of an index open, and no lock."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from sqlstream.config import IndexOptions
from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.sums import SumsFile
from sqlstream.index.file.workplace import sweep_dead, sync, workplace
from sqlstream.process import locks
from sqlstream.testing.storage import ScriptedFetcher
from tests.handlers import HandlerError, fail, handler, raised_everywhere
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import build, write_csv, write_table
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


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """As trainers do, whose steps it would interrupt."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_collector")
def test_a_filter_leaves_no_index_open_that_it_has_read(tmp_path: Path) -> None:
    src = write_csv(tmp_path / "t.csv", "index,n\n" + "".join(f"k{n},{n}\n" for n in range(9)))
    index = build(tmp_path, src, where="n > 3")
    assert len(index) == 5
    index.close()
    with pytest.raises(QueryError):
        build(tmp_path, src, where="n > 100")
    assert open_files(tmp_path) == []


@pytest.mark.usefixtures("_no_collector")
def test_a_lazy_filter_keeps_the_file_of_no_chunk(tmp_path: Path) -> None:
    """Each kept its room on disk, and a descriptor."""
    src = write_table(tmp_path / "t.parquet", [{"index": f"k{n}", "n": n} for n in range(8)])
    index = open_lazily(tmp_path, src, where="n % 2 = 0", chunk_rows=2)
    assert len(rows_of(index)) == 4
    assert [path for path in open_files(tmp_path) if "(deleted)" in path] == []
    index.close()
