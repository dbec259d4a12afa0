"""Damage and strangers among index files: noticed, then built again, or one clear error; never a raw one, never other rows."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream.config import LazyOptions
from sqlstream.errors import IndexDatabaseError, SqlStreamError
from sqlstream.index.build.lazy_build import open_lazy_index
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import CHECKED_BYTES, is_intact
from sqlstream.index.sql.sandbox import run_query
from sqlstream.index.weights import open_weights
from tests.index.sources import NoReader, all_rows, build, options, write_csv, write_table

QUERY = "SELECT * FROM dataframe WHERE n % 3 < 2"  # it judges each row by itself: no process is started for it
ORDERED = f"{QUERY} ORDER BY n DESC"
ROWS: list[dict[str, Any]] = [
    {"index": f"k{at}", "n": at, "x": at / 3, "when": f"2024-01-{at + 1:02} 00:00:00", "tags": [f"t{at}"]} for at in range(24)
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_table(tmp_path / "t.parquet", ROWS)


def read_all(directory: Path, source: Path) -> object:
    """Read rows, the rows of a filter, and what they weigh, as a new process does."""
    whole, chosen = build(directory, source), build(directory, source, sql_query=QUERY)
    weights = open_weights(chosen, "1 + n", directory / "index").cumulative().tolist()
    found = all_rows(whole), all_rows(chosen), chosen.fingerprint, weights
    whole.close()
    chosen.close()
    return found


def outcome(act: Callable[[], object]) -> object:
    """Return what `act` returns, or the clear error that it raises."""
    try:
        return act()
    except SqlStreamError as error:
        return error


def flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    at = rng.randrange(min(len(data), 8192) if rng.random() < 0.5 else len(data))  # half of them where SQLite keeps its words
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def cut(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size))


def fill(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    start = rng.randrange(len(data))
    path.write_bytes(data[:start] + rng.randbytes(min(512, len(data) - start)) + data[start + 512 :])


@pytest.mark.parametrize("num_seeds", [20, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("damage", [flip, cut, fill])
def test_damage_anywhere_gives_the_same_rows_or_one_clear_error(
    damage: Callable[[Path, random.Random], None], num_seeds: int, source: Path, tmp_path: Path
) -> None:
    expected = read_all(tmp_path, source)
    shutil.copytree(tmp_path / "index", tmp_path / "good")
    names = sorted(os.listdir(tmp_path / "good"))
    assert sorted(name.partition(".")[2] for name in names) == ["positions.npy", "selection.json", "sqlite", "weights.npy"]
    num_healed = 0
    for seed in range(num_seeds):
        rng = random.Random(seed)
        shutil.rmtree(tmp_path / "index")
        shutil.copytree(tmp_path / "good", tmp_path / "index")
        damage(tmp_path / "index" / names[seed % len(names)], rng)
        found = outcome(lambda: read_all(tmp_path, source))
        assert found == expected or "remove it" in str(found), f"seed {seed}: {found}"
        num_healed += found == expected
    assert num_healed >= num_seeds // 4


def test_a_large_file_is_not_checked_at_open_and_still_gives_no_raw_error(tmp_path: Path) -> None:
    text = "y" * (CHECKED_BYTES // 2)
    path = write_csv(tmp_path / "t.jsonl", "".join(f'{{"index": {at}, "t": "{text}", "l": [{at}]}}\n' for at in range(3)))
    good = build(tmp_path, path).path
    assert good.stat().st_size > CHECKED_BYTES
    expected = all_rows(build(tmp_path, path))
    assert (is_intact(good), is_intact(good, most_bytes=None)) == (None, True)
    num_good = 0
    for seed in range(60):
        rng = random.Random(seed)
        at, bit = rng.randrange(64, 20_000), 1 << rng.randrange(8)
        with open(good, "r+b") as file:
            file.seek(at)
            before = file.read(1)
            file.seek(at)
            file.write(bytes([before[0] ^ bit]))
        assert is_intact(good, most_bytes=None) is False
        num_good += outcome(lambda: all_rows(Index(good))) == expected
        with open(good, "r+b") as file:
            file.seek(at)
            file.write(before)
    assert is_intact(good, most_bytes=None)
    assert num_good < 60


def test_the_rows_that_a_lazy_filter_keeps_are_counted_again_after_damage(source: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()

    def opened() -> Any:
        lazy = options(source, where="n % 3 < 2", lazy=LazyOptions(chunk_rows=8))
        return open_lazy_index(lazy, tmp_path / "index", NoReader(), show_progress=False)

    def rows() -> list[int]:
        index = opened()
        found = [index.read(chunk, []).row_ids.tolist() for chunk in range(len(index.bounds) - 1)]
        assert (index.sizes() == [len(some) for some in found]).all()
        return [row for some in found for row in some]

    expected = rows()
    (kept,) = (tmp_path / "index").glob("*.kept")
    good = kept.read_bytes()
    for at in range(0, len(good) * 8, 5):
        data = bytearray(good)
        data[at // 8] ^= 1 << at % 8
        kept.write_bytes(data)
        assert rows() == expected
    for other in (good[:-1], b"", good + b"more"):
        kept.write_bytes(other)
        assert rows() == expected
    index = opened()
    kept.write_bytes(good[:-1])
    with pytest.raises(IndexDatabaseError, match="remove it"):
        index.sizes()


@pytest.mark.parametrize("damage", ["another head", "nothing", "cut", "longer", "other words"])
def test_what_the_head_of_an_index_file_says_is_compared_at_any_size(damage: str, source: Path, tmp_path: Path) -> None:
    large = write_table(tmp_path / "large.parquet", [{"index": "k", "t": os.urandom(CHECKED_BYTES // 2).hex(), "n": 1}])
    for table in (source, large):
        chosen = build(tmp_path, table, sql_query=QUERY)
        expected = all_rows(chosen)
        chosen.close()
        (path,) = (tmp_path / "index").glob("*.sqlite")
        good = path.read_bytes()
        files = [path, *(tmp_path / "index").glob("*.selection.json")] if damage == "other words" else [path]
        assert (len(good) > CHECKED_BYTES) == (table is large)
        for file in files:
            damages = {
                "another head": b"X" + good[1:],
                "nothing": b"",
                "cut": good[:-4096],
                "longer": good + bytes(4096),
                "other words": b"other words",
            }
            file.write_bytes(damages[damage])
            assert all_rows(build(tmp_path, table, sql_query=QUERY)) == expected
        shutil.rmtree(tmp_path / "index")


STRANGERS: dict[str, Callable[[Path], object]] = {
    "a symbolic link": lambda path: path.symlink_to("/etc/passwd"),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
}


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("suffix", [".sqlite", ".positions.npy", ".selection.json", ".weights.npy"])
def test_a_stranger_in_the_place_of_an_index_file_is_named(kind: str, suffix: str, source: Path, tmp_path: Path) -> None:
    expected = read_all(tmp_path, source)
    (place,) = (tmp_path / "index").glob(f"*{suffix}")
    good = place.read_bytes()
    place.unlink()
    STRANGERS[kind](place)
    with pytest.raises(IndexDatabaseError, match=rf"{place.name} is {kind}, which sqlstream never makes there: remove it"):
        read_all(tmp_path, source)
    place.rmdir() if place.is_dir() and not place.is_symlink() else place.unlink()
    place.write_bytes(good)
    assert read_all(tmp_path, source) == expected


def open_lazy(source: Path, tmp_path: Path) -> Any:
    lazy = options(source, where="n % 3 < 2", lazy=LazyOptions(chunk_rows=8))
    (tmp_path / "index").mkdir(exist_ok=True)
    return open_lazy_index(lazy, tmp_path / "index", NoReader(), show_progress=False)


@pytest.mark.parametrize("kind", [*STRANGERS, "a symbolic link to nothing"])
def test_a_stranger_in_the_place_of_kept_rows_is_named(kind: str, source: Path, tmp_path: Path) -> None:
    kept = open_lazy(source, tmp_path).kept_path
    kept.unlink()
    kept.symlink_to("/nonexistent") if kind not in STRANGERS else STRANGERS[kind](kept)
    with pytest.raises(IndexDatabaseError, match=rf"{kept.name} is a .*which sqlstream never makes there: remove it"):
        open_lazy(source, tmp_path)


@pytest.mark.parametrize("suffix", [".positions.npy", ".weights.npy"])
def test_numbers_that_change_between_open_and_read_are_not_read(suffix: str, source: Path, tmp_path: Path) -> None:
    chosen = build(tmp_path, source, sql_query=ORDERED)
    weights = open_weights(build(tmp_path, source, sql_query=ORDERED), "1 + n", tmp_path / "index")
    (path,) = (tmp_path / "index").glob(f"*{suffix}")
    with open(path, "r+b") as file:
        file.seek(136)
        file.write(bytes(8))
    with pytest.raises(IndexDatabaseError, match=rf"{path.name} cannot be read \(its checksum is another one\): remove it"):
        all_rows(chosen) if suffix == ".positions.npy" else weights.cumulative()


def test_an_index_file_that_is_emptied_while_it_is_open_is_one_clear_error(source: Path, tmp_path: Path) -> None:
    index, lazy = build(tmp_path, source), open_lazy(source, tmp_path)
    with open(index.path, "r+b") as file:
        file.truncate()
    with pytest.raises(IndexDatabaseError, match="remove it, the next run builds it again"):
        run_query(index, "SELECT sum(n) FROM dataframe")
    lazy.close()
    footers = sqlite3.connect(lazy.path)
    with contextlib.closing(footers), footers:
        footers.execute("UPDATE footers SET footer = zeroblob(length(footer))")
    with pytest.raises(IndexDatabaseError, match=r"the footer of .*t\.parquet cannot be read: .*remove it"):
        lazy.read(0, [])


def test_an_index_file_that_is_removed_while_it_is_open_is_one_clear_error_for_who_queries_it(
    source: Path, tmp_path: Path
) -> None:
    index, lazy = build(tmp_path, source), open_lazy(source, tmp_path)
    rows = index.rows([0])
    for one in (index, lazy):
        one.path.unlink()
        with pytest.raises(IndexDatabaseError, match="No such file"):
            run_query(one, "SELECT sum(n) FROM dataframe")
    assert index.rows([0]) == rows, "it is open"
    index.close()
    lazy.close()


@pytest.mark.parametrize("what", ["file", "loop of links"])
def test_an_index_whose_directory_is_something_else_by_now_is_one_clear_error(what: str, source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    index = build(tmp_path / "cache", source, sql_query=ORDERED)
    others = [pickle.loads(pickle.dumps(index)) for _ in range(2)]  # as workers get it
    index.close()
    (tmp_path / "cache").rename(tmp_path / "away")
    if what == "file":
        (tmp_path / "cache").write_text("")
    else:
        (tmp_path / "cache").symlink_to(tmp_path / "cache")
    with pytest.raises(IndexDatabaseError, match="cannot be read"):
        others[0].rows([0])
    with pytest.raises(IndexDatabaseError, match="cannot be read"):
        others[1].row_ids(np.arange(3))


def test_another_index_under_the_name_of_the_one_is_built_again(source: Path, tmp_path: Path) -> None:
    expected = read_all(tmp_path, source)
    one = build(tmp_path, source).path
    other = build(tmp_path, source, sql_query="SELECT index, n + 1 AS n FROM dataframe").path
    one.write_bytes(other.read_bytes())
    assert read_all(tmp_path, source) == expected


@pytest.mark.parametrize("kind", STRANGERS)
@pytest.mark.parametrize("name", ["x.lock", f"{'a' * 32}.0123.part.tmp", f"{'b' * 32}.sqlite"])
def test_a_stranger_beside_an_index_stops_nobody(
    kind: str, name: str, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "index").mkdir()
    STRANGERS[kind](tmp_path / "index" / name)
    with caplog.at_level(logging.WARNING):
        assert len(build(tmp_path, source)) == len(ROWS)
    assert kind == "a pipe" or name.endswith(".tmp") or f"{name} is {kind}" in caplog.text


def test_a_stranger_in_the_place_of_an_own_lock_is_named(source: Path, tmp_path: Path) -> None:
    key = build(tmp_path, source).path.stem
    (tmp_path / f"index/{key}.sqlite").unlink()
    (tmp_path / f"index/{key}.lock").symlink_to("/etc/passwd")
    with pytest.raises(IndexDatabaseError, match=rf"{key}\.lock is a symbolic link"):
        build(tmp_path, source)


def test_files_without_a_checksum_open_as_before(source: Path, tmp_path: Path) -> None:
    expected = read_all(tmp_path, source)
    for path in (tmp_path / "index").iterdir():
        if path.suffix == ".sqlite":
            with open(path, "r+b") as file:
                file.seek(60)
                file.write(bytes(4))
        elif path.suffix == ".npy":
            os.truncate(path, path.stat().st_size - 12)
        assert is_intact(path) is None
    stamps = {path.name: path.stat().st_ino for path in (tmp_path / "index").iterdir()}
    assert read_all(tmp_path, source) == expected
    assert {path.name: path.stat().st_ino for path in (tmp_path / "index").iterdir()} == stamps
    positions = next((tmp_path / "index").glob("*.positions.npy"))
    assert np.load(positions).tolist() == [row["n"] for row in all_rows(build(tmp_path, source, sql_query=QUERY))]
