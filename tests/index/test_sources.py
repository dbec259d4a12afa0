"""Every kind of source: tables, wildcards, lists of paths, directories; local and remote; broken ones."""

from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, QueryError, SchemaError, SourceError
from sqlstream.index.sources.base.base import PLAIN
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.formats.delimited import DelimitedTable
from sqlstream.index.sources.formats.json_array import JsonTable
from sqlstream.index.sources.formats.quoting import is_well_formed
from sqlstream.index.sources.places.listing import Listing
from sqlstream.index.sources.places.wildcard import matcher
from sqlstream.index.types.models import SourceFile
from sqlstream.sample_types import SAMPLE_FIELDS
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import ROWS, FolderReader, NoReader, all_rows, build, make_samples, rows_in, write_csv, write_table


@pytest.mark.parametrize("extension", [".csv", ".tsv", ".json", ".jsonl", ".ndjson", ".parquet"])
def test_every_format_gives_the_same_rows(extension: str, tmp_path: Path) -> None:
    index = build(tmp_path, write_table(tmp_path / f"table{extension}", ROWS))
    assert all_rows(index) == ROWS
    assert [column.type for column in index.columns] == ["string", "int64", "double", "bool", "string"]
    assert index.resolve("x/1.jpg") == str(tmp_path / "x/1.jpg")


@pytest.mark.parametrize("extension", [".csv", ".json", ".jsonl", ".parquet"])
def test_a_remote_table_is_downloaded_once_and_leaves_no_copy(extension: str, tmp_path: Path) -> None:
    write_table(tmp_path / f"bucket/data/table{extension}", ROWS)
    remote = FolderReader(tmp_path / "bucket")
    index = build(tmp_path, f"s3://bucket/data/table{extension}", remote)
    again = build(tmp_path, f"s3://bucket/data/table{extension}", remote)
    assert all_rows(index) == all_rows(again) == ROWS
    assert remote.count["download"] == 1
    assert index.resolve("x/1.jpg") == "s3://bucket/data/x/1.jpg"
    assert [path.suffix for path in (tmp_path / "index").iterdir()] == [".sqlite"]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_wildcard_reads_its_files_sorted_by_name(where: str, tmp_path: Path) -> None:
    for at in (2, 0, 1):
        write_table(tmp_path / f"d/part-{at}.parquet", [{"index": at}])
    write_table(tmp_path / "d/deep/part-9.parquet", [{"index": 9}])
    write_table(tmp_path / "d/part-x.csv", [{"index": 7}])
    base = str(tmp_path) if where == "local" else "s3://bucket"
    remote = FolderReader(tmp_path)
    assert [row["index"] for row in all_rows(build(tmp_path, f"{base}/d/*.parquet", remote))] == [0, 1, 2]
    assert [row["index"] for row in all_rows(build(tmp_path, f"{base}/d/**/*.parquet", remote))] == [9, 0, 1, 2]
    assert [row["index"] for row in all_rows(build(tmp_path, f"{base}/d/part-[01].parquet", remote))] == [0, 1]
    assert len(build(tmp_path, f"{base}/d/*.parquet", remote, max_index_files=2)) == 2
    assert build(tmp_path, f"{base}/d/*.parquet", remote).resolve("x") == f"{base}/d/x"
    with pytest.raises(SourceError, match="no file matches"):
        build(tmp_path, f"{base}/d/*.tsv", remote)


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        *(("a/[!x]*", "a/yz", True), ("a/[!x]*", "a/xz", False), ("a/?.csv", "a/b.csv", True), ("a+(b)*", "a+(b)c", True)),
        *(("[^a]", "^", True), ("[^a]", "b", False), ("[z-a]", "z", False), ("[&&[]", "[", True), ("a[", "a[", True)),
    ],
)
def test_wildcards_mean_what_shells_mean(pattern: str, name: str, expected: bool) -> None:
    assert bool(matcher(pattern).fullmatch(name)) is expected


