"""A lazy index: the same rows as a built one, out of row groups that are read when they are needed."""

from __future__ import annotations

import contextlib
import datetime as dt
import decimal
import multiprocessing
import os
import pickle
import signal
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, QueryError, SchemaError, SourceChangedError, SourceError, UnknownLengthError
from sqlstream.index.build.chunks import drop_oldest
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.parquet.chunks import together
from sqlstream.index.build.parquet.row_groups import group_spans, parse_footer, read_footer
from sqlstream.index.file.kept import KeptRows
from sqlstream.index.info import list_indexes
from sqlstream.index.sources.base.access import local_file
from sqlstream.index.sources.base.byte_source import Pieces
from sqlstream.index.sql.expressions import condition_of
from tests.index.kills import kill_at
from tests.index.lazily import CHUNK_ROWS, open_lazily, rows_of
from tests.index.sources import FolderReader, NoReader, all_rows, build
from tests.processes import answer_of_forked_child


def pieces_of(index: LazyIndex, number: int, directory: Path, source: Path) -> list[Path]:
    """The bytes of a chunk's spans, as files."""
    paths = []
    for start, stop in index.place_of(number).spans:
        paths.append(directory / f"piece-{start}-{stop}")
        paths[-1].write_bytes(source.read_bytes()[start:stop])
    return paths


def every_type(num_rows: int, first: int = 0) -> pa.Table:
    ids = range(first, first + num_rows)
    noon = dt.datetime(2024, 1, 31, 12, tzinfo=dt.UTC)
    return pa.table(
        {
            "index": [f"key-{i}" for i in ids],
            "n": pa.array([None if i % 7 == 0 else i for i in ids], pa.int32()),
            "score": [float("nan") if i % 11 == 0 else -0.0 if i % 13 == 0 else i / 10 for i in ids],
            "flag": [i % 2 == 0 for i in ids],
            "data": [bytes([i % 256]) for i in ids],
            "at": [noon + dt.timedelta(seconds=i) for i in ids],
            "day": [dt.date(2024, 1, 1) + dt.timedelta(days=i % 300) for i in ids],
            "price": [decimal.Decimal(i).scaleb(-2) for i in ids],
            "tags": [["a", None, str(i)] for i in ids],
            "box": [{"x": i, "y": {"z": [i / 3]}} for i in ids],
            "big": pa.array([2**64 - 1 - i for i in ids], pa.uint64()),
            "word": pa.array([f"w{i % 3}" for i in ids]).dictionary_encode(),
            "box.x": [f"no part of box {i}" for i in ids],
        }
    )


def write(path: Path, table: pa.Table, row_group_rows: int = CHUNK_ROWS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=row_group_rows)
    return path


@pytest.mark.parametrize(
    "where", [None, "n > 120 AND score < 30.5", "row % 3 = 1", "word = 'w1' OR tags LIKE '%7%'", "random_uniform(row, 5) < 0.3"]
)
def test_rows_types_and_ids_are_those_of_a_built_index(where: str | None, tmp_path: Path) -> None:
    write(tmp_path / "d" / "year=2023" / "a.parquet", every_type(350))
    write(tmp_path / "d" / "year=2024" / "b.parquet", every_type(250, 350).drop_columns(["flag"]).append_column(
        "more", pa.array([1.5] * 250)
    ))  # fmt: skip
    lazy = open_lazily(tmp_path, f"{tmp_path}/d/**/*.parquet", where=where)
    whole = build(tmp_path, f"{tmp_path}/d/**/*.parquet", where=where)
    got, wanted = rows_of(lazy), all_rows(whole)
    assert repr(got) == repr(wanted)  # NaN is not equal to itself, -0.0 is equal to 0.0
    assert len(lazy) == len(whole)
    assert [column.field for column in lazy.columns] == [column.field for column in whole.columns]
    assert (
        np.concatenate([lazy.read(number, []).row_ids for number in range(7)]).tolist()
        == whole.row_ids(np.arange(len(whole))).tolist()
    )


