"""Columns that leave memory as they grow say what lists of the same values say."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from sqlstream.errors import CacheDiskError
from sqlstream.storage.members.spilled import SPILL_VALUES, Spilled, SpilledBytes, are_unique

NUM = 3 * SPILL_VALUES + 17


def filled(values: list[int], folder: Path | None, at_a_time: int = 1000) -> Spilled:
    column = Spilled("q", folder)
    for start in range(0, len(values), at_a_time):
        column.last.extend(values[start : start + at_a_time])
        column.spill()
    return column


@pytest.mark.parametrize("is_in_memory", [True, False])
def test_a_column_gives_any_values_that_follow_each_other(is_in_memory: bool, tmp_path: Path) -> None:
    values = [random.Random(1).randrange(1 << 62) + number for number in range(NUM)]
    column = filled(values, None if is_in_memory else tmp_path)
    assert len(column) == NUM
    assert (len(column.last) == NUM) is is_in_memory
    for start, stop in ((0, 5), (SPILL_VALUES - 2, SPILL_VALUES + 2), (NUM - 5, NUM + 5), (NUM, NUM), (0, NUM)):
        assert column[start:stop].tolist() == values[start:stop]
    assert np.concatenate([*column.blocks()]).tolist() == values
    assert [*tmp_path.iterdir()] == [], "the file has no name"


def test_bytes_are_read_from_the_file_from_memory_and_from_both(tmp_path: Path) -> None:
    data = random.Random(2).randbytes(8 * SPILL_VALUES + 1000)
    found = SpilledBytes(tmp_path)
    for start in range(0, len(data), 4096):
        found.last += data[start : start + 4096]
        found.spill()
    assert len(found) == len(data)
    assert 0 < len(found.last) < len(data)
    border = len(data) - len(found.last)
    for start, stop in ((0, 10), (border - 3, border + 3), (border, border + 4), (len(data), len(data)), (0, len(data))):
        assert found.read(start, stop) == data[start:stop]


@pytest.mark.parametrize("at_a_time", [100, 1 << 18])
def test_hashes_that_come_twice_are_found_wherever_they_are(at_a_time: int, tmp_path: Path) -> None:
    draws = random.Random(3)
    hashes = [*{draws.getrandbits(64) - (1 << 63) for _ in range(2000)}, -(1 << 63), (1 << 63) - 1]
    assert are_unique(filled(hashes, tmp_path), at_a_time)
    for twice in (hashes[0], -(1 << 63), (1 << 63) - 1):
        assert not are_unique(filled([*hashes, twice], tmp_path), at_a_time)
    assert are_unique(Spilled("q", tmp_path), at_a_time)


def test_a_column_takes_as_much_memory_whatever_its_length(tmp_path: Path) -> None:
    peaks = []
    for num_blocks in (4, 16):
        tracemalloc.start()
        column = Spilled("q", tmp_path)
        for number in range(num_blocks):
            column.last.extend(range(number, number + SPILL_VALUES))
            column.spill()
        for _ in column.blocks():
            pass
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0], "all values are 4 times as many"


def test_a_folder_that_is_gone_is_an_error_that_names_it(tmp_path: Path) -> None:
    column = Spilled("q", tmp_path / "gone")
    column.last.extend(range(SPILL_VALUES))
    with pytest.raises(CacheDiskError, match=r"gone \(No such file or directory\): free space on that disk"):
        column.spill()