def test_marks_of_web_addresses_are_parts_of_names_in_object_stores(tmp_path: Path) -> None:
    write_table(tmp_path / "a#1/x#?.csv", [{"index": 1}])
    (tmp_path / "a#1/list.txt").write_text("x#?.csv\n")
    for src in ("**/*.csv", "a#1/x#?.csv", "a#1/list.txt"):
        index = build(tmp_path, f"s3://bucket/{src}", FolderReader(tmp_path))
        assert all_rows(index) == [{"index": 1}]
        assert index.resolve("y#") == ("s3://bucket/y#" if src.startswith("*") else "s3://bucket/a#1/y#")


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_list_of_paths_keeps_its_order_and_resolves_against_itself(where: str, tmp_path: Path) -> None:
    write_table(tmp_path / "d/b.csv", [{"index": 1}])
    write_table(tmp_path / "d/sub/a.jsonl", [{"index": 2}])
    (tmp_path / "d/split_file_paths.txt").write_text("b.csv\n\nsub/a.jsonl \n")
    base = str(tmp_path) if where == "local" else "s3://bucket"
    index = build(tmp_path, f"{base}/d/split_file_paths.txt", FolderReader(tmp_path))
    assert [row["index"] for row in all_rows(index)] == [1, 2]
    assert index.resolve("x") == f"{base}/d/x"


def test_files_of_one_table_may_lack_columns_and_widen_numbers(tmp_path: Path) -> None:
    write_table(tmp_path / "a.jsonl", [{"index": 1, "n": 3, "only_a": "x", "empty": None}])
    write_table(tmp_path / "b.jsonl", [{"n": 0.5, "index": 2, "only_b": True, "empty": [1]}])
    index = build(tmp_path, tmp_path / "*.jsonl")
    assert all_rows(index) == [
        {"index": 1, "n": 3.0, "only_a": "x", "empty": None, "only_b": None},
        {"index": 2, "n": 0.5, "only_a": None, "empty": [1], "only_b": True},
    ]
    assert [repr(row["n"]) for row in all_rows(index)] == ["3.0", "0.5"]
    assert len(build(tmp_path, tmp_path / "*.jsonl", sql_query="SELECT * FROM dataframe WHERE n / 2 > 1.4")) == 1


ODD, WIDE = pa.array([5, 2**53 + 1]), pa.array([2**63], pa.uint64())
"""Integers whose digits no float holds, or that are stored in another form."""


@pytest.mark.parametrize("is_lazy", [False, True], ids=["built", "lazy"])
@pytest.mark.parametrize("is_listed", [False, True], ids=["plain", "listed"])
@pytest.mark.parametrize("integers", [ODD, WIDE], ids=["odd", "wide"])
@pytest.mark.parametrize("first", ["integers", "floats"])
def test_integers_that_floats_of_another_file_would_change_are_refused(
    first: str, integers: pa.Array[Any], is_listed: bool, is_lazy: bool, tmp_path: Path
) -> None:
    files = [integers, pa.array([2.5])]
    files = [pa.array([values.to_pylist(), None], pa.list_(values.type)) for values in files] if is_listed else files
    for number, values in enumerate(files if first == "integers" else files[::-1]):
        pq.write_table(pa.table({"n": values}), tmp_path / f"{number}.parquet")
    with pytest.raises(SourceError, match=r"n'.*(no float holds|above 2\^63)"):
        rows_of(open_lazily(tmp_path, tmp_path / "*.parquet")) if is_lazy else build(tmp_path, tmp_path / "*.parquet")


def test_a_negative_zero_behind_a_file_of_integers_stays_one(tmp_path: Path) -> None:
    for number, values in enumerate([pa.array([1, 0, None]), pa.array([-0.0, 2.5, 0.0]), pa.array([-0.0])]):
        pq.write_table(pa.table({"n": values, "n_1": values}), tmp_path / f"{number}.parquet")
        if number:  # the second time, the files that are new are added to the index
            index = build(tmp_path, tmp_path / "*.parquet")
    assert repr([row["n"] for row in all_rows(index)]) == repr([1.0, 0.0, None, -0.0, 2.5, 0.0, -0.0])
    assert [row["n"] for row in all_rows(index)] == [row["n_1"] for row in all_rows(index)]
    assert repr([row["n"] for row in rows_of(open_lazily(tmp_path, tmp_path / "*.parquet"))]) == repr(
        [row["n"] for row in all_rows(index)]
    )
    assert len(build(tmp_path, tmp_path / "*.parquet", sql_query="SELECT * FROM dataframe WHERE n = 0")) == 4