def test_only_the_footers_are_read_of_a_remote_source(tmp_path: Path) -> None:
    for number in range(5):
        write(tmp_path / "bucket" / f"{number}.parquet", every_type(1000, 1000 * number))
    remote = FolderReader(tmp_path / "bucket")
    index = open_lazily(tmp_path, "s3://bucket/*.parquet", remote)
    assert remote.count == {"list": 1, "get_ranges": 5}
    assert (index.num_rows, len(index.bounds)) == (5000, 51)
    assert open_lazily(tmp_path, "s3://bucket/*.parquet", remote).fingerprint == index.fingerprint
    assert remote.count == {"list": 2, "get_ranges": 5}, "the second run finds what the first one wrote"


def test_a_footer_beyond_the_first_guess_takes_a_second_request(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", pa.table({f"column-{i}-{'x' * 200}": [i] for i in range(500)}))
    remote = FolderReader(tmp_path)
    file = replace(local_file(path), url="s3://bucket/t.parquet")
    assert parse_footer(read_footer(file, remote), "t").num_columns == 500
    assert remote.count["get_ranges"] == 2


def test_a_chunk_is_read_from_its_bytes_alone_and_few_columns_need_few_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = every_type(1000).append_column("noise", pa.array([rng.bytes(4000) for _ in range(1000)]))
    path = write(tmp_path / "bucket" / "t.parquet", table)
    remote = FolderReader(tmp_path / "bucket")
    whole = build(tmp_path, path)
    index = open_lazily(tmp_path, "s3://bucket/t.parquet", remote)
    (span,) = index.place_of(3).spans
    assert span[1] - span[0] < path.stat().st_size / 9
    chunk = index.read(3, pieces_of(index, 3, tmp_path, path))
    assert repr(chunk.rows(np.array([399, 300, 300]))) == repr(whole.rows([399, 300, 300]))
    few = open_lazily(tmp_path, "s3://bucket/t.parquet", remote, columns_to_keep=("n", "box"))
    wanted = few.place_of(3).spans
    assert sum(stop - start for start, stop in wanted) < 50_000 < span[1] - span[0]
    chunk = few.read(3, pieces_of(few, 3, tmp_path, path))
    assert chunk.rows(np.array([305])) == [{name: whole.rows([305])[0][name] for name in ("index", "n", "box")}]


def test_spans_of_nested_columns_are_those_of_all_their_leaves(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(10))
    metadata = parse_footer(read_footer(local_file(path), NoReader()), "t")
    row_group = metadata.row_group(0)
    columns = [row_group.column(i) for i in range(row_group.num_columns)]
    size = path.stat().st_size
    (span,) = group_spans(metadata, range(1), ["box"], size)
    starts = {column.path_in_schema: column.dictionary_page_offset or column.data_page_offset for column in columns[:-1]}
    leaves = [column for column in columns[:-1] if column.path_in_schema in ("box.x", "box.y.z.list.element")]
    assert len(leaves) == 2
    assert span[0] <= min(starts[column.path_in_schema] for column in leaves)
    assert span[1] >= max(starts[column.path_in_schema] + column.total_compressed_size for column in leaves)
    assert span[1] < columns[-1].data_page_offset, "a column called box.x is no part of box"


def test_bytes_that_were_not_fetched_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "piece").write_bytes(b"abcdef")
    pieces = Pieces([(10, 16)], [tmp_path / "piece"], 100)
    assert (pieces.read_at(12, 2), pieces.read_at(14, 100), pieces.size_bytes) == (b"cd", b"ef", 100)
    with pytest.raises(OSError, match="bytes from 9 on are not among"):
        pieces.read_at(9, 3)
    pieces.close()


