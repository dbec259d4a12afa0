"""Few bytes that stand for many: what rows become is counted before they are unfolded, and bounds each batch."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.config import JoinOptions
from sqlstream.errors import SourceError
from sqlstream.index.build.parquet.row_groups import RowGroupTable
from sqlstream.index.sources.base.base import TableFile
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.base.unfold import BATCH_BYTES, bounded, parquet_batches, row_bytes, together
from sqlstream.index.sources.formats.arrow_file import ArrowTable
from sqlstream.index.sources.formats.parquet import ParquetTable
from tests.goldens import FIXTURES
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build

arrow: Any = pa  # its stubs refuse arrays made of numpy's
LONG = "x" * (1 << 20)
NUM_ROWS = 4000
MOST_BYTES = 300 << 20
"""Of Arrow's memory at any time: some batches; unfolded at once, the rows take 4 GiB."""


def folded(num_rows: int = NUM_ROWS) -> Any:
    return arrow.DictionaryArray.from_arrays(pa.array(np.zeros(num_rows, np.int32)), pa.array([LONG]))


def write_parquet(path: Path, column: Any, **options: Any) -> Path:
    pq.write_table(pa.table({"index": pa.array(range(len(column))), "t": column}), path, compression="zstd", **options)
    return path


def read_all(table: TableFile) -> int:
    """Read a table as the index writer does; return its rows."""
    num_rows = 0
    for batch in table.batches(["index", "t"]):
        assert pa.total_allocated_bytes() < MOST_BYTES
        sizes = row_bytes(batch.column(1))
        assert batch.num_rows == 1 or np.sum(sizes) <= BATCH_BYTES
        num_rows += batch.num_rows
    return num_rows


@pytest.mark.parametrize("form", ["plain", "struct", "list", "map"])
@pytest.mark.parametrize("reader", ["whole", "row groups"])
def test_a_dictionary_of_one_long_value_unfolds_in_bounded_batches(form: str, reader: str, tmp_path: Path) -> None:
    offsets = pa.array(np.arange(NUM_ROWS + 1, dtype=np.int32))
    column: dict[str, Callable[[], Any]] = {
        "plain": folded,
        "struct": lambda: arrow.StructArray.from_arrays([folded()], ["a.b"]),
        "list": lambda: arrow.ListArray.from_arrays(offsets, folded()),
        "map": lambda: arrow.MapArray.from_arrays(offsets, pa.array(["k"] * NUM_ROWS), folded()),
    }
    path = write_parquet(tmp_path / "t.parquet", column[form]())
    assert path.stat().st_size < 300_000
    table: TableFile = ParquetTable(LocalBytes(path), "t.parquet")
    if reader == "row groups":
        metadata = pq.read_metadata(path)
        table = RowGroupTable(metadata, "t.parquet", LocalBytes(path), range(metadata.num_row_groups))
    assert read_all(table) == NUM_ROWS