def test_lists_of_integers_beside_lists_of_floats_are_lists_of_floats(tmp_path: Path) -> None:
    for number, values in enumerate([pa.array([[1, None], [2**60]]), pa.array([[2.5]])]):
        pq.write_table(pa.table({"n": values}), tmp_path / f"{number}.parquet")
    found = [row["n"] for row in all_rows(build(tmp_path, tmp_path / "*.parquet"))]
    assert repr(found) == repr([[1.0, None], [2.0**60], [2.5]])
    assert repr(found) == repr([row["n"] for row in rows_of(open_lazily(tmp_path, tmp_path / "*.parquet"))])


def test_integers_that_floats_hold_still_widen_however_large(tmp_path: Path) -> None:
    for number, values in enumerate([pa.array([2**60, None, -(2**53)]), pa.array([2.5])]):
        pq.write_table(pa.table({"n": values}), tmp_path / f"{number}.parquet")
    found = [row["n"] for row in all_rows(build(tmp_path, tmp_path / "*.parquet"))]
    assert (
        found
        == [2.0**60, None, -(2.0**53), 2.5]
        == [row["n"] for row in rows_of(open_lazily(tmp_path, tmp_path / "*.parquet"))]
    )


def test_conflicting_types_name_both_files_and_the_column(tmp_path: Path) -> None:
    write_table(tmp_path / "a.jsonl", [{"index": 1, "n": 3}])
    write_table(tmp_path / "b.jsonl", [{"index": 2, "n": "three"}])
    with pytest.raises(SchemaError, match=r"'n' is int64 in .*a\.jsonl and string in .*b\.jsonl"):
        build(tmp_path, tmp_path / "*.jsonl")


@pytest.mark.parametrize("numbers_come_first", [True, False])
def test_a_file_of_words_for_missing_values_beside_files_of_numbers_is_told_from_text(
    numbers_come_first: bool, tmp_path: Path
) -> None:
    write_csv(tmp_path / f"{'b' if numbers_come_first else 'a'}.csv", 'n\n\nNA\n""\n')
    write_csv(tmp_path / f"{'a' if numbers_come_first else 'b'}.csv", "n\n1\nNA\n")
    with pytest.raises(SchemaError, match=r"'n' is .*: all of its values in .*\.csv are texts such as 'NA', so leave .* empty"):
        build(tmp_path, tmp_path / "*.csv")
    write_csv(tmp_path / f"{'a' if numbers_come_first else 'b'}.csv", "n\nDE\n")  # as codes of countries, they are texts
    texts = [row["n"] for row in all_rows(build(tmp_path, tmp_path / "*.csv"))]
    assert sorted(map(str, texts)) == ["", "DE", "NA"]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_a_directory_groups_files_by_the_name_before_the_first_dot(where: str, tmp_path: Path) -> None:
    names = ("x/2.JPG", "x/2.txt", "y/10.jpg", "y/10.seg.png", "1.jpg", "3.txt", ".hidden.jpg", "README")
    make_samples(tmp_path / "d", *names)
    src = f"{tmp_path}/d/" if where == "local" else "s3://bucket/d/"
    index = build(tmp_path, src, FolderReader(tmp_path), data_type="image")
    assert all_rows(index) == [
        {"index": "1", "jpg": "1.jpg", "seg.png": None, "txt": None, "image": "1.jpg"},
        {"index": "10", "jpg": "y/10.jpg", "seg.png": "y/10.seg.png", "txt": None, "image": "y/10.jpg"},
        {"index": "2", "jpg": "x/2.JPG", "seg.png": None, "txt": "x/2.txt", "image": "x/2.JPG"},
    ]
    assert index.resolve("x/2.JPG") == src + "x/2.JPG"
    assert len(build(tmp_path, src, FolderReader(tmp_path), data_type="text")) == 2