@pytest.mark.parametrize(("sizes", "least"), [([10, 10, 10, 50, 5], 20), ([0, 0, 5, 0], 1), ([3], 100), ([7, 0, 7, 0, 0], 7)])
def test_groups_that_are_read_together_cover_all_rows_in_order(sizes: list[int], least: int) -> None:
    ranges = list(together(sizes, least))
    covered = [group for groups in ranges for group in groups]
    assert covered == list(range(len(covered)))
    assert sum(sizes[group] for group in covered) == sum(sizes)
    assert all(sum(sizes[group] for group in groups) >= least for groups in ranges[:-1])


def test_small_row_groups_are_fetched_together_and_max_size_cuts(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(1000), row_group_rows=30)
    index = open_lazily(tmp_path, path, max_size=431)
    assert np.diff(index.bounds).tolist() == [120, 120, 120, 71]
    assert (len(index), index.num_rows) == (431, 431)
    assert [row["index"] for row in rows_of(index)[:431]] == [f"key-{i}" for i in range(431)]


# -- filters ----------------------------------------------------------------------------------------------------------


def test_the_length_is_known_after_the_first_pass_and_in_later_runs(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(1000))
    index = open_lazily(tmp_path, path, sql_query="SELECT * FROM samples WHERE n >= 500;")
    assert index.known_length is None
    with pytest.raises(UnknownLengthError, match=r"has been run on 0 of 10 chunks"):
        len(index)
    with pytest.raises(TypeError):  # so list(), which only asks for a hint, goes on without
        len(index)
    index.read(7, [])
    with pytest.raises(UnknownLengthError, match=r"has been run on 1 of 10 chunks"):
        len(pickle.loads(pickle.dumps(index)))
    assert len(rows_of(index)) == 429
    assert len(open_lazily(tmp_path, path, sql_query="SELECT * FROM samples WHERE n >= 500;")) == 429
    assert len(open_lazily(tmp_path, path)) == 1000


