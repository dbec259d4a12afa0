"""A dataset that is written: each position once, whatever part takes it, and whatever ends the writing early."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset, World
from sqlstream.errors import EncodeError
from sqlstream.stream.writing import share_of, write_dataset
from sqlstream.write import MdsWriter, WriteOptions
from tests.write.goldens import mds_samples

NUM_ROWS = 20


class Interrupted(Exception):
    """What a test ends a writing with."""


def dataset_of(folder: Path, **options: Any) -> StreamingDataset:
    if not (folder / "t.csv").exists():  # else its index is built each time
        (folder / "t.csv").write_text("n\n" + "".join(f"{n}\n" for n in range(NUM_ROWS)))
    return StreamingDataset(str(folder / "t.csv"), str(folder / "cache"), world=World(), on_error="raise", **options)


def made_of(position: int, sample: Mapping[str, Any]) -> list[dict[str, int]]:
    """Make none, one or two samples of a position."""
    return [{"n": sample["n"], "position": position, "number": number} for number in range(position % 3)]


def written(folder: Path, out: Path, *, stop_at: int | None = None, resume: bool = False, **options: Any) -> int:
    """Write, and return from which position on samples were made."""
    first: list[int] = []

    def make(position: int, sample: Mapping[str, Any]) -> list[dict[str, int]]:
        first.append(position)
        if position == stop_at:
            raise Interrupted
        return made_of(position, sample)

    part = options.pop("part", None)
    columns = {"n": "int", "position": "int", "number": "int"}
    settings = WriteOptions(resume=resume, part=part)
    with dataset_of(folder, **options) as dataset, MdsWriter(out, columns, size_limit=320, options=settings) as writer:
        write_dataset(dataset, writer, make, part=part)
    return min(first, default=NUM_ROWS)


@pytest.mark.parametrize("num_parts", [1, 3, 7, 25])
def test_parts_take_each_position_once_and_in_order(num_parts: int) -> None:
    shares = [share_of(NUM_ROWS, (number, num_parts)) for number in range(num_parts)]
    assert [position for share in shares for position in share] == list(range(NUM_ROWS))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_writing_that_makes_several_samples_or_none_goes_on_within_a_position(tmp_path: Path) -> None:
    written(tmp_path, tmp_path / "whole", shuffle_seed=3)
    expected = list(mds_samples(tmp_path / "whole"))
    assert [(sample["position"], sample["number"]) for sample in expected] == [
        (position, number) for position in range(NUM_ROWS) for number in range(position % 3)
    ]
    starts = set()
    for stop_at in range(0, NUM_ROWS, 3):
        out = tmp_path / f"out-{stop_at}"
        with pytest.raises(Interrupted):
            written(tmp_path, out, stop_at=stop_at, shuffle_seed=3)
        starts.add(written(tmp_path, out, resume=True, shuffle_seed=3))
        assert list(mds_samples(out)) == expected
    assert {start % 3 for start in starts} == {0, 2}  # 2: one of two samples was stored already
    assert max(starts) > 10


def test_parts_of_a_shuffled_dataset_are_its_order_cut_in_pieces(tmp_path: Path) -> None:
    with dataset_of(tmp_path, shuffle_seed=3) as dataset:
        expected = [row["n"] for position, row in enumerate(dataset) for _ in range(position % 3)]
    for number in range(3):
        written(tmp_path, tmp_path / "out", part=(number, 3), shuffle_seed=3)
    parts = [tmp_path / "out" / f"0000{number}-of-00003" for number in range(3)]
    assert [sample["n"] for part in parts for sample in mds_samples(part)] == expected


def test_a_sample_without_its_key_that_cannot_be_written_is_named_by_its_position(tmp_path: Path) -> None:
    with dataset_of(tmp_path, transforms=[lambda sample: {"n": str(sample["n"])}]) as dataset:
        writer = MdsWriter(tmp_path / "out", {"n": "int"})
        with pytest.raises(EncodeError, match=r"a value of type str: .*; the sample is at position 0"):
            write_dataset(dataset, writer, lambda position, sample: [sample])
        writer.cancel()