def test_a_name_with_dots_is_a_sample_of_its_own_where_its_group_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = [
        "IMG.2024.01.jpg",
        "IMG.2024.01.txt",
        "x/IMG.2024.02.JPG",
        "1.jpg",
        "1.seg.png",
        "v1.2.tar.gz",
        "notes.txt",
        ".a.b",
    ]
    make_samples(tmp_path / "d", *names, "x/README", "README", ".a.b")
    with caplog.at_level(logging.WARNING):
        index = build(tmp_path, tmp_path / "d", data_type="image")
    assert all_rows(index) == [
        {"index": "1", "jpg": "1.jpg", "seg.png": "1.seg.png", "txt": None, "image": "1.jpg"},
        {
            "index": "IMG.2024.01",
            "jpg": "IMG.2024.01.jpg",
            "seg.png": None,
            "txt": "IMG.2024.01.txt",
            "image": "IMG.2024.01.jpg",
        },
        {"index": "IMG.2024.02", "jpg": "x/IMG.2024.02.JPG", "seg.png": None, "txt": None, "image": "x/IMG.2024.02.JPG"},
    ]
    (warning,) = caplog.messages
    assert "4 files belong to no sample" in warning
    assert "README, notes.txt, v1.2.tar.gz, …" in warning


def test_a_folder_of_names_with_dots_alone_is_a_folder_of_samples(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_samples(tmp_path / "d", "cat/a.b.c.png", "dog/a.b.c.png")
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image", label_column="label"))
    assert [(row["index"], row["png"], row["label"]) for row in rows] == [
        ("cat/a.b.c", "cat/a.b.c.png", "cat"),
        ("dog/a.b.c", "dog/a.b.c.png", "dog"),
    ]
    assert not caplog.messages


def test_a_directory_needs_a_data_type(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "1.jpg")
    with pytest.raises(ConfigError, match=r"give data_type.*image"):
        build(tmp_path, tmp_path / "d")
    with pytest.raises(SourceError, match="1 files but no video"):
        build(tmp_path, tmp_path / "d", data_type="video")


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("a.parquet", "*.parquet"),
        ("2024/a.b.CSV.gz", "2024/*.CSV.gz"),
        ("s-000.tar", "*.tar"),
        ("train/s-0.Tar.gz", "train/*.Tar.gz"),
        ("s.zip", "*.zip"),
    ],
)
def test_a_directory_of_tables_or_shards_is_named_by_a_wildcard(tmp_path: Path, file: str, pattern: str) -> None:
    make_samples(tmp_path / "d", file, "1.jpg")
    with pytest.raises(ConfigError, match=re.escape(f"by a wildcard, {tmp_path}/d/{pattern}, or give data_type")):
        build(tmp_path, tmp_path / "d")


def test_a_directory_whose_index_of_shards_is_cut_off_says_so(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "shard.00000.mds")
    (tmp_path / "d" / "index.json").write_text('{"shards": [{"column_names": [')
    with pytest.raises(ConfigError, match=r"its index\.json describes no shards: it is cut off, or of another program"):
        build(tmp_path, tmp_path / "d")


def test_shards_of_a_writing_that_has_not_ended_are_no_tables_and_their_index_is_missed(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "shard.00000.mds.zstd", ".sqlstream-write.jsonl")
    with pytest.raises(ConfigError, match=r"directory: give data_type.* nor an index\.json, which comes last"):
        build(tmp_path, tmp_path / "d")


def test_files_of_one_key_and_extension_in_two_directories_are_named(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "x/1.jpg", "y/1.jpg", "2.jpg")
    with pytest.raises(SourceError, match=r"x/1\.jpg and y/1\.jpg have the same key '1'"):
        build(tmp_path, tmp_path / "d", data_type="image")


def test_links_to_directories_are_followed_but_not_in_circles(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "x/1.jpg")
    make_samples(tmp_path / "elsewhere", "2.jpg")
    (tmp_path / "d/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d/x/circle").symlink_to(tmp_path / "d")
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image"))
    assert [row["jpg"] for row in rows] == ["x/1.jpg", "link/2.jpg"]