def test_a_bomb_of_which_two_rows_are_wanted_gives_two_rows(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", folded())
    assert all_rows(build(tmp_path, path, max_size=2)) == [{"index": 0, "t": LONG}, {"index": 1, "t": LONG}]


def test_prefixes_that_repeat_a_long_value_unfold_in_bounded_batches(tmp_path: Path) -> None:
    encodings = {"index": "PLAIN", "t": "DELTA_BYTE_ARRAY"}
    few = pa.array([LONG] * 200)
    path = write_parquet(tmp_path / "t.parquet", few, use_dictionary=False, column_encoding=encodings)
    assert path.stat().st_size < 10_000
    del few
    assert read_all(ParquetTable(LocalBytes(path), "t.parquet")) == 200


def test_a_row_that_unfolds_to_gigabytes_is_refused_by_name(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", arrow.ListArray.from_arrays(pa.array([0, NUM_ROWS], pa.int32()), folded()))
    with pytest.raises(SourceError, match=r"t\.parquet: a row unfolds to 4194\d+ bytes.*index_cols_to_keep"):
        build(tmp_path, path)
    assert all_rows(build(tmp_path, path, columns_to_keep=())) == [{"index": 0}]


def test_a_run_of_numbers_in_one_row_is_refused_before_it_is_read(tmp_path: Path) -> None:
    zeros = pa.array(np.zeros(1_000_000, np.int8))
    path = write_parquet(tmp_path / "t.parquet", arrow.ListArray.from_arrays(pa.array([0, len(zeros)], pa.int32()), zeros))
    batches = parquet_batches(lambda _: pq.ParquetFile(path), [0], ["t"], "t.parquet", most_list_bytes=1 << 20)
    with pytest.raises(SourceError, match=r"lists in column 't\.list\.element' unfold from \d+ to 8000000 bytes"):
        next(batches)
    assert pa.total_allocated_bytes() < MOST_BYTES


@pytest.mark.parametrize("form", ["dictionary", "runs", "views"])
def test_an_arrow_file_unfolds_in_bounded_batches(form: str, tmp_path: Path) -> None:
    _, view, text = arrow.array([LONG], pa.string_view()).buffers()
    column: dict[str, Callable[[], Any]] = {
        "dictionary": folded,
        "runs": lambda: arrow.RunEndEncodedArray.from_arrays(pa.array([NUM_ROWS], pa.int32()), pa.array([LONG])),
        "views": lambda: arrow.Array.from_buffers(
            pa.string_view(), NUM_ROWS, [None, pa.py_buffer(view.to_pybytes() * NUM_ROWS), text]
        ),
    }
    table = pa.table({"index": pa.array(range(NUM_ROWS)), "t": column[form]()})
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert read_all(ArrowTable(LocalBytes(tmp_path / "t.arrow"), "t.arrow")) == NUM_ROWS
    assert len(all_rows(build(tmp_path, tmp_path / "t.arrow", max_size=3))) == 3


TEXTS = ["", "a", None, "ÄÖ" * 10, "x" * 300]
ARRAYS = {
    "strings": pa.array(TEXTS),
    "large": pa.array(TEXTS, pa.large_string()),
    "views": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS).dictionary_encode(),
    "runs": arrow.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5], pa.int32()), pa.array(["ab", None, "cde"])),
    "lists": pa.array([["a", "bc"], None, [], [None], ["d" * 50]]),
    "list views": pa.array([["a", "bc"], None, [], [None], ["d" * 50]], pa.list_view(pa.string())),
    "fixed lists": pa.array([["a", "bc"], None, ["", "d"], [None, "e"], ["f" * 9, "g"]], pa.list_(pa.string(), 2)),
    "structs": pa.array([{"a": "x", "b": ["yy"]}, None, {"a": None, "b": []}, {"a": "zzz", "b": None}, {"a": "", "b": ["w"]}]),
    "maps": pa.array([[("k", "v")], None, [], [("kk", None)], [("a", "b"), ("c", "ddd")]], pa.map_(pa.string(), pa.string())),
}


def num_characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        return num_characters(list(value.values()))
    return sum(map(num_characters, value)) if isinstance(value, (list, tuple)) else 0


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("piece", [slice(0, 5), slice(1, 4), slice(3, 5)])
def test_the_bytes_of_a_row_are_those_of_its_texts(name: str, piece: slice) -> None:
    array = ARRAYS[name][piece]
    assert (np.zeros(len(array)) + row_bytes(array)).tolist() == [num_characters(value) for value in array.to_pylist()]


def test_a_chunk_that_unfolds_to_more_than_memory_holds_is_refused_before_it_is_whole() -> None:
    batches = [pa.record_batch({"t": pa.array(["x" * 100] * 10)}) for _ in range(50)]
    taken = iter(batches)
    with pytest.raises(SourceError, match=r"t\.parquet: a chunk unfolds to more than 20000 bytes.*smaller row groups"):
        together(taken, "t.parquet", 20_000)
    assert len(list(taken)) == 29
    assert together(batches, "t.parquet").num_rows == 500


def test_pieces_are_whole_and_in_order() -> None:
    texts = ["x" * (at % 7) for at in range(1000)]
    batch = pa.record_batch({"t": pa.array(texts)})
    pieces = list(bounded(batch, "t", 20))
    assert [value for piece in pieces for value in piece.column(0).to_pylist()] == texts
    assert all(sum(num_characters(text) for text in piece.column(0).to_pylist()) <= 20 for piece in pieces)
    assert len(pieces) < 200


