"""Rows that a function or an iterable gives: read in parts, once for each opening, and what goes wrong in the user's code."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sqlstream.errors import CacheFullError, ConfigError, SchemaError, SourceError, TransientStorageError
from sqlstream.index.info import list_indexes
from sqlstream.index.sources.base.spool import Spool
from sqlstream.index.sources.places.memory import SpooledTable, as_table
from tests.index.lazily import open_lazily
from tests.index.sources import all_rows, build

NUM = 20_000
MIB = 1 << 20


def numbered(num_rows: int = 5) -> Iterator[dict[str, object]]:
    for at in range(num_rows):
        yield {"index": f"row-{at}", "n": at}


def spools(directory: Path) -> Callable[[], Spool]:
    """Makes files for rows in `directory`."""
    names = iter(range(100))
    return lambda: Spool(directory / str(next(names)))


class Rows:
    """A function of the user's program.

    Args:
        items: What it gives; an exception is raised.
    """

    def __init__(self, *items: object) -> None:
        self._items = items
        self.num_calls = self.num_closed = 0

    def __call__(self) -> Generator[object]:
        self.num_calls += 1
        try:
            for item in self._items:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.num_closed += 1


TABLE = pa.table({"index": [f"row-{at}" for at in range(5)], "n": range(5)})


@pytest.mark.parametrize(
    "src",
    [
        numbered,
        partial(numbered, 5),
        lambda: list(numbered()),
        lambda: TABLE,
        lambda: TABLE.to_reader(2),
        lambda: iter(TABLE.to_batches(2)),
        lambda: [TABLE.slice(0, 2), TABLE.slice(2, 0), TABLE.slice(2).to_reader()],
        lambda: [*TABLE.slice(0, 3).to_pylist(), TABLE.slice(3)],
        lambda: [frame.to_pandas() for frame in (TABLE.slice(0, 1), TABLE.slice(1))],
    ],
)
def test_a_function_gives_dicts_tables_or_batches(src: Callable[[], object], tmp_path: Path) -> None:
    index = build(tmp_path, src)
    assert all_rows(index) == TABLE.to_pylist()
    assert build(tmp_path, src).fingerprint == index.fingerprint
    assert len(list_indexes(tmp_path / "index")) == 1


def test_an_iterator_of_batches_is_one_source_and_a_list_of_tables_is_several(tmp_path: Path) -> None:
    batches = TABLE.to_batches(2)
    assert all_rows(build(tmp_path, iter(batches))) == TABLE.to_pylist()
    assert {row["__source__"] for row in all_rows(build(tmp_path, batches))} == {f"RecordBatch {at}" for at in range(3)}


def test_a_slice_of_a_table_finds_the_index_of_its_rows(tmp_path: Path) -> None:
    table = pa.table(
        {"index": range(20), "text": [None if n % 3 == 0 else str(n) for n in range(20)], "ok": [n % 2 == 0 for n in range(20)]}
    )
    rows = table.slice(5, 9)
    built = {build(tmp_path, src).path for src in (rows, pa.concat_tables([rows, rows.slice(0, 0)]).combine_chunks())}
    assert len(built) == 1


def test_a_function_is_called_once_for_each_opening_and_other_rows_make_another_index(tmp_path: Path) -> None:
    rows = Rows(*numbered())
    first = build(tmp_path, rows)
    assert (rows.num_calls, rows.num_closed) == (1, 1)
    assert build(tmp_path, rows).path == first.path
    assert rows.num_calls == 2
    assert build(tmp_path, Rows(*numbered(4))).path != first.path
    first.close()
    first.path.unlink()
    assert all_rows(build(tmp_path, rows)) == list(numbered())


def test_functions_are_sources_beside_others(tmp_path: Path) -> None:
    rows = all_rows(build(tmp_path, [numbered, Rows({"index": "other", "late": 1.5})]))
    assert [row["__source__"] for row in rows] == ["numbered 0"] * 5 + ["Rows 1"]
    assert rows[-1] == {"index": "other", "n": None, "late": 1.5, "__source__": "Rows 1"}


def test_a_source_may_be_opened_while_another_one_of_its_kind_is_read(tmp_path: Path) -> None:
    """Processes that read the same rows do not wait for each other: here one would wait for itself."""

    def outer() -> Iterator[dict[str, object]]:
        assert len(build(tmp_path, outer.inner)) == 2  # type: ignore[attr-defined]
        yield {"index": 0}

    def inner() -> Iterator[dict[str, object]]:
        yield from numbered(2)

    inner.__qualname__ = outer.__qualname__
    outer.inner = inner  # type: ignore[attr-defined]
    assert len(build(tmp_path, outer)) == 1


# -- in parts -------------------------------------------------------------------------------------------------------------


def test_wide_rows_are_read_and_hashed_in_parts(tmp_path: Path) -> None:
    """Of 200 MiB of rows Arrow has parts of 64 MiB in memory: one as it grows, by doubling, and its copy."""
    content, before, most = bytes(MIB), pa.total_allocated_bytes(), 0

    def rows() -> Iterator[dict[str, object]]:
        nonlocal most
        for at in range(200):
            yield {"index": at, "content": {"bytes": content, "path": None}}
            most = max(most, pa.total_allocated_bytes() - before)

    table = as_table(rows, spools(tmp_path), "src=rows", whole_bytes=0)
    assert 0 < most < 198 * MIB
    assert len({table.digest() for _ in range(2)}) == 1
    num_rows = 0
    for batch in table.batches(["index", "content"]):
        num_rows += batch.num_rows
        assert batch.nbytes < 100 * MIB
    assert num_rows == 200


def test_rows_in_parts_are_known_by_their_content_however_they_come(tmp_path: Path) -> None:
    new_spool = spools(tmp_path)

    def digest(*tables: pa.Table) -> str:
        return SpooledTable((table for table in tables), new_spool(), "src", whole_bytes=0).digest()

    whole = pa.table({"n": range(NUM), "text": [None if at % 3 else "x" * (at % 7) for at in range(NUM)]})
    pieces = [whole.slice(start, 777) for start in range(0, NUM, 777)]
    assert digest(whole) == digest(*pieces)
    other = pa.table({"n": range(NUM), "text": ["y", *whole["text"].to_pylist()[1:]]})
    assert digest(whole) != digest(other)


def test_rows_have_the_digest_that_they_have_as_a_table(tmp_path: Path) -> None:
    """States of version 1 name the index by it."""
    rows: list[dict[str, object]] = [
        {"index": at, "text": None if at % 3 else "x" * (at % 7), "list": [at] * (at % 3)} for at in range(NUM)
    ]
    tables = [as_table(src, spools(tmp_path / name), "src") for name, src in made(tmp_path, rows)]
    assert len({table.digest() for table in tables}) == 1


def made(directory: Path, rows: list[dict[str, object]]) -> Iterator[tuple[str, object]]:
    table = pa.Table.from_pylist(rows)
    for name, src in {"table": table, "reader": table.to_reader(777), "dicts": rows, "function": lambda: iter(rows)}.items():
        (directory / name).mkdir()
        yield name, src


# -- types ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("early", "late", "found"),
    [
        (1, 1.5, [1.0, 1.5]),
        (None, "x", [None, "x"]),
        ([1], [2.5], [[1.0], [2.5]]),
        ({"a": 1}, {"a": 2, "b": "x"}, [{"a": 1, "b": None}, {"a": 2, "b": "x"}]),
    ],
)
def test_a_type_may_widen_in_a_later_part(early: object, late: object, found: list[object], tmp_path: Path) -> None:
    index = build(tmp_path, lambda: [pa.table({"index": [at], "x": [x]}) for at, x in enumerate((early, late))])
    assert [row["x"] for row in all_rows(index)] == found


def test_a_column_may_come_late_or_end_early(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, object]]:
        for at in range(NUM):
            yield {"index": at, **({"late": at} if at > 17_000 else {}), **({"early": at} if at < 10 else {})}

    index = build(tmp_path, rows)
    assert index.rows([9, 17_001]) == [
        {"index": 9, "early": 9, "late": None},
        {"index": 17_001, "early": None, "late": 17_001},
    ]


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        ({"n": 1}, {"n": "x"}, "column 'n' has values of several types"),
        (pa.table({"n": [1]}), {"n": "x"}, "conflicting types .*Field n has incompatible types: int64 vs string.*one type"),
        (pa.table({"n": [2**60 + 1]}), {"n": 0.5}, "conflicting types .*give each column one type"),
        (pa.table([[1], [2]], names=["n", "n"]), {"n": 1}, "the column 'n' more than once"),
    ],
)
def test_types_that_conflict_name_function_and_column(first: object, then: object, said: str, tmp_path: Path) -> None:
    rows = Rows(first, then)
    with pytest.raises(SchemaError, match=f"src=Rows .*{said}|the rows of src=Rows.*{said}"):
        build(tmp_path, rows)
    assert rows.num_closed == 1
    assert not list((tmp_path / "index").iterdir())


# -- what goes wrong ------------------------------------------------------------------------------------------------------


def test_what_a_function_raises_names_it_and_leaves_nothing(tmp_path: Path) -> None:
    rows = Rows(*numbered(9000), ValueError("no s3://me:hidden@b/x?sig=hidden"))
    with pytest.raises(
        SourceError, match=r"^src=Rows raised ValueError: no .*, behind its first 9000 items: no index"
    ) as caught:
        build(tmp_path, rows)
    assert "hidden" not in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)
    assert not list((tmp_path / "index").iterdir())
    with pytest.raises(TransientStorageError, match=r"^ours$"):
        build(tmp_path, Rows(TransientStorageError("ours")))
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path, Rows({"index": 1}, KeyboardInterrupt()))
    assert not list((tmp_path / "index").iterdir())


def test_a_function_that_needs_arguments_is_refused(tmp_path: Path) -> None:
    def rows_of(place: str) -> object:
        return place

    with pytest.raises(SourceError, match=r"src=.*rows_of raised TypeError: .*missing 1 required.*, when it was called"):
        build(tmp_path, rows_of)


def test_a_lazy_index_refuses_a_function_before_it_is_called(tmp_path: Path) -> None:
    rows = Rows(*numbered())
    with pytest.raises(ConfigError, match=r"needs Parquet files, .* but Rows 0 is not made of them"):
        open_lazily(tmp_path, rows)
    assert rows.num_calls == 0


async def late() -> list[dict[str, object]]:
    return []


@pytest.mark.parametrize(
    ("src", "kind"), [(lambda: None, "NoneType"), (lambda: "t.csv", "str"), (lambda: numbered, "function"), (late, "coroutine")]
)
def test_what_a_function_may_not_return_is_refused(src: Callable[[], object], kind: str, tmp_path: Path) -> None:
    name = re.escape(src.__qualname__)
    with pytest.raises(ConfigError, match=f"^src={name} returned a {kind}: return an iterable of dicts or of Arrow batches"):
        build(tmp_path, src)


@pytest.mark.parametrize("item", ["t.csv", 5, None, ("a", 1), [{"a": 1}], pa.array([1])])
def test_an_item_that_is_no_row_is_named_with_its_place(item: Any, tmp_path: Path) -> None:
    rows = Rows(*numbered(), item, *numbered())
    kind = type(item).__name__
    with pytest.raises(ConfigError, match=f"^src=Rows gives the {kind} .* at 5, where a row is expected: give one dict a row"):
        build(tmp_path, rows)
    assert rows.num_closed == 1


def test_an_iterator_that_was_read_before_is_named_with_its_cure(tmp_path: Path) -> None:
    rows = numbered()
    build(tmp_path, rows)
    with pytest.raises(SourceError, match=r"^src has no rows: an iterator gives them once.*src=rows in place of src=rows\(\)"):
        build(tmp_path, rows)
    with pytest.raises(SourceError, match=r"^Rows 0 has no rows"):
        build(tmp_path, Rows())


def test_rows_without_an_end_stop_at_the_limit_and_leave_nothing(tmp_path: Path) -> None:
    closed = []

    def rows() -> Iterator[dict[str, object]]:
        try:
            while True:
                yield {"index": 0, "text": "x" * 1000}
        finally:
            closed.append(True)

    with pytest.raises(CacheFullError, match="index_limit"):
        build(tmp_path, rows, index_limit="16mb")
    assert closed == [True]
    assert not list((tmp_path / "index").iterdir())