def test_a_tree_is_listed_whole_and_in_one_order_however_many_threads(tmp_path: Path) -> None:
    names = [f"{a}/{b}/{number}.jpg" for a in "xyz" for b in "uvw" for number in range(8)]
    make_samples(tmp_path / "d", *names, "top.jpg")
    for link in ("b-link", "a-link"):
        (tmp_path / "d" / link).symlink_to(tmp_path / "d/x/u")
    (tmp_path / "d/nowhere").symlink_to(tmp_path / "gone")
    listing = Listing(str(tmp_path / "d"), NoReader(), folders_at_a_time=2, names_at_a_time=3)
    found = [file.url for file in listing.files()]
    expected = {name.replace("x/u/", "a-link/") for name in names} | {"top.jpg"}  # a level above, the first by name
    assert (set(found), len(found)) == (expected, len(expected))
    assert [[file.url for file in listing.files()] for _ in range(5)] == [found] * 5


def test_a_server_that_says_nothing_of_its_objects_is_asked_for_one_of_them() -> None:
    remote = NoReader()
    listing = Listing("sftp://host/d", remote)
    files = [SourceFile(url=f"{number}.jpg", size_bytes=1, etag="1.5") for number in range(5)]
    assert [listing.version_in_answers(file) for file in files] == [None] * 5
    assert remote.count["head"] == 1


def test_a_changed_directory_is_indexed_again(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "1.jpg")
    first = build(tmp_path, tmp_path / "d", data_type="image")
    assert build(tmp_path, tmp_path / "d", data_type="image").fingerprint == first.fingerprint
    make_samples(tmp_path / "d", "2.jpg")
    assert len(build(tmp_path, tmp_path / "d", data_type="image")) == 2


CSV_TYPES = [
    ("007\n12", ["007", "12"]),
    ("1\n2", [1, 2]),
    ("1\n2.5\n1e3", [1.0, 2.5, 1000.0]),
    ("1\nx", ["1", "x"]),
    ("9223372036854775807\n-1", [2**63 - 1, -1]),
    ("18446744073709551615\n1", [2**64 - 1, 1]),
    ("99999999999999999999\n1", [1e20, 1.0]),
    ("99999999999999999999\n99999999999999999998\n1", ["99999999999999999999", "99999999999999999998", "1"]),
    ("99999999999999999999\n12345678901234567", ["99999999999999999999", "12345678901234567"]),
    ("18446744073709551615\n-1", ["18446744073709551615", "-1"]),
    ("12345678901234567\n0.5", ["12345678901234567", "0.5"]),
    ("true\nFalse\n", [True, False]),
    ("true\n1", ["true", "1"]),
    ("NA\n4", [None, 4]),
    ("NA\nx", ["NA", "x"]),
    ("NA\nNULL", ["NA", "NULL"]),
    ("+5\n6", ["+5", "6"]),
    ("2024-01-01\n2024-01-02", ["2024-01-01", "2024-01-02"]),
    ('""\n"a ""b"""', ["", 'a "b"']),
    ('"1"\n""\n"10"', [1, None, 10]),
    ('"0.5"\n""\n"NA"', [0.5, None, None]),
    ('true\n""', [True, None]),
    ('""\n', [""]),
    ("0.5\n-0\n2", [0.5, -0.0, 2.0]),
    ("-0\n2", ["-0", "2"]),
    ("0.5\n-0\nx", ["0.5", "-0", "x"]),
]


@pytest.mark.parametrize(("cells", "expected"), CSV_TYPES, ids=[repr(cells) for cells, _ in CSV_TYPES])
def test_csv_numbers_are_numbers_only_when_no_text_is_lost(cells: str, expected: list[object], tmp_path: Path) -> None:
    lines = "".join(f"k{at},{cell}\n" for at, cell in enumerate(cells.strip("\n").split("\n")))
    path = write_csv(tmp_path / "t.csv", "index,value\n" + lines)
    assert repr([row["value"] for row in all_rows(build(tmp_path, path))]) == repr(expected)  # which tells -0.0 from 0.0