def filters_at_work() -> list[int]:
    """Return our children that run queries."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, parent = int(path.parent.name), int(path.read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"query_child" in (path.parent / "cmdline").read_bytes():
                found.append(pid)
    return found


def test_the_filter_runs_once_on_a_chunk_whichever_process_reads_it(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))

    def read_all() -> str:
        index = open_lazily(tmp_path, path, where="regexp_matches(n, '7')")  # its cost has no bound: a process runs it
        rows, num_filters = rows_of(index), len(filters_at_work())
        index.close()
        return f"{num_filters}: {rows!r}"

    first, second = answer_of_forked_child(read_all), answer_of_forked_child(read_all)
    assert first.startswith("1: [{")
    assert second == f"0{first[1:]}"


def test_the_chunks_of_a_filter_share_one_process_that_ends_with_the_index(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    index = open_lazily(tmp_path, path, where="regexp_matches(n, '7')")
    assert not filters_at_work()  # it is known what the filter reads before it runs
    assert [row["n"] for row in rows_of(index)] == [n for n in range(300) if n % 7 and "7" in str(n)]
    (pid,) = filters_at_work()
    if (child := os.fork()) == 0:  # it leaves to its parent what is the parent's
        index.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert filters_at_work() == [pid]
    index.close()
    assert not filters_at_work()


@pytest.mark.parametrize("max_size", [1, 60, 171, 428, 429, 9999])
def test_max_size_takes_the_first_rows_that_a_filter_keeps(max_size: int, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(1000))
    whole = build(tmp_path, path, where="n >= 500", max_size=max_size)
    index = open_lazily(tmp_path, path, where="n >= 500", max_size=max_size)
    num_read = 0
    while todo := index.to_count(range(10)):
        num_read += 1
        index.read(todo[0], [])
    assert len(index) == len(whole)
    assert num_read == min(10, 6 + (max_size - 1) * 7 // 6 // 100), "no chunk was read after enough rows were found"
    found = [row for number, size in enumerate(index.sizes()) for row in index.read(number, []).row_ids[:size].tolist()]
    assert found == whole.row_ids(np.arange(len(whole))).tolist()


def test_what_was_torn_by_a_power_cut_is_filtered_again(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    index = open_lazily(tmp_path, path, where="n > 50")
    wanted = repr(rows_of(index))
    damaged = bytearray(index.kept_path.read_bytes())
    damaged[3 * 8 + 1] ^= 255  # the first chunk's bits
    index.kept_path.write_bytes(damaged)
    again = open_lazily(tmp_path, path, where="n > 50")
    assert again.kept.offsets(0) is None
    assert repr(rows_of(again)) == wanted


@pytest.mark.parametrize("at", range(8))
def test_a_count_of_kept_rows_that_is_damaged_is_not_known(at: int, tmp_path: Path) -> None:
    """Orders go by the counts of all chunks, of which most are read much later."""
    path = write(tmp_path / "t.parquet", every_type(300))
    index = open_lazily(tmp_path, path, where="n > 50")
    wanted, num_rows = repr(rows_of(index)), len(index)
    damaged = bytearray(index.kept_path.read_bytes())
    damaged[2 * 8 + at] ^= 1  # the last chunk's checksum, or its count
    index.kept_path.write_bytes(damaged)
    again = open_lazily(tmp_path, path, where="n > 50")
    assert again.to_count(range(3)) == [2]
    assert repr(rows_of(again)) == wanted
    assert len(again) == num_rows


@given(st.data())
def test_kept_rows_come_back_as_they_were_noted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = np.array(data.draw(st.lists(st.integers(0, 40), min_size=1, max_size=6)))
    path = tmp_path_factory.mktemp("kept") / "k"
    path.write_bytes(bytes(KeptRows.size_bytes(sizes)))
    kept, other = KeptRows(path, sizes), KeptRows(path, sizes)
    chosen = [sorted(data.draw(st.sets(st.integers(0, size - 1)))) if size else [] for size in sizes.tolist()]
    assert kept.counts().tolist() == [-1] * len(sizes)
    for chunk, offsets in enumerate(chosen):
        kept.write(chunk, np.array(offsets, np.int64))
        found = other.offsets(chunk)
        assert found is not None
        assert found.tolist() == offsets
    assert other.counts().tolist() == [len(offsets) for offsets in chosen]


@pytest.mark.parametrize(
    ("query", "where", "condition"),
    [
        (None, None, None),
        ("SELECT * FROM dataframe", None, None),
        ("select * from samples -- all", "n > 6;", "(n > 6)"),
        ("SELECT * FROM \"dataframe\" WHERE a = 'order by' ; ", None, "(a = 'order by')"),
        ("SELECT * FROM dataframe WHERE a OR b", "c", "(a OR b) AND (c)"),
    ],
)
def test_a_query_that_judges_rows_is_one_condition(query: str | None, where: str | None, condition: str | None) -> None:
    assert condition_of(query, where) == condition


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM dataframe WHERE n IN other",
        "SELECT * FROM dataframe WHERE n) UNION SELECT * FROM (dataframe",
        "SELECT * FROM main.dataframe",
        "SELECT index FROM dataframe",
        "SELECT *, n + 1 AS m FROM dataframe",
        "SELECT * FROM dataframe ORDER BY n",
        "SELECT * FROM dataframe WHERE n > 1 LIMIT 5",
        "SELECT * FROM dataframe WHERE n > (SELECT avg(n) FROM dataframe)",
        "SELECT * FROM dataframe WHERE row_number() OVER () < 5",
        "SELECT DISTINCT * FROM dataframe",
        "WITH x AS (SELECT 1) SELECT * FROM dataframe",
        "SELECT * FROM dataframe AS d WHERE d.n > 1",
        "SELECT * FROM other",
    ],
)
def test_a_query_that_looks_at_several_rows_is_refused(query: str) -> None:
    with pytest.raises(QueryError, match=r"cannot filter a lazy index.*leave lazy_index_chunk_size out"):
        condition_of(query, None)


def test_errors_of_a_filter_show_at_once_with_the_columns_at_hand(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    with pytest.raises(QueryError, match=r"no such column: scor.*its columns: row, index, n, score"):
        open_lazily(tmp_path, path, where="scor > 5")
    with pytest.raises(QueryError, match="not allowed"):
        open_lazily(tmp_path, path, where="load_extension('x')")


# -- what is refused --------------------------------------------------------------------------------------------------


def test_what_needs_all_rows_is_refused_with_the_cure(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    (tmp_path / "t.csv").write_text("index\n1\n")
    with pytest.raises(ConfigError, match="lazy_index_chunk_size needs Parquet files"):
        open_lazily(tmp_path, tmp_path / "t.csv")
    with pytest.raises(ConfigError, match="sql_engine='duckdb'"):
        open_lazily(tmp_path, path, where="n > 1", sql_engine="duckdb")
    with pytest.raises(SchemaError, match="columns_to_download names 'img'"):
        open_lazily(tmp_path, path, columns_to_download=("img",))


def test_a_file_that_is_no_whole_parquet_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    whole = write(tmp_path / "whole.parquet", every_type(10)).read_bytes()
    for content in (b"", b"PAR1", b"x" * 100, whole[:-9], b"\xff\xff\xff\x7fPAR1", whole[:-40] + whole[-8:]):
        path.write_bytes(content)
        with pytest.raises(SourceError, match=r"t\.parquet"):
            open_lazily(tmp_path, path)


def test_a_source_that_changed_is_noticed(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    index = open_lazily(tmp_path, path)
    index.read(0, [])
    write(path, every_type(200))
    os.utime(path, (1, 1))
    with pytest.raises(SourceChangedError, match="changed since its footer was read"):
        index.read(0, [])
    with pytest.raises(SourceChangedError, match="is not what was indexed"):
        open_lazily(tmp_path, path, on_source_change="raise")
    assert len(open_lazily(tmp_path, path)) == 200


def test_the_lazy_file_of_a_source_is_no_built_one(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(300))
    lazy, whole = open_lazily(tmp_path, path), build(tmp_path, path)
    assert lazy.path != whole.path
    is_lazy = {info.path: info.is_lazy for info in list_indexes(tmp_path / "index")}
    assert is_lazy == {str(lazy.path): True, str(whole.path): False}
    assert lazy.path.stat().st_size < whole.path.stat().st_size + 20_000


@pytest.mark.parametrize("where", [None, "n > 50"])
def test_killed_anywhere_it_leaves_nothing_that_opens_and_the_next_run_goes_on(where: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet", every_type(120), row_group_rows=60)
    directory = tmp_path / "index"
    wanted, number, code = None, 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        number += 1
        for left in directory.glob("*"):
            left.unlink()

        def work(number: int = number) -> None:
            directory.mkdir(exist_ok=True)
            kill_at(number, directory)
            rows_of(open_lazily(tmp_path, path, where=where, chunk_rows=60))

        process = multiprocessing.get_context("fork").Process(target=work)
        process.start()
        process.join()
        code = process.exitcode or 0
        found = repr(rows_of(open_lazily(tmp_path, path, where=where, chunk_rows=60)))
        wanted = wanted or found
        assert found == wanted, f"killed at {number}"
        assert [left.name for left in directory.glob("*") if left.suffix in (".tmp", ".lock")] == []
    assert code == 0
    assert number > 5, "nothing was killed"


@pytest.mark.parametrize(
    ("sizes", "num_least", "kept"),
    [
        ([10, 10, 10], 1, [0, 1, 2]),
        ([10, 20, 10, 10], 1, [2, 3]),
        ([10, 20, 10, 10], 3, [1, 2, 3]),
        ([50, 50], 2, [0, 1]),
        ([5, 50], 1, [1]),
        ([], 0, []),
    ],
)
def test_what_was_used_longest_ago_is_dropped_down_to_a_size_and_never_below_a_number(
    sizes: list[int], num_least: int, kept: list[int]
) -> None:
    tables = OrderedDict((number, np.zeros(size, np.uint8)) for number, size in enumerate(sizes))
    drop_oldest(tables, num_least=num_least, max_bytes=30)
    assert list(tables) == kept
