"""Dialects, encodings, compression, Arrow files, partitions, folders with metadata, tables in memory, several sources."""

from __future__ import annotations

import codecs
import datetime as dt
import gzip
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from sqlstream.config import IndexOptions, JoinOptions
from sqlstream.errors import ConfigError, SchemaError, SourceError
from sqlstream.index.build.build import open_index
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.formats.delimited import DelimitedTable
from tests.index.sources import ROWS, FolderReader, all_rows, build, make_samples, rows_in, write_csv, write_table


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


PACK: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstd}


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("extension", [".csv", ".tsv", ".json", ".jsonl"])
def test_compressed_text_reads_as_plain_text(extension: str, packed: str, where: str, tmp_path: Path) -> None:
    plain = write_table(tmp_path / f"plain/table{extension}", ROWS)
    (tmp_path / "d").mkdir()
    (tmp_path / f"d/part.0001{extension}{packed}").write_bytes(PACK[packed](plain.read_bytes()))
    base = str(tmp_path) if where == "local" else "s3://bucket"
    index = build(tmp_path, f"{base}/d/*{extension}{packed}", FolderReader(tmp_path))
    assert all_rows(index) == ROWS


@pytest.mark.parametrize("packed", [".gz", ".zst"])
@pytest.mark.parametrize("extension", [".csv", ".tsv", ".json", ".jsonl"])
def test_the_first_bytes_tell_whether_text_is_compressed(extension: str, packed: str, tmp_path: Path) -> None:
    plain = write_table(tmp_path / f"plain{extension}", ROWS).read_bytes()
    (tmp_path / f"unpacked{extension}{packed}").write_bytes(plain)  # as by a server that undoes it on the way
    (tmp_path / f"packed{extension}").write_bytes(PACK[packed](plain))
    assert all_rows(build(tmp_path, tmp_path / f"unpacked{extension}{packed}")) == ROWS
    assert all_rows(build(tmp_path, tmp_path / f"packed{extension}")) == ROWS


@pytest.mark.parametrize("extension", [".csv", ".json", ".jsonl"])
@pytest.mark.parametrize("packed", [".gz", ".zst"])
def test_a_compressed_file_that_is_cut_short_is_refused_by_name(extension: str, packed: str, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"index": f"key {at * 7919 % 5000}", "n": at * at} for at in range(5000)]
    whole = PACK[packed](write_table(tmp_path / f"plain{extension}", rows).read_bytes())
    path = tmp_path / f"cut{extension}{packed}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=path.name):
        build(tmp_path, path)


DIALECTS: list[tuple[str, dict[str, Any]]] = [
    ("index;n\na,x;1\n'b';2\n", {}),
    ("index|n\na,x|1\n'b'|2\n", {}),
    ("index\tn\na,x\t1\n'b'\t2\n", {}),
    ("index,n\n\"a,x\",1\n'b',2\n", {}),
    ("index,n\n'a,x',1\n'''b''',2\n", {"quote_char": "'"}),
    ("index~n\na,x~1\n'b'~2\n", {"delimiter": "~", "quote_char": ""}),
]


@pytest.mark.parametrize(("text", "options"), DIALECTS, ids=[text for text, _ in DIALECTS])
def test_csv_dialects(text: str, options: dict[str, Any], tmp_path: Path) -> None:
    index = build(tmp_path, write_csv(tmp_path / "t.csv", text), **options)
    assert all_rows(index) == [{"index": "a,x", "n": 1}, {"index": "'b'", "n": 2}]


@pytest.mark.parametrize("first", ["sep=;", "sep=,", '"sep=;"', "SEP=|"])
def test_a_first_line_that_is_for_excel_is_no_header(first: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"t\.csv begins with '[sS][eE][pP]=.', a note for Excel .*: remove that line"):
        build(tmp_path, write_csv(tmp_path / "t.csv", f"{first}\na;b\n1;x\n"))