@pytest.mark.parametrize("name", SAMPLE_FIELDS)
def test_a_column_with_the_name_of_a_sample_field_is_refused(name: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.parquet", [{"index": 1, name: 7, "n": 2}])
    with pytest.raises(SchemaError, match=rf"t\.parquet has a column '{name}'.*rename"):
        build(tmp_path, path)
    assert all_rows(build(tmp_path, path, columns_to_keep=["n"])) == [{"index": 1, "n": 2}]
    with pytest.raises(QueryError, match=rf"gives a column '{name}'.*AS"):
        build(tmp_path, path, columns_to_keep=["n"], sql_query=f'SELECT "index", n AS {name} FROM dataframe')


def test_one_number_too_large_makes_a_column_real_and_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = [str(at) for at in range(400)]
    values[300] = values[399] = "9" * 5000
    path = write_csv(tmp_path / "t.csv", "index,n,id\n" + "".join(f"k{at},{v},{10**20 + at}\n" for at, v in enumerate(values)))
    with caplog.at_level(logging.WARNING):
        index = build(tmp_path, path)
    assert [column.type for column in index.columns] == ["string", "double", "string"]
    assert len(build(tmp_path, path, where="n > 10 AND n < 13")) == 2
    real, text = sorted(caplog.messages)
    assert re.search(r"t\.csv: column 'id' is text.*row 0's 100000000000000000000", real)
    assert re.search(r"t\.csv: column 'n' is REAL: row 300 has 9{40}… \(5000 digits\).*infinite.*1 more", text)


@pytest.mark.parametrize(
    ("huge", "fate"), [("1e400", "infinite"), ("-2.5E+309", "infinite"), ("9" * 30, "rounded"), ("9" * 320 + ".5", "infinite")]
)
def test_a_number_too_large_beside_decimals_is_said_once_with_row_and_value(
    huge: str, fate: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = [f"{at}.{'0' * 20}1" for at in range(400)]  # long decimals are not large
    values[7] = huge
    path = write_csv(tmp_path / "t.csv", "index,n\n" + "".join(f"k{at},{value}\n" for at, value in enumerate(values)))
    with caplog.at_level(logging.WARNING):
        index = build(tmp_path, path)
    assert index.rows([7, 8]) == [{"index": "k7", "n": float(huge)}, {"index": "k8", "n": 8.0}]
    (said,) = caplog.messages
    assert re.search(rf"column 'n' is REAL: row 7 has {re.escape(huge[:30])}.*{fate} \(0 more", said)


@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_a_json_number_too_large_is_infinite_and_said_once_with_its_place(
    extension: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    huge = ["1e400", "-1.5E+999", "9" * 400 + ".5"]
    rows = ['{"index": "Infinity", "x": 1.5, "y": [Infinity, 1e3]}']
    rows += [f'{{"index": "Infinity{at}", "x": {number}, "y": [1]}}' for at, number in enumerate(huge)]
    rows.append('{"index": "last", "x": 1, "y": [{"z": 1e400}]}')
    path = tmp_path / f"t.{extension}"
    path.write_text("\n".join(rows) if extension == "jsonl" else f"[{','.join(rows)}]")
    index = build(tmp_path, path)
    assert [row["x"] for row in all_rows(index)] == [1.5, math.inf, -math.inf, math.inf, 1.0]
    assert index.rows([0, 4])[0]["y"] == [math.inf, 1000.0]
    place = "line 2" if extension == "jsonl" else "element 2"
    assert caplog.messages == [
        f"{path}, {place}: column 'x' has 1e400, which no float holds, so this is infinite (3 more values are too large)"
    ]


@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_a_json_number_too_large_whose_key_comes_again_is_no_value(
    extension: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = '{"index": "k", "x": 1e400, "x": 2}'
    (tmp_path / f"t.{extension}").write_text(row if extension == "jsonl" else f"[{row}]")
    assert all_rows(build(tmp_path, tmp_path / f"t.{extension}")) == [{"index": "k", "x": 2}]
    assert not caplog.messages


@pytest.mark.parametrize("extension", ["jsonl", "json"])
def test_an_object_nested_too_deeply_is_named_with_its_place(extension: str, tmp_path: Path) -> None:
    (tmp_path / f"t.{extension}").write_text('{"x":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(SourceError, match=rf"t\.{extension}, line 1: no JSON object .maximum recursion depth"):
        build(tmp_path, tmp_path / f"t.{extension}")


def test_a_json_key_that_is_no_unicode_is_named_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"x": 1}\n{"x": 1, "\\ud83d": null}\n')
    with pytest.raises(SourceError, match=r"t\.jsonl, line 2: the key '\\ud83d' holds half a surrogate pair"):
        build(tmp_path, tmp_path / "t.jsonl")


def test_names_that_read_as_numbers_too_large_stay_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_csv(tmp_path / "t.csv", "index,n\n" + "".join(f"k{at},{at}e{900 + at}\n" for at in range(1, 50)))
    with caplog.at_level(logging.WARNING):
        assert build(tmp_path, path).rows([0]) == [{"index": "k1", "n": "1e901"}]
    assert "column 'n' is text" in caplog.text


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('k0,a\nk1,"an open quote\nk2,b\n', 3),
        ('k0,a\nk1,b\nk2,"unterminated', 4),
        ('k0,"a\nk1,b\nk2,"c"\n', 2),
        ('k0,5" pipe\nk1,"x\nk2,y', 3),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_an_open_quote_is_named_and_swallows_no_rows(text: str, line: int, encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(f"index,value\n{text}".encode(encoding))
    with pytest.raises(SourceError, match=rf"t\.csv, line {line}: a quote is opened here and never closed"):
        build(tmp_path, path)


MARKS = np.frombuffer(b',"\r\n', np.uint8)  # [4]
"""What stands beside the quotes of a whole value."""


def test_quotes_within_a_value_and_lines_within_quotes_are_read_as_they_stand(tmp_path: Path) -> None:
    cells = ['"a ""b"""', 'say "hi"', '"two\nlines"', '""', '"x"y', '5"']
    path = write_csv(tmp_path / "t.csv", "\ufeffindex,value\n" + "".join(f"k{at},{cell}\n" for at, cell in enumerate(cells)))
    assert [row["value"] for row in all_rows(build(tmp_path, path))] == ['a "b"', 'say "hi"', "two\nlines", "", "xy", '5"']
    for block_bytes in range(4, 30):  # each neighbour of a quote lies in another block sometimes
        assert not is_well_formed(LocalBytes(path), PLAIN, ord('"'), MARKS, block_bytes)
    good = write_csv(tmp_path / "good.csv", "index,value\r\n" + "".join(f'"k{at}","v\n""{at}"""\r\n' for at in range(40)))
    assert [row["value"] for row in all_rows(build(tmp_path, good))] == [f'v\n"{at}"' for at in range(40)]
    for block_bytes in range(4, 30):
        assert is_well_formed(LocalBytes(good), PLAIN, ord('"'), MARKS, block_bytes)


def test_a_csv_column_that_turns_to_text_late_keeps_every_text(tmp_path: Path) -> None:
    values = [str(at) for at in range(5000)] + ["late"]
    path = write_csv(tmp_path / "t.csv", "\ufeffindex,value\n" + "".join(f"k{at},{v}\n" for at, v in enumerate(values)))
    assert [row["value"] for row in rows_in(DelimitedTable(LocalBytes(path), str(path), block_bytes=4096))] == values


def test_a_ragged_csv_names_file_and_line(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", 'index,text\n1,"two\nlines"\n2,b,c\n')
    with pytest.raises(SourceError, match=r"t\.csv, line 4: 3 values, but the header has 2 columns"):
        build(tmp_path, path)


def test_a_broken_json_line_names_file_and_line(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.jsonl", '{"index": 1}\n\n{"index": 2\n')
    with pytest.raises(SourceError, match=r"t\.jsonl, line 3: no JSON object"):
        build(tmp_path, path)


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_json_array_is_read_in_chunks_of_any_size(chunk: int, tmp_path: Path) -> None:
    rows = [{"index": at, "text": '\u00e9 \\ " ] } \n', "deep": {"a": [at, None, {"b": -1.5e3}]}} for at in range(5)]
    path = tmp_path / "t.json"
    path.write_text("\ufeff [ " + ",\n".join(json.dumps(row) for row in rows) + " ]\n")
    assert all_rows(build(tmp_path, path)) == rows
    assert rows_in(JsonTable(LocalBytes(path), str(path), chunk=chunk)) == rows_in(JsonTable(LocalBytes(path), str(path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"index": 1},\n {"index": 2', "line 2: element 2"),
        ('[{"index": 1}\n{"index": 2}]', "line 2: expected ',' or ']' after element 1"),
        ('[{"index": 1}] x', "expected the end of the file"),
        ('[{"index": 1}, 5]', "element 2: a JSON int, not an object"),
        ('[{"index": ' + "9" * 5000 + "}]", "element 1: Exceeds the limit"),
        ("5", "not with an array ('[') or a line ('{') of objects"),
        ('{\n  "rows": [{"index": 1}]\n}', "its first line is no object"),
        ('{"index": 1}\n{"index": 2', "line 2: no JSON object"),
        ("", "starts with nothing"),
        ('[{"index": 1}, {"index": nul}]', "element 2"),
    ],
)
def test_a_broken_json_array_names_the_place(text: str, message: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.json", text)
    with pytest.raises(SourceError) as caught:
        build(tmp_path, path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["c4.json", "c4.json.gz", "c4.json.zst"])
def test_lines_of_objects_are_read_under_the_name_of_an_array(name: str, tmp_path: Path) -> None:
    """As C4 has them."""
    rows = [{"index": at, "text": f"line\n{at}", "meta": {"set": [at]}} for at in range(5)]
    data = "\n".join(json.dumps(row) for row in rows).encode()
    with pa.output_stream(str(tmp_path / name)) as file:  # compressed as its name says
        file.write(data)
    assert all_rows(build(tmp_path, tmp_path / name)) == rows


def test_a_json_column_of_two_scalar_types_names_the_places(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.jsonl", '{"index": 1, "v": 5}\n{"index": 2, "v": "x"}\n')
    with pytest.raises(SchemaError, match=r"'v' holds int \(line 1\) and str \(line 2\)"):
        build(tmp_path, path)


def test_half_a_parquet_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    whole = write_table(tmp_path / "whole.parquet", ROWS).read_bytes()
    half = tmp_path / "half.parquet"
    half.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=r"half\.parquet cannot be read"):
        build(tmp_path, half)


@pytest.mark.parametrize("src", ["~/d/table.csv", Path("~/d/table.csv"), "~/d/*.csv", ["~/d/table.csv"]], ids=str)
def test_a_tilde_in_a_source_is_the_users_home(src: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "d/table.csv", ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    index = build(tmp_path, src)
    assert all_rows(index) == ROWS
    assert index.resolve("x.jpg") == str(tmp_path / "d/x.jpg")
    assert build(tmp_path, src, path_prefix="~/photos").resolve("x.jpg") == str(tmp_path / "photos/x.jpg")


@pytest.mark.parametrize("src", ["gone.csv", "gone/x.parquet", "s3://bucket/gone.csv"])
def test_a_source_that_does_not_exist_is_named(src: str, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"gone.*does not exist"):
        build(tmp_path, src if "://" in src else tmp_path / src, FolderReader(tmp_path))


def test_braces_in_the_name_of_a_table_are_refused_with_the_cure(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.csv").write_text("n\n1\n")
    with pytest.raises(ObjectNotFoundError, match="of tables give a list or a wildcard"):
        build(tmp_path, tmp_path / "{a,b}.csv")
    assert len(build(tmp_path, [tmp_path / "a.csv", tmp_path / "b.csv"])) == 2


def test_a_forbidden_source_is_named_with_the_cure(tmp_path: Path) -> None:
    class Forbidden(FolderReader):
        def head(self, url: str) -> Any:
            raise AccessDeniedError(f"{url}: 403")

    with pytest.raises(AccessDeniedError, match=r"s3://bucket/x\.csv may not be read.*storage_options"):
        build(tmp_path, "s3://bucket/x.csv", Forbidden(tmp_path))


@pytest.mark.parametrize("name", ["data.xlsx", "data"])
def test_an_unknown_extension_says_which_are_known(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("x")
    with pytest.raises(ConfigError, match=r"\.csv, \.tsv, \.json"):
        build(tmp_path, tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("e.csv", "index,b\n"), ("e.json", "[]"), ("e.csv", ""), ("e.txt", "\n")])
def test_an_empty_source_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    path = write_csv(tmp_path / name, text)
    with pytest.raises((SourceError, SchemaError), match=r"e\."):
        build(tmp_path, path)
