"""The watch that looks at a cache directory from outside."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream.testing.disk import DiskWatch, bytes_together, cached_files


def wait_for_looks(watch: DiskWatch, num_looks: int) -> None:
    """Wait until the watch has looked `num_looks` times more; the test's time limit is the bound."""
    until = watch.num_looks + num_looks
    while watch.num_looks < until:
        os.sched_yield()


def test_watch_keeps_the_highest_sum_of_data_and_part(tmp_path: Path) -> None:
    with DiskWatch(tmp_path, interval_seconds=0.001) as watch:
        wait_for_looks(watch, 1)  # before the directory has anything in it
        (tmp_path / "data" / "ab").mkdir(parents=True)
        (tmp_path / "part").mkdir()
        (tmp_path / "data" / "ab" / "1.jpg").write_bytes(b"x" * 1000)
        (tmp_path / "part" / "2").write_bytes(b"x" * 500)
        (tmp_path / "ledger.sqlite").write_bytes(b"x" * 9000)  # overhead: beside the limit
        wait_for_looks(watch, 2)
        (tmp_path / "data" / "ab" / "1.jpg").unlink()
        wait_for_looks(watch, 2)
    assert watch.highest_bytes == 1500


@pytest.mark.parametrize("kind", [Path, str])
def test_watch_looks_once_more_at_the_end(kind: Callable[[Path], Path | str], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with DiskWatch(kind(tmp_path), interval_seconds=60) as watch:
        (tmp_path / "data" / "1").write_bytes(b"x" * 10)
    assert (watch.highest_bytes, watch.num_looks) == (10, 1)


def test_a_file_with_two_names_counts_once(tmp_path: Path) -> None:
    """As one does that is renamed from part/ to data/ between the two listings."""
    for name in ("data", "part"):
        (tmp_path / name).mkdir()
    (tmp_path / "part" / "1").write_bytes(b"x" * 10)
    os.link(tmp_path / "part" / "1", tmp_path / "data" / "1")
    assert sum(cached_files(tmp_path).values()) == 10


def test_a_sum_never_holds_what_one_file_gave_up_and_what_another_took_of_it() -> None:
    assert bytes_together({1: 10, 2: 20}, {1: 10, 2: 20}) == 30
    assert bytes_together({1: 10, 2: 20}, {1: 4, 2: 20}) == 24  # published between the walks
    assert bytes_together({1: 10, 2: 20}, {1: 10, 2: 26}) == 30  # the first shrank after the second walk had passed it
    assert bytes_together({1: 10, 2: 20}, {1: 10, 3: 20}) is None