def test_objects_without_keys_are_no_rows(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text("{}\n{}\n")
    with pytest.raises(SourceError, match="has no rows with a column: an index needs one at least"):
        build(tmp_path, tmp_path / "t.jsonl")


ENCODINGS = [
    ("latin-1", b"", "latin-1"),
    ("cp1252", b"", "cp1252"),
    ("utf-16-le", codecs.BOM_UTF16_LE, None),
    ("utf-16-be", codecs.BOM_UTF16_BE, None),
    ("utf-32-le", codecs.BOM_UTF32_LE, None),
    ("utf-8", codecs.BOM_UTF8, None),
    ("utf-8", codecs.BOM_UTF8, "UTF8"),
    ("utf-16-le", codecs.BOM_UTF16_LE, "utf-16-le"),
    ("utf-16-be", codecs.BOM_UTF16_BE, "UTF-16BE"),
    ("utf-32-be", codecs.BOM_UTF32_BE, "utf_32_be"),
    ("utf-16-le", b"", "utf-16-le"),
]


@pytest.mark.parametrize(("encoding", "mark", "given"), ENCODINGS)
@pytest.mark.parametrize("extension", [".csv", ".json", ".jsonl"])
def test_encodings(extension: str, encoding: str, mark: bytes, given: str | None, tmp_path: Path) -> None:
    text = {
        ".csv": "index,größe\nä,1\nöß,2\n",
        ".json": '[{"index": "ä", "größe": 1},\n {"index": "öß", "größe": 2}]',
        ".jsonl": '{"index": "ä", "größe": 1}\n{"index": "öß", "größe": 2}\n',
    }[extension]
    path = tmp_path / f"t{extension}"
    path.write_bytes(mark + text.encode(encoding))
    assert all_rows(build(tmp_path, path, encoding=given)) == [{"index": "ä", "größe": 1}, {"index": "öß", "größe": 2}]
    if given is not None and not mark:
        with pytest.raises(SourceError, match=r"UTF-8|encoding"):
            build(tmp_path, path)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-be"])
def test_a_csv_of_wide_characters_without_a_mark_is_refused_by_what_helps(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes("index,n\na,1\n".encode(encoding))
    with pytest.raises(SourceError, match=r"t\.csv: the header has NUL.*give encoding, as 'utf-16-le'"):
        build(tmp_path, tmp_path / "t.csv")
    assert all_rows(build(tmp_path, tmp_path / "t.csv", encoding=encoding)) == [{"index": "a", "n": 1}]


@pytest.mark.parametrize("extension", [".csv", ".json", ".jsonl"])
def test_text_that_is_not_in_its_encoding_is_refused_by_name(extension: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"t{extension}", ROWS)
    for encoding in ("utf-16", "utf-32"):  # of which Python raises no UnicodeDecodeError
        with pytest.raises(SourceError, match=rf"{path.name}.*give (another )?encoding"):
            build(tmp_path, path, encoding=encoding)


def test_quoted_newlines_survive_blocks(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,text\n" + "".join(f'{at},"line {at}\nand ""more"""\n' for at in range(500)))
    rows = rows_in(DelimitedTable(LocalBytes(path), str(path), block_bytes=1 << 10))
    assert rows[321] == {"index": 321, "text": 'line 321\nand "more"'}


@pytest.mark.parametrize("extension", [".arrow", ".feather", ".ipc"])
@pytest.mark.parametrize("form", ["file", "stream"])
def test_arrow_files_of_both_forms(extension: str, form: str, tmp_path: Path) -> None:
    table = pa.table(
        {
            "index": ["a", "b"],
            "when": pa.array([dt.datetime(2024, 1, 2, tzinfo=dt.UTC), None]),
            "vector": [[0.5, 1.5], []],
            "label": pa.array(["x", "y"]).dictionary_encode(),
        }
    )
    path = tmp_path / f"t{extension}"
    make = pa.ipc.new_file if form == "file" else pa.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    assert all_rows(build(tmp_path, path)) == table.to_pylist()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(SourceError, match=rf"t\{extension} cannot be read"):
        build(tmp_path, path)


def test_hive_partitions_become_columns(tmp_path: Path) -> None:
    for at, folder in enumerate(
        ("year=2024/label=cat", "year=2024/label=a%20dog", "year=2025/label=__HIVE_DEFAULT_PARTITION__")
    ):
        write_table(tmp_path / f"d/{folder}/0.parquet", [{"index": at, "own": at}])
    rows = all_rows(build(tmp_path, tmp_path / "d/**/*.parquet"))
    assert sorted((str(row["label"]), row["year"], row["index"]) for row in rows) == [
        ("None", 2025, 2),
        ("a dog", 2024, 1),
        ("cat", 2024, 0),
    ]
    chosen = build(
        tmp_path, tmp_path / "d/**/*.parquet", where="year = 2024 AND label LIKE 'c%'", columns_to_keep=("label", "year")
    )
    assert all_rows(chosen) == [{"index": 0, "year": 2024, "label": "cat"}]


@pytest.mark.parametrize("where", ["local", "remote"])
@pytest.mark.parametrize("extension", [".csv", ".jsonl", ".parquet"])
def test_a_folder_with_metadata_as_hugging_face_has_it(extension: str, where: str, tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "train/cat/1.jpg", "train/2.jpg", "test/1.jpg")
    write_table(
        tmp_path / f"d/train/metadata{extension}",
        [{"file_name": "cat/1.jpg", "caption": "a cat"}, {"file_name": "2.jpg", "caption": "two"}],
    )
    write_table(tmp_path / f"d/test/metadata{extension}", [{"file_name": "./1.jpg", "caption": "one"}])
    base = str(tmp_path) if where == "local" else "s3://bucket"
    index = build(tmp_path, f"{base}/d/", FolderReader(tmp_path), columns_to_download=("file_name",))
    assert all_rows(index) == [
        {"index": "test/1.jpg", "file_name": "test/1.jpg", "caption": "one"},
        {"index": "train/cat/1.jpg", "file_name": "train/cat/1.jpg", "caption": "a cat"},
        {"index": "train/2.jpg", "file_name": "train/2.jpg", "caption": "two"},
    ]
    assert index.resolve("train/2.jpg") == f"{base}/d/train/2.jpg"


def test_metadata_lists_and_names_that_lead_out(tmp_path: Path) -> None:
    write_table(tmp_path / "a/x/metadata.parquet", [{"key": 1, "left_file_name": "l.png", "file_names": ["1.png", "2.png"]}])
    assert all_rows(build(tmp_path, tmp_path / "a", key_column="key")) == [
        {"key": 1, "left_file_name": "x/l.png", "file_names": ["x/1.png", "x/2.png"]}
    ]
    for name in ("../../etc/passwd", "/etc/passwd", "https://host/x"):
        write_table(tmp_path / "b/metadata.csv", [{"file_name": name}])
        with pytest.raises(SourceError, match="leads out of its folder"):
            build(tmp_path, tmp_path / "b")
    write_table(tmp_path / "dots/x/metadata.csv", [{"file_name": "..1.png"}])
    assert all_rows(build(tmp_path, tmp_path / "dots"))[0]["file_name"] == "x/..1.png"
    write_table(tmp_path / "dots/metadata.csv", [{"file_name": "..1.png"}])
    assert all_rows(build(tmp_path, tmp_path / "dots"))[0]["file_name"] == "..1.png"
    write_table(tmp_path / "c/metadata.csv", [{"name": "x"}])
    with pytest.raises(SchemaError, match=r"no column 'file_name' .*give data_type"):
        build(tmp_path, tmp_path / "c")


def test_the_folder_of_a_sample_is_its_class(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "cat/1.jpg", "dog/1.jpg", "dog/1.txt", "2.jpg")
    index = build(tmp_path, tmp_path / "d", data_type="image", label_column="label")
    assert all_rows(index) == [
        {"index": "2", "jpg": "2.jpg", "txt": None, "label": "", "image": "2.jpg"},
        {"index": "cat/1", "jpg": "cat/1.jpg", "txt": None, "label": "cat", "image": "cat/1.jpg"},
        {"index": "dog/1", "jpg": "dog/1.jpg", "txt": "dog/1.txt", "label": "dog", "image": "dog/1.jpg"},
    ]
    with pytest.raises(SourceError, match="label_column='jpg' is a column"):
        build(tmp_path, tmp_path / "d", data_type="image", label_column="jpg")


def rows_of() -> Iterator[dict[str, object]]:
    yield from ({**row} for row in ROWS)


def in_memory(kind: str) -> Any:
    table = pa.Table.from_pylist(ROWS)
    if kind in ("pandas", "pandas with an index"):
        pytest.importorskip("pandas")
        frame = table.to_pandas(types_mapper=None)
        return frame.set_index("index") if kind != "pandas" else frame
    if kind.startswith("polars"):
        frame = pytest.importorskip("polars").from_arrow(table)
        return frame.lazy() if kind == "polars lazy" else frame
    return {"pyarrow": table, "reader": table.to_reader(), "list": list(rows_of()), "generator": rows_of()}[kind]


KINDS = ["pyarrow", "reader", "pandas", "pandas with an index", "polars", "polars lazy", "list", "generator"]


def test_two_lists_in_memory_are_two_sources(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        train, val = (build(tmp_path, [{"index": key}]) for key in ("a", "b"))
        assert [row["index"] for index in (train, val) for row in all_rows(index)] == ["a", "b"]
    assert caplog.messages == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_in_memory_is_a_source(kind: str, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    first = build_object(tmp_path, in_memory(kind), path_prefix="s3://bucket")
    rows = all_rows(first)
    assert [row["index"] for row in rows] == ["a", "b", "c"]
    assert [row["n"] for row in rows] == [1, None, -3]
    assert [row["text"] for row in rows] == [row["text"] for row in ROWS]
    assert first.resolve("x") == "s3://bucket/x"
    assert build_object(tmp_path, in_memory(kind), path_prefix="s3://bucket").fingerprint == first.fingerprint
    changed = [{**row, "n": 7} for row in ROWS]
    assert build_object(tmp_path, changed).fingerprint != first.fingerprint


def build_object(directory: Path, src: Any, **changes: Any) -> Any:
    (directory / "index").mkdir(exist_ok=True)
    return open_index(IndexOptions(src=src, **changes), directory / "index", FolderReader(directory), show_progress=False)


def test_rows_of_an_iterable_may_lack_keys_but_not_mix_types(tmp_path: Path) -> None:
    rows = ({"index": at, **({"late": at} if at > 9000 else {})} for at in range(10_000))
    index = build_object(tmp_path, rows)
    assert index.rows([9000, 9001]) == [{"index": 9000, "late": None}, {"index": 9001, "late": 9001}]
    with pytest.raises(SchemaError, match="'n' has values of several types"):
        build_object(tmp_path, [{"index": 1, "n": 1}, {"index": 2, "n": "x"}])
    with pytest.raises(ConfigError, match="one dict a row"):
        build_object(tmp_path, iter([1, 2]))
    with pytest.raises(ConfigError, match="of type int"):
        build_object(tmp_path, 7)
    for empty in ([], "", [""]):
        with pytest.raises(ConfigError, match="src is empty"):
            build_object(tmp_path, empty)


def test_times_with_a_zone_which_arrow_would_drop_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SchemaError, match="column 'at' has times of a day with a zone"):
        build(tmp_path, [{"index": 1, "at": None}, {"index": 2, "at": dt.time(12, tzinfo=dt.UTC)}])


def test_several_sources_say_which_row_is_whose_and_keep_their_places(tmp_path: Path) -> None:
    write_table(tmp_path / "a/t.csv", [{"index": 1, "url": "x.jpg"}])
    write_table(
        tmp_path / "b/t.parquet",
        [{"index": 2, "url": "y.jpg", "more": True}, {"index": 3, "url": "https://h/z.jpg", "more": None}],
    )
    src = [tmp_path / "a/t.csv", "s3://bucket/b/*.parquet", pa.table({"index": [4], "url": [None]})]
    index = build_object(tmp_path, src, columns_to_download=("url",))
    assert [(row["index"], row["__source__"], row["more"]) for row in all_rows(index)] == [
        (1, str(tmp_path / "a/t.csv"), None),
        (2, "s3://bucket/b/*.parquet", True),
        (3, "s3://bucket/b/*.parquet", None),
        (4, "Table 2", None),
    ]
    found = [index.resolve(str(row["url"])) for row in all_rows(index)[:3]]
    assert found == [str(tmp_path / "a/x.jpg"), "s3://bucket/b/y.jpg", "https://h/z.jpg"]
    chosen = build_object(tmp_path, src, columns_to_download=("url",), where="__source__ LIKE 's3:%'")
    assert [row["index"] for row in all_rows(chosen)] == [2, 3]
    same = build_object(
        tmp_path,
        [tmp_path / "a/t.csv", tmp_path / "a/*.csv"],
        columns_to_download=("url",),
        sql_query="SELECT * FROM dataframe LIMIT 1",
    )
    assert all_rows(same)[0]["url"] == "x.jpg"  # one place: paths stay relative
    secret = [tmp_path / "a/t.csv", "s3://me:geheim@bucket/b/*.parquet"]
    with pytest.raises(ConfigError, match="credentials in its URL"):
        open_index(IndexOptions(src=secret), tmp_path / "index", FolderReader(tmp_path, "s3://me:geheim@bucket"))


def test_a_path_prefix_overrides_the_place_of_the_index(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index\n1\n")
    assert build(tmp_path, path, path_prefix="s3://bucket/data/").resolve("x") == "s3://bucket/data/x"
    assert build(tmp_path, path, path_prefix=str(tmp_path / "e")).resolve("x") == str(tmp_path / "e/x")
    assert build(tmp_path, path).resolve("x") == str(tmp_path / "x")


def test_a_condition_beside_the_query(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "t.csv", "index,n\na,1\nb,2\nc,3\nd,4\n")
    assert [row["index"] for row in all_rows(build(tmp_path, path, where="n > 2 OR n = 1"))] == ["a", "c", "d"]
    query = "SELECT * FROM dataframe WHERE n != 4 ORDER BY n DESC; -- c, b, a"
    index = build(tmp_path, path, sql_query=query, where="n / 2 > 0.5 -- all but a")
    assert index.selection is not None
    assert [row["index"] for row in all_rows(index)] == ["c", "b"]
    computed = build(tmp_path, path, sql_query="SELECT index, n * n AS square FROM dataframe", where="square > 8")
    assert all_rows(computed) == [{"index": "c", "square": 9}, {"index": "d", "square": 16}]
    limited = build(tmp_path, path, sql_query="SELECT * FROM dataframe ORDER BY n DESC LIMIT 2", where="n < 4")
    assert [row["index"] for row in all_rows(limited)] == ["c"]


def test_words_that_are_none_are_refused() -> None:
    for wrong in ({"sql_engine": "postgres"}, {"on_source_change": "ignore"}, {"delimiter": ";;"}, {"quote_char": "«"}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            IndexOptions(src="x.csv", **wrong)  # type: ignore[arg-type]  # each value is a text


@pytest.mark.parametrize("given", [
    {"damaged_shards": "skip"}, {"missing_shards": "skip"}, {"new_parts": "take"}, {"decode": False}, {"label_column": "label"},
    {"index_members": ("txt",)},
])  # fmt: skip
def test_an_option_of_other_sources_is_refused_with_its_name(given: dict[str, Any], tmp_path: Path) -> None:
    (name,) = given
    write_csv(tmp_path / "d/metadata.csv", "file_name\na.txt\n")
    write_csv(tmp_path / "d/a.txt", "a")
    for src in (write_csv(tmp_path / "t.csv", "x\n1\n"), [{"x": 1}], tmp_path / "d"):
        with pytest.raises(ConfigError, match=f"^{name}=.* is for .*, and .+ is none: leave it out$"):
            build(tmp_path, src, **given)
    table = write_csv(tmp_path / "u.csv", "x,y\n1,2\n")
    with pytest.raises(ConfigError, match=f"^{name}=.*t\\.csv is none"):
        build(tmp_path, tmp_path / "t.csv", join=JoinOptions(tables={"u": table}, on="x"), **given)


def test_a_joined_table_needs_no_use_of_the_options_of_the_source(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "cat/1.txt", "dog/2.txt")
    table = write_csv(tmp_path / "t.csv", "index,y\ncat/1,1\ndog/2,2\n")
    join = JoinOptions(tables={"t": table}, on="index")
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="text", label_column="label", join=join))
    assert [(row["label"], row["y"]) for row in rows] == [("cat", 1), ("dog", 2)]


@pytest.mark.parametrize(("given", "names"), [
    ({"delimiter": ";"}, "pjm"), ({"quote_char": "'"}, "pjm"), ({"encoding": "latin-1"}, "pm"),
])  # fmt: skip
def test_options_of_texts_are_refused_where_no_table_has_a_use_for_them(
    given: dict[str, Any], names: str, tmp_path: Path
) -> None:
    parquet, lines = (write_table(tmp_path / f"t.{kind}", [{"x": 1}]) for kind in ("parquet", "jsonl"))
    sources = {"p": parquet, "j": lines, "m": [{"x": 1}]}
    (name,) = given
    for kind in names:
        with pytest.raises(
            ConfigError, match=rf"^{name}=.* is for tables of texts \(\.csv, .*, and .+ has none: leave it out$"
        ):
            build(tmp_path, sources[kind], **given)
    text = write_csv(tmp_path / "u.csv", "x\n1\n")
    assert len(all_rows(build(tmp_path, [str(parquet), str(text)], **given))) == 2
    assert all_rows(build(tmp_path, parquet, join=JoinOptions(tables={"u": str(text)}, on="x"), **given)) == [{"x": 1}]


@pytest.mark.parametrize("taken", ["image", "mask"])
def test_a_column_of_metadata_in_a_zip_that_is_named_as_content_is_an_error(taken: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("a.jpg", b"1")
        archive.writestr("b.png", b"2")
        archive.writestr("metadata.csv", f"file_name,mask_file_name,{taken}\na.jpg,b.png,of a cat\n")
    with pytest.raises(SchemaError, match=f"x.zip: the column '{taken}' is of content .* metadata: rename that column"):
        build(tmp_path, tmp_path / "x.zip")


def test_a_label_column_of_a_zip_that_is_named_as_content_is_an_error(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        archive.writestr("cat/a.jpg", b"1")
    with pytest.raises(SchemaError, match=r"x\.zip: the column 'jpg' is of content .* label_column: give another name"):
        build(tmp_path, tmp_path / "x.zip", label_column="jpg")
