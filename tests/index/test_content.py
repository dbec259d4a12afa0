"""The digest of what an index holds: the same wherever the source lies, another one for another value, row or type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlstream.index.file.index import Index
from sqlstream.index.types.content import Content, RunningContent
from tests.index.lazily import open_lazily
from tests.index.sources import FolderReader, build, forget_content, make_samples, write_csv, write_table

CELLS = [1, -(2**62), 0.1, -0.0, "été", "", None, b"\x00\xff", "x" * 300]


def content_of(index: Index) -> Content:
    content = index.content
    assert content is not None
    return content


def digest_of(*values: list[Any], names: tuple[str, ...] = ("a", "b", "c")) -> str | None:
    running = RunningContent()
    for part in values:
        running.add(names, part)
    return running.digest()


def test_the_digest_is_the_same_in_every_version_of_python_and_for_any_batches() -> None:
    assert digest_of(CELLS) == "3f9ec8b136866377db588f6fdb9ce19d"
    assert digest_of(CELLS[:3], CELLS[3:]) == digest_of(CELLS)
    assert digest_of(["".join(["ét", "é"]) if cell == "été" else cell for cell in CELLS]) == digest_of(CELLS)  # not interned


@pytest.mark.parametrize(
    "other",
    [
        ["a", 1, None, "b", 2, ""],
        ["a", 1, None, "b", 2.0, None],
        ["b", 2, None, "a", 1, None],
        ["a", 1, None, "b", None, 2],
        ["a", 1, None, "b", 2, None, "c", 3, None],
        [b"a", 1, None, "b", 2, None],
    ],
)
def test_any_other_value_and_any_other_order_is_another_digest(other: list[Any]) -> None:
    assert digest_of(other) != digest_of(["a", 1, None, "b", 2, None])


def test_which_column_has_a_value_in_a_later_file_is_part_of_it(tmp_path: Path) -> None:
    found = []
    for name, column in (("one", "x"), ("two", "y")):
        write_table(tmp_path / name / "1.jsonl", [{"index": "a", "x": 1, "y": 1}])
        write_table(tmp_path / name / "2.jsonl", [{"index": "b", column: 2}])
        found.append(content_of(build(tmp_path, tmp_path / name / "*.jsonl")))
    assert found[0].columns == found[1].columns
    assert found[0].differences(found[1]) == [
        "the values of the rows, or their order (it has as many rows, and the same columns)"
    ]


def test_paths_count_as_the_tables_have_them(tmp_path: Path) -> None:
    """Of several sources they are made absolute, and a column says whose row it is: both say where the tables lie."""
    found = []
    for place in ("here", "there"):
        for name in ("a", "b"):
            write_table(tmp_path / place / name / "t.csv", [{"index": name, "url": f"{name}.jpg", "n": 1}])
        sources = [str(tmp_path / place / name / "t.csv") for name in ("a", "b")]
        found.append(build(tmp_path, sources, columns_to_download=("url",)))
    assert found[0].rows([0])[0]["url"] == str(tmp_path / "here/a/a.jpg")
    assert found[0].content == found[1].content
    write_table(tmp_path / "there/b/t.csv", [{"index": "b", "url": "c.jpg", "n": 1}])
    assert build(tmp_path, sources, columns_to_download=("url",)).content != found[0].content


def test_a_folder_a_hive_table_and_a_table_in_memory_have_content(tmp_path: Path) -> None:
    for place in ("here", "there"):
        make_samples(tmp_path / place / "d", "cat/1.jpg", "dog/2.jpg")
        write_table(tmp_path / place / "h/day=1/t.jsonl", [{"index": "a"}])
        write_table(tmp_path / place / "h/day=2/t.jsonl", [{"index": "b"}])
    folders = [build(tmp_path, tmp_path / place / "d", data_type="image").content for place in ("here", "there")]
    hive = [build(tmp_path, tmp_path / place / "h/*/t.jsonl").content for place in ("here", "there")]
    memory = [build(tmp_path, [{"index": n, "n": n}]).content for n in (1, 2)]
    assert folders[0] == folders[1] is not None
    assert hive[0] == hive[1] is not None
    assert memory[0] != memory[1]


def test_an_index_that_grew_from_one_of_an_earlier_version_knows_no_content(tmp_path: Path) -> None:
    write_csv(tmp_path / "d/1.csv", "index\na\n")
    first = build(tmp_path, tmp_path / "d/*.csv")
    forget_content(first)
    assert build(tmp_path, tmp_path / "d/*.csv").content is None
    write_csv(tmp_path / "d/2.csv", "index\nb\n")
    grown = build(tmp_path, tmp_path / "d/*.csv")
    assert (len(grown), grown.content) == (2, None)


def test_a_lazy_index_goes_by_its_footers(tmp_path: Path) -> None:
    rows = [{"index": n, "score": n / 10} for n in range(10)]
    for place in ("here", "there"):
        write_table(tmp_path / place / "t.parquet", rows)
    here, there = (
        open_lazily(tmp_path, f"s3://bucket/{place}/t.parquet", FolderReader(tmp_path)) for place in ("here", "there")
    )
    assert here.fingerprint != there.fingerprint
    assert here.content == there.content is not None
    narrow = here.narrowed("score > 0.2", 3)
    assert (content_of(narrow).query, content_of(narrow).max_size) == ("score > 0.2", 3)
    write_table(tmp_path / "there/t.parquet", [*rows[:9], {"index": 9, "score": 77.0}])
    changed = open_lazily(tmp_path, "s3://bucket/there/t.parquet", FolderReader(tmp_path))
    assert content_of(here).differences(content_of(changed)) == [
        "the footers of its Parquet files, or its shards (it has as many rows, and the same columns)"
    ]


def test_a_long_query_is_told_apart_by_its_digest(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,n\na,1\nb,2\n")
    lists = [", ".join(map(str, range(start, 1000))) for start in (1, 2)]
    one, two = (content_of(build(tmp_path, path, where=f"n IN ({some})")) for some in lists)
    assert one.query is not None
    assert len(one.query) < 200
    assert one.query != two.query
