"""Sources that grow or change between two runs."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream.errors import SchemaError, SourceChangedError, SourceError
from sqlstream.index.file.index import Index
from sqlstream.index.info import describe, list_indexes
from tests.index.kills import kill_at
from tests.index.sources import FolderReader, all_rows, build, make_samples, write_csv, write_table
from tests.processes import in_child

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def write_part(root: Path, number: int, **more: Any) -> None:
    rows: list[dict[str, Any]] = [{"index": f"{number}-{at}", "n": at, **more} for at in range(3)]
    write_table(root / f"d/part-{number}.jsonl", rows)


def same_file(one: Index, other: Index) -> None:
    """Check that two index files hold the same, whatever the way there."""
    assert all_rows(one) == all_rows(other)
    first, second = describe(one.path), describe(other.path)
    assert (first.columns, first.sources, first.num_rows) == (second.columns, second.sources, second.num_rows)
    contents = []
    for index in (one, other):
        connection = sqlite3.connect(index.path)
        schema = connection.execute("SELECT type, name FROM sqlite_schema ORDER BY 1, 2").fetchall()
        meta = connection.execute("SELECT key, value FROM meta WHERE key != 'created_at' ORDER BY key").fetchall()
        contents.append((schema, meta, connection.execute("SELECT * FROM dataframe").fetchall()))
        connection.close()
    assert contents[0] == contents[1]


@pytest.mark.parametrize("more", [{}, {"n": 0.5}, {"new": [1, 2]}, {"n": None}], ids=["same", "wider", "new column", "null"])
def test_new_files_of_a_wildcard_are_added_without_reading_the_old_ones(more: dict[str, Any], tmp_path: Path) -> None:
    remote = FolderReader(tmp_path)
    for number in range(3):
        write_part(tmp_path, number)
    build(tmp_path, "s3://bucket/d/*.jsonl", remote)
    assert remote.count["download"] == 3
    write_part(tmp_path, 3, **more)
    write_part(tmp_path, 4)
    grown = build(tmp_path, "s3://bucket/d/*.jsonl", remote, on_source_change="raise")
    assert remote.count["download"] == 5
    assert len(grown) == 15
    (tmp_path / "fresh").mkdir()
    same_file(grown, build(tmp_path / "fresh", "s3://bucket/d/*.jsonl", FolderReader(tmp_path)))
    write_part(tmp_path, 5)
    assert len(build(tmp_path, "s3://bucket/d/*.jsonl", remote)) == 18
    assert remote.count["download"] == 6  # the latest of the two relatives was taken


def test_what_grew_is_checked_as_a_whole(tmp_path: Path) -> None:
    write_part(tmp_path, 0)
    build(tmp_path, tmp_path / "d/*.jsonl")
    write_table(tmp_path / "d/part-1.jsonl", [{"index": "0-1", "n": 1}])
    with pytest.raises(SourceError, match="rows 1 and 3 have the same value '0-1'"):
        build(tmp_path, tmp_path / "d/*.jsonl", key_column="index")
    write_table(tmp_path / "d/part-1.jsonl", [{"index": "x", "n": "text"}])
    with pytest.raises(SchemaError, match=r"'n' is int64 in the files that were indexed before and string in .*part-1"):
        build(tmp_path, tmp_path / "d/*.jsonl", columns_to_keep=None)


CHANGES = [
    (lambda root: write_part(root, 1, more=1), r"part-1\.jsonl has another version"),
    (lambda root: (root / "d/part-0.jsonl").unlink(), r"part-0\.jsonl is gone"),
    (lambda root: write_table(root / "d/part-00.jsonl", [{"index": "x"}]), r"part-00\.jsonl is new and not the last"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_source_is_noticed(change: Any, message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        write_part(tmp_path, number)
    src = tmp_path / "d/*.jsonl"
    first = build(tmp_path, src, on_source_change="raise")
    change(tmp_path)
    with pytest.raises(SourceChangedError, match=rf"{message}.*on_source_change='rebuild'"):
        build(tmp_path, src, on_source_change="raise")
    with caplog.at_level(logging.WARNING):
        second = build(tmp_path, src)
    assert "is not what was indexed" in caplog.text
    assert second.fingerprint != first.fingerprint
    build(tmp_path, src, on_source_change="raise")  # now it is what was indexed
    assert len(list_indexes(tmp_path / "index")) == 2


def test_other_options_are_no_change(tmp_path: Path) -> None:
    write_part(tmp_path, 0)
    src = tmp_path / "d/*.jsonl"
    build(tmp_path, src)
    for changes in (
        {"columns_to_keep": ()},
        {"max_index_files": 1},
        {"where": "n = 0"},
        {"path_prefix": "s3://x"},
        {"max_size": 1},
    ):
        build(tmp_path, src, on_source_change="raise", **changes)


@pytest.mark.parametrize("kind", ["memory", "database", "memory beside a file"])
def test_another_table_without_versions_is_another_source(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    database = tmp_path / "rows.db"
    file = write_csv(tmp_path / "t.csv", "index,n\nfile,0\n")

    def build_with(n: int) -> Index:
        rows = [{"index": "memory", "n": n}]
        if kind == "database":
            with contextlib.closing(sqlite3.connect(database)) as db, db:
                db.execute("DROP TABLE IF EXISTS t")
                db.execute("CREATE TABLE t AS SELECT 'a' AS \"index\", ? AS n", (n,))
            asked: dict[str, Any] = {"sql_query": "SELECT * FROM t", "source_version": str(n)}
            return build(tmp_path, f"sqlite:///{database}", on_source_change="raise", **asked)
        return build(tmp_path, rows if kind == "memory" else [file, rows], on_source_change="raise")

    with caplog.at_level(logging.WARNING):
        assert build_with(1).fingerprint != build_with(2).fingerprint
    assert "is not what was indexed" not in caplog.text


def test_a_table_in_memory_is_the_same_in_every_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    found = []
    for place in places:
        place.mkdir()
        monkeypatch.chdir(place)
        found.append(build(tmp_path, [{"index": "a", "image": "1.jpg"}]))
    assert found[0].fingerprint == found[1].fingerprint
    assert len(list_indexes(tmp_path / "index")) == 1
    assert [index.resolve("1.jpg") for index in found] == [str(place / "1.jpg") for place in places]


def test_a_changed_directory_is_noticed(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "1.jpg")
    build(tmp_path, tmp_path / "d", data_type="image")
    make_samples(tmp_path / "d", "2.jpg")
    with pytest.raises(SourceChangedError, match="another version"):
        build(tmp_path, tmp_path / "d", data_type="image", on_source_change="raise")
    assert len(build(tmp_path, tmp_path / "d", data_type="image")) == 2


def test_a_build_that_goes_on_and_is_killed_anywhere_leaves_no_half_index(tmp_path: Path) -> None:
    write_part(tmp_path, 0)
    directory = tmp_path / "index"
    first = build(tmp_path, tmp_path / "d/*.jsonl").path
    write_part(tmp_path, 1)
    number, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        for left in set(directory.iterdir()) - {first}:
            left.unlink()

        def work(number: int = number) -> None:
            kill_at(number, directory)
            build(tmp_path, tmp_path / "d/*.jsonl")

        code = in_child(work)
        assert {info.num_rows for info in list_indexes(directory)} <= {3, 6}
        assert len(build(tmp_path, tmp_path / "d/*.jsonl")) == 6
        assert not [name for name in os.listdir(directory) if name.endswith((".tmp", ".lock"))]
    assert code == 0
    assert number > 5


def test_an_index_that_grew_gives_rows_by_id(tmp_path: Path) -> None:
    for number in range(2):
        write_part(tmp_path, number)
    build(tmp_path, tmp_path / "d/*.jsonl")
    write_part(tmp_path, 2)
    index = build(tmp_path, tmp_path / "d/*.jsonl", where="n >= 1")
    assert index.row_ids(np.arange(len(index))).tolist() == [1, 2, 4, 5, 7, 8]


def test_an_index_of_garbage_beside_it_does_no_harm(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_csv(tmp_path / "t.csv", "index\n1\n")
    (tmp_path / "index").mkdir()
    (tmp_path / "index/ff.sqlite").write_bytes(b"garbage" * 1000)
    with caplog.at_level(logging.WARNING):
        assert len(build(tmp_path, path)) == 1
    assert "ff.sqlite cannot be read" in caplog.text


def test_another_query_is_another_source_and_another_signature_is_not(tmp_path: Path) -> None:
    signatures = [f"GoogleAccessId=me&Expires={n}&Signature={n}" for n in range(2)]
    for at, query in enumerate(("sr=1", "sr=2", *signatures)):
        write_csv(tmp_path / f"t.csv?{query}", f"index\nrow {at}\n")

    def first(query: str) -> object:
        src = f"https://h/t.csv?{query}"
        return build(tmp_path, src, FolderReader(tmp_path, "https://h"), on_source_change="raise").rows([0])[0]["index"]

    assert [first(query) for query in ("sr=1", "sr=2", "sr=1", signatures[0])] == ["row 0", "row 1", "row 0", "row 2"]
    with pytest.raises(SourceChangedError, match=r"t\.csv has another version"):
        first(signatures[1])
