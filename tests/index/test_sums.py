"""Sums that are searched in their file: what numpy finds in memory."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.sums import SumsFile
from sqlstream.order import Int64Array


def written(tmp_path: Path, values: Int64Array) -> Path:  # [n]
    path = tmp_path / "sums.npy"
    np.save(path, values)
    return path


@pytest.mark.parametrize("num_keys", [1, 3, 7, 100, 1000])
@pytest.mark.parametrize("num_rows", [1, 2, 99, 100, 101])
def test_points_are_found_where_numpy_finds_them(tmp_path: Path, num_keys: int, num_rows: int) -> None:
    values = np.cumsum(np.random.default_rng(num_rows).integers(0, 3, num_rows))  # [n]
    found = SumsFile(written(tmp_path, values), num_keys)
    points = np.arange(-1, values[-1] + 2)
    assert found.searchsorted(points).tolist() == np.searchsorted(values, points, side="right").tolist()
    assert found.searchsorted(points[:0]).tolist() == []
    assert (len(found), found[-1]) == (num_rows, values[-1])


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="mappings are looked up in /proc")
def test_nothing_of_the_file_stays_in_memory(tmp_path: Path) -> None:
    found = SumsFile(written(tmp_path, np.arange(100_000)), num_keys=10)
    found.searchsorted(np.arange(0, 100_000, 70))  # several of each page
    assert "sums.npy" not in Path("/proc/self/smaps").read_text()


def test_a_file_that_is_none_or_ends_too_early_is_named(tmp_path: Path) -> None:
    with pytest.raises(IndexDatabaseError, match=r"sums\.npy cannot be read"):
        SumsFile(tmp_path / "sums.npy")
    path = written(tmp_path, np.arange(1000))
    found = SumsFile(path, num_keys=10)
    os.truncate(path, 4000)
    with pytest.raises(IndexDatabaseError, match="ends too early"):
        found.searchsorted(np.array([999]))
