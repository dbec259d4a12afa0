"""What is only read while transforms run takes no transaction; a path that leaves with its sample is pinned by a row."""

from __future__ import annotations

import os
import threading
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache.files.read_hold import KeptLocks, ReadLock, ReadLocks
from sqlstream.cache.ledger.database import Database
from sqlstream.errors import DecodeError
from sqlstream.process import locks
from sqlstream.transforms.base import Chain, Sample
from sqlstream.transforms.fields import LoadFromDiskTransform
from sqlstream.transforms.reading import read_file
from tests.cache.session import Session
from tests.stream.sources import Photos

COLUMN = "image"


def opened(photos: Photos, dst: Path, *transforms: Any, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        photos.src, dst, columns_to_download=[COLUMN], transforms=transforms, cache_limit=None, show_progress=False, **options
    )


@pytest.fixture
def filled(photos: Photos, tmp_path: Path) -> Path:
    with opened(photos, tmp_path / "cache") as dataset:
        assert len(list(dataset)) == photos.num
    return tmp_path / "cache"


def test_accesses_and_epochs_that_only_read_what_is_here_take_no_transaction_each(
    photos: Photos, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: Counter[str] = Counter()
    write_transaction = Database.write_transaction

    def count(database: Database, **options: Any) -> AbstractContextManager[Any]:
        threads[threading.current_thread().name] += 1
        return write_transaction(database, **options)

    with opened(photos, filled, LoadFromDiskTransform([COLUMN])) as dataset:
        expected = [photos.data(row) for row in range(photos.num)]
        assert dataset[0][COLUMN] == expected[0]  # the first one registers this process
        num_hits = dataset.cache.statistics().hits
        monkeypatch.setattr(Database, "write_transaction", count)
        assert [dataset[row][COLUMN] for row in range(photos.num)] == expected
        assert [sample[COLUMN] for sample in dataset] == expected
        assert threads[threading.current_thread().name] <= 4  # not one for each; the background thread writes hits
        assert dataset.cache.statistics().hits == num_hits + 2 * photos.num


def test_a_sample_whose_file_cannot_be_locked_is_read_all_the_same_and_counted_once(photos: Photos, filled: Path) -> None:
    with opened(photos, filled, LoadFromDiskTransform([COLUMN])) as dataset:
        _ = dataset[0]
        fd = locks.open_descriptor(next((filled / "data").rglob("*.*")), os.O_RDWR)
        assert locks.try_lock(fd)  # as somebody does who is about to remove it
        num_hits = dataset.cache.statistics().hits
        assert [sample[COLUMN] for sample in dataset] == [photos.data(row) for row in range(photos.num)]
        assert dataset.cache.statistics().hits == num_hits + photos.num
        locks.close_descriptor(fd)


def test_a_file_that_the_engine_holds_open_is_not_opened_again(
    photos: Photos, filled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: Counter[str] = Counter()
    real_open = os.open

    def count(path: Any, *arguments: Any, **options: Any) -> int:
        names[str(path)] += 1
        return real_open(path, *arguments, **options)

    with opened(photos, filled, LoadFromDiskTransform([COLUMN])) as dataset:
        _ = dataset[0]
        monkeypatch.setattr("os.open", count)
        monkeypatch.setattr("builtins.open", refuse)
        found = [dataset[row][COLUMN] for row in range(photos.num)]
        monkeypatch.undo()
    assert found == [photos.data(row) for row in range(photos.num)]
    data = {name: times for name, times in names.items() if f"{filled}/data/" in name}
    assert len(data) == photos.num
    assert set(data.values()) == {1}


def refuse(*arguments: Any, **options: Any) -> None:
    raise AssertionError(f"opened once more: {arguments} {options}")


def test_a_path_that_leaves_with_its_sample_is_pinned_by_a_row_from_then_on(photos: Photos, filled: Path) -> None:
    with opened(photos, filled) as dataset:
        samples = [dataset[row] for row in range(3)]
        pinned = {row[0].hex() for row in Session(dataset.cache).read("SELECT key FROM pin")}
        assert {Path(sample[COLUMN]).name.partition(".")[0] for sample in samples} <= pinned
        dataset.cache.clear()
        assert all(Path(sample[COLUMN]).is_file() for sample in samples)


class Held:
    """A file that is open, as the engine lends those of a sample."""

    def __init__(self, path: Path) -> None:
        self.open_files: dict[str, ReadLock] = {}
        assert ReadLocks("", lambda *_: None, KeptLocks()).lock(str(path), path.stat().st_size, self.open_files)


def test_a_lent_file_is_read_where_it_is_open_until_it_is_closed(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_bytes(b"lent")
    held = Held(path)
    other.write_bytes(b"another")

    def read(sample: Sample) -> Sample:
        os.replace(other, path)
        return {"read": {read_file(path), read_file(str(path))}}

    try:
        chain = Chain([read], seed=None, stage=1)
        assert chain.run({}, (0, 0, 0), files=held) == {"read": {b"lent"}}
    finally:
        held.open_files.clear()
    assert read_file(path) == b"another"


def test_a_transform_that_fails_leaves_no_file_lent_or_locked(photos: Photos, filled: Path) -> None:
    held: list[str] = []

    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        held.append(sample[COLUMN])
        raise DecodeError("on purpose")

    with opened(photos, filled, fail) as dataset:
        for _ in range(2):
            with pytest.raises(DecodeError, match="on purpose"):
                _ = dataset[0]
        Path(held[-1]).write_bytes(b"changed")
        assert read_file(held[-1]) == b"changed"
        assert dataset.cache.clear().removed_entries == photos.num