UNTAKEN = {
    "views": ARRAYS["views"],
    "bytes": pa.array([b"", b"a", None, b"\0" * 20, b"b"], pa.binary_view()),
    "lists of views": pa.array([["a"], None, [], [None], ["d" * 50]], pa.list_(pa.string_view())),
    "structs of views": pa.array(
        [{"a": "x"}, None, {"a": None}, {"a": ""}, {"a": "y" * 20}], pa.struct([("a", pa.string_view())])
    ),
    "runs": ARRAYS["runs"],
    "names": arrow.DictionaryArray.from_arrays(pa.array([0, None, 1, 0, 1]), pa.array(["a", "b"], pa.string_view())),
}
"""Types of which Arrow takes and filters no rows."""


def test_rows_of_every_type_can_be_left_out(tmp_path: Path) -> None:
    """By a join that drops rows, and by the filter of a lazy index."""
    columns: dict[str, Any] = {"index": pa.array([0, 1, 2, 3, 4]), **UNTAKEN}
    kept = [{name: values[at].as_py() for name, values in columns.items()} for at in (1, 4)]
    with pa.ipc.new_file(str(tmp_path / "t.arrow"), pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    join = JoinOptions.of({"more": [{"index": 4, "n": 4}, {"index": 1, "n": 1}]}, "index", "drop")
    for source in (tmp_path / "t.arrow", pa.table(columns)):
        assert all_rows(build(tmp_path, source, join=join)) == [{**row, "n": row["index"]} for row in kept]
    stored = {name: values for name, values in columns.items() if name not in ("runs", "names")}  # Parquet takes none of these
    pq.write_table(pa.table(stored), tmp_path / "t.parquet")
    assert pq.read_schema(tmp_path / "t.parquet").field("views").type == pa.string_view()
    lazy = open_lazily(tmp_path, tmp_path / "t.parquet", where="index IN (1, 4)", chunk_rows=1)
    assert rows_of(lazy) == [{name: row[name] for name in stored} for row in kept]


WITHOUT_PANDAS = """
import sys
from pathlib import Path

class Refusing:
    def find_spec(self, name, path=None, target=None):
        if name == "pandas":
            raise SystemExit("pandas is imported: half a second of a first batch, where it is installed")

sys.meta_path.insert(0, Refusing())
from tests.index.lazily import open_lazily, rows_of
from tests.index.sources import all_rows, build

for number, src in enumerate(sys.argv[2:]):
    directory = Path(sys.argv[1], str(number))
    directory.mkdir()
    rows, lazy = all_rows(build(directory, Path(src))), rows_of(open_lazily(directory, Path(src)))
    assert len(rows) == len(lazy) > 0
    assert "__shard__" in rows[0] or rows == lazy
"""


def test_a_parquet_file_is_read_without_pandas(tmp_path: Path) -> None:
    columns = {
        "index": pa.array(range(300)),
        "text": pa.array([None if row % 7 == 0 else f"text {row % 5}" for row in range(300)]),
        "texts": pa.array([["a"] * (row % 3) for row in range(300)]),
        "runs": pa.array([{"n": row, "t": "x" * row} for row in range(300)]),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=100)
    read_without_pandas(tmp_path, tmp_path / "t.parquet")


def test_shards_are_indexed_without_pandas(tmp_path: Path) -> None:
    read_without_pandas(tmp_path, FIXTURES / "tar/gz.tar.gz", FIXTURES / "mds/plain", FIXTURES / "mds/jsonl")


def read_without_pandas(folder: Path, *sources: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_PANDAS, str(folder), *map(str, sources)]
    ended = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_many_columns_are_found_among_the_leaves_in_a_time_that_grows_with_them(tmp_path: Path) -> None:
    names = [f"c{number}.{number}" for number in range(1900)]
    pq.write_table(pa.table({name: [1] for name in names} | {"c": [{"x": {"y": 1}}], "c1": [2]}), tmp_path / "wide.parquet")

    def open_file(_: list[str]) -> pq.ParquetFile:
        return pq.ParquetFile(tmp_path / "wide.parquet")

    begun = time.process_time()
    (batch,) = parquet_batches(open_file, [0], [*names, "c"], "wide", use_threads=False)
    assert batch.schema.names == [*names, "c"]
    assert time.process_time() - begun < 2  # 5 s where each leaf was compared with each name
