"""`sqlstream shards`: any source as shards of any format, and what is said of them."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import sqlite3
import tarfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.write import MdsWriter, TarWriter
from tests.cli.commands import picture, shards, write, write_pictures
from tests.goldens import FIXTURES


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A table of eight rows that name files."""
    return write_pictures(tmp_path)


def rows_of(out: Path, *names: str) -> list[Any]:
    with StreamingDataset(str(out), str(out.parent / "read")) as dataset:
        rows = [tuple(row[name] for name in names) for row in dataset]
    return [row[0] for row in rows] if len(names) == 1 else rows


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {member.name: file.read() for member in archive if (file := archive.extractfile(member)) is not None}


def test_a_table_becomes_mds_filtered_and_shuffled(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--format", "mds", "--download", "image", "--where", "score > 2", "--columns", "image", "caption", "score")
    code, document = write(capsys, pictures, tmp_path / "out", *words, "--shuffle", "5", "--json")
    assert (code, document["samples"], document["left_out"]) == (0, 6, 0)
    rows = rows_of(tmp_path / "out", "image", "caption", "score")
    with StreamingDataset(str(pictures), str(tmp_path / "cache"), where="score > 2", shuffle_seed=5) as dataset:
        captions = [row["caption"] for row in dataset]
    assert [caption for _, caption, _ in rows] == captions != sorted(captions)
    assert all(image == picture(int(score)) for image, _, score in rows)
    index = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]
    assert dict(zip(index["column_names"], index["column_encodings"], strict=True)) == {
        "image": "bytes",
        "caption": "str",
        "score": "float64",
    }


def test_a_table_becomes_tars_with_its_facts_in_json(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--format", "tar", "--download", "image", "--max-samples", "5", "--hashes", "md5")
    assert write(capsys, pictures, tmp_path / "out", *words)[0] == 0
    found = members(tmp_path / "out" / "shard-000001.tar")
    assert list(found) == [f"{n:09}.{ext}" for n in (5, 6, 7) for ext in ("json", "jpg")]
    assert json.loads(found["000000006.json"]) == {"caption": "a cat 6", "score": 6.5}
    renamed = ("--format", "tar", "--download", "image", "--columns", "image=png", "caption=txt", "--key", "caption")
    assert write(capsys, pictures, tmp_path / "named", *renamed)[0] == 0
    assert list(members(tmp_path / "named" / "shard-000000.tar"))[:2] == ["a cat 0.png", "a cat 1.png"]


def test_parts_are_neighbours_and_merge_joins_them(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--format", "mds", "--download", "image", "--columns", "image:jpeg", "caption=text")
    for part in ("2/3", "0/3", "1/3"):
        code, document = write(capsys, pictures, tmp_path / "out", *words, "--part", part, "--json")
        assert (code, document["samples"]) == (0, 3 if part != "0/3" else 2)
    code, document = shards(capsys, "merge", tmp_path / "out", "--json")
    assert (code, document["parts"], document["samples"]) == (0, 3, 8)
    index = json.loads((tmp_path / "out" / "index.json").read_text())["shards"]
    assert [shard["column_encodings"] for shard in index] == [["jpeg", "str"]] * 3
    assert rows_of(tmp_path / "out", "text") == [f"a cat {n}" for n in range(8)]


def test_archives_keep_keys_and_extensions_and_mds_keeps_files_of_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = FIXTURES / "wds" / "shard-000000.tar"
    assert write(capsys, src, tmp_path / "zip", "--format", "zip")[0] == 0
    assert write(capsys, src, tmp_path / "tar", "--format", "tar", "--columns", "jpg", "json")[0] == 0
    golden = members(src)
    found = members(tmp_path / "tar" / "shard-000000.tar")
    assert found == {name: golden[name] for name in golden if name.endswith((".jpg", ".json"))}
    words = ("--format", "tar", "--columns", "jpg", "--where", "json IS NOT NULL", "--weights", "length(__key__)")  # of others
    assert write(capsys, src, tmp_path / "some", *words)[0] == 0
    assert {name.rpartition(".")[2] for name in members(tmp_path / "some" / "shard-000000.tar")} == {"jpg"}
    code, text = write(capsys, src, tmp_path / "none", "--format", "tar", "--columns", "nope")
    assert (code, "--columns names 'nope'" in text) == (2, True)
    assert write(capsys, FIXTURES / "mds" / "zstd", tmp_path / "mds", "--format", "tar", "--columns", "image", "label")[0] == 0
    png = members(tmp_path / "mds" / "shard-000000.tar")["000000000.png"]
    assert png.startswith(b"\x89PNG")


def test_a_table_becomes_parquet_with_its_files_inside(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--format", "parquet", "--download", "image", "--columns", "image:Image", "score", "--weights", "score < 2")
    assert write(capsys, pictures, tmp_path / "out", *words, "--num-samples", "4")[0] == 0
    rows = pq.read_table(tmp_path / "out").to_pylist()
    assert sorted(row["score"] for row in rows) == [0.5, 0.5, 1.5, 1.5]
    assert rows[0]["image"]["bytes"].startswith(b"\xff\xd8\xff")


def test_parquet_has_the_types_of_the_source_whatever_its_first_rows_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = {
        "late": pa.array([None] * 5 + [1] * 5, pa.int16()),
        "price": pa.array([Decimal(10**n) for n in range(10)], pa.decimal128(12, 2)),
        "tags": pa.array([[]] * 5 + [[1.5]] * 5, pa.list_(pa.float32())),
        "box": pa.array([{"x": None}] * 5 + [{"x": 3}] * 5, pa.struct([("x", pa.uint64())])),
        "content": pa.array([b"x" * n for n in range(10)], pa.binary()),
        "file": pa.array([None] * 5 + ["a.txt"] * 5),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    (tmp_path / "a.txt").write_bytes(b"a file")
    words = ("--format", "parquet", "--columns", *columns)
    for part in ("0/2", "1/2"):
        code, text = write(capsys, tmp_path / "t.parquet", tmp_path / "out", *words, "--part", part)
        assert code == 0, text
    assert pq.read_table(tmp_path / "out").equals(pa.table(columns))
    words = ("--format", "parquet", "--columns", "late=n", "file", "content:Image", "--where", "late = 1", "--download", "file")
    assert write(capsys, tmp_path / "t.parquet", tmp_path / "some", *words)[0] == 0
    table = pq.read_table(tmp_path / "some")
    assert (table.schema.field("n").type, table["file"].to_pylist()) == (pa.int16(), [b"a file"] * 5)
    assert table["content"].to_pylist()[4] == {"bytes": b"x" * 9, "path": None}


def test_values_of_json_have_one_type_in_all_parts_of_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta: list[Any] = [None, None, {"a": 1, "tags": []}, None, {"a": 2.5, "tags": ["x"], "b": {"c": True}}, None]
    lines = [json.dumps({"n": n, "meta": meta[n], "other": None if n else 5, "never": None}) for n in range(6)]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    for part in ("0/3", "1/3", "2/3"):
        code, text = write(capsys, tmp_path / "t.jsonl", tmp_path / "out", "--format", "parquet", "--part", part)
        assert code == 0, text
    found = [None, None, {"a": 1.0, "tags": [], "b": None}, None, meta[4], None]
    assert pq.read_table(tmp_path / "out").column("meta").to_pylist() == found
    assert len({pq.read_schema(path) for path in (tmp_path / "out").glob("*/*.parquet")}) == 1
    (tmp_path / "mixed.jsonl").write_text('{"meta": [1]}\n{"meta": ["a"]}')
    code, text = write(capsys, tmp_path / "mixed.jsonl", tmp_path / "mixed", "--format", "parquet")
    assert (code, "column 'meta' has values of" in text) == (2, True)


def test_decimals_json_and_large_integers_of_mds_become_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"price": Decimal("1.50"), "meta": {"a": [1]}, "hash": 2**64 - 1, "text": "a"}
    columns = {"price": "str_decimal", "meta": "json", "hash": "uint64", "text": "str"}
    with MdsWriter(tmp_path / "mds", columns) as writer:
        writer.write(row)
    code, text = write(capsys, tmp_path / "mds", tmp_path / "out", "--format", "parquet")
    assert code == 0, text
    assert pq.read_table(tmp_path / "out").to_pylist() == [row]


def test_parts_that_the_first_samples_lack_are_columns_of_parquet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src = FIXTURES / "wds" / "shard-000000.tar"
    assert write(capsys, src, tmp_path / "out", "--format", "parquet", "--part", "0/4")[0] == 0
    schema = pq.read_table(tmp_path / "out").schema
    assert {str(kind) for kind in schema.types} == {"binary"}
    assert {"jpg", "cbor"} <= set(schema.names)
    src = FIXTURES / "mds" / "zstd"  # has arrays and pictures, whose values tell
    assert write(capsys, src, tmp_path / "mds", "--format", "parquet")[0] == 0
    assert pq.read_table(tmp_path / "mds").schema.field("tokens").type == pa.list_(pa.field("element", pa.int64()))


def test_times_are_text_in_mds_tar_and_zip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = {
        "day": pa.array([dt.date(2020, 1, 2)]),
        "made": pa.array([1577847845000000123], pa.timestamp("ns", "UTC")),
        "box": pa.array([{"at": dt.time(3, 4), "prices": [Decimal("1.50")]}]),
        "id": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([bytes(15) + b"5"], pa.binary(16))),
    }
    expected = {
        "day": "2020-01-02",
        "made": "2020-01-01 03:04:05.000000123+00:00",
        "box": {"at": "03:04:00", "prices": ["1.50"]},
        "id": "00000000-0000-0000-0000-000000000035",
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    for kind in ("mds", "tar", "zip"):
        code, text = write(capsys, tmp_path / "t.parquet", tmp_path / kind, "--format", kind)
        assert code == 0, text
    assert rows_of(tmp_path / "mds", *expected) == [tuple(expected.values())]
    assert json.loads(members(tmp_path / "tar" / "shard-000000.tar")["000000000.json"]) == expected
    words = ("--format", "tar", "--columns", "day=txt", "box=json")
    assert write(capsys, tmp_path / "t.parquet", tmp_path / "named", *words)[0] == 0
    named = members(tmp_path / "named" / "shard-000000.tar")
    assert (named["000000000.txt"], json.loads(named["000000000.json"])) == (b"2020-01-02", expected["box"])


def test_no_file_of_a_sample_takes_the_place_of_another_and_no_key_is_made_of_nothing(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = pictures.with_name("two.csv")
    table.write_text("thumb,image,k\nimg/0.jpg,img/1.jpg,\n")
    words = ("--format", "tar", "--download", "thumb", "image", "--columns", "image")
    code, text = write(capsys, table, tmp_path / "a", *words, "thumb=jpg")
    assert (code, "column 'image' would be a second file 'jpg' of its sample: give it a name, --columns image=" in text) == (
        2,
        True,
    )
    code, text = write(capsys, table, tmp_path / "b", *words, "--key", "k")
    assert (code, "column 'k' has no value, of which the key would be made" in text) == (2, True)
    with TarWriter(tmp_path / "tars") as writer:
        writer.write({"__key__": "a", "json": {"n": 1}, "meta.json": {"kept": 1}})
    code, text = write(
        capsys, tmp_path / "tars/*.tar", tmp_path / "c", "--format", "tar", "--sql", "SELECT *, 1 AS score FROM dataframe"
    )
    assert (code, "column 'score' would be a second file 'meta.json'" in text) == (2, True)


def test_a_transform_makes_one_several_or_no_samples(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "making_of_shards.py").write_text(
        "def halves(sample):\n"
        "    number = int(sample['score'])\n"
        "    if number == 3:\n"
        "        return None\n"
        "    made = [{'text': sample['caption'], 'half': half} for half in range(2)]\n"
        "    return made if number % 2 else made[0]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--transform", "making_of_shards:halves", "--size-limit", "300")
    assert write(capsys, pictures, tmp_path / "out", "--format", "mds", *words)[0] == 0
    samples = [(f"a cat {n}", half) for n in range(8) for half in range(2) if n != 3 and (n % 2 or not half)]
    assert rows_of(tmp_path / "out", "text", "half") == samples
    assert write(capsys, pictures, tmp_path / "tar", "--format", "tar", "--transform", "making_of_shards:halves")[0] == 0
    assert list(members(tmp_path / "tar" / "shard-000000.tar"))[:3] == [
        "000000000.json",
        "000000001.json",
        "000000001-1.json",
    ]


def test_columns_say_the_encodings_of_what_a_transform_makes(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "arrays_made.py").write_text(
        "import numpy as np\n\n\ndef made(sample):\n    number = int(sample['score'])\n"
        "    note = sample['caption'] if number else None\n"
        "    return {'codes': np.arange(3, dtype='int16') + number, 'score': number, 'note': note}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--format", "mds", "--transform", "arrays_made:made", "--where", "score > 0", "--columns")
    forms = ("codes:ndarray:int16", "score:int32", "note:json")
    assert write(capsys, pictures, tmp_path / "out", *words, *forms)[0] == 0
    index = json.loads((tmp_path / "out" / "index.json").read_text())["shards"][0]
    assert index["column_encodings"] == ["ndarray:int16", "json", "int32"]
    assert rows_of(tmp_path / "out", "score", "note")[:2] == [(0, None), (1, "a cat 1")]
    code, text = write(capsys, pictures, tmp_path / "other", *words, *forms, "image:jpeg")
    assert (code, "'image'" in text) == (2, True), text


def test_a_transform_that_makes_nothing_of_the_first_rows_leaves_the_columns_of_mds_to_the_next(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_making.py").write_text(
        "def late(sample):\n    return {'n': int(sample['score'])} if sample['score'] > 3 else None\n\n\n"
        "def never(sample):\n    return []\n\n\ndef mixed(sample):\n    return [{'n': 1}, {'n': 'x'}]\n\n\n"
        "def unnamed(sample):\n    return {3: 1}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ("--format", "mds", "--transform")
    assert write(capsys, pictures, tmp_path / "out", *words, "late_making:late")[0] == 0
    assert rows_of(tmp_path / "out", "n") == [3, 4, 5, 6, 7]
    code, text = write(capsys, pictures, tmp_path / "none", *words, "late_making:never")
    assert (code, "gives no sample, which would tell the columns" in text) == (2, True)
    code, text = write(capsys, pictures, tmp_path / "mixed", *words, "late_making:mixed")
    assert (code, "a value of type str: " in text, "the sample is '0', at position 0" in text) == (2, True, True)
    code, text = write(capsys, pictures, tmp_path / "unnamed", *words, "late_making:unnamed")
    assert (code, "it returned a field 3, which is no text: give names of columns" in text) == (2, True)


def test_a_sample_that_mds_cannot_hold_is_named_with_the_cure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text("index,n\na,1\nb,2\nc,\n")
    code, text = write(capsys, tmp_path / "rows.csv", tmp_path / "out", "--format", "mds")
    assert (code, "column 'n' of encoding 'int' has None" in text, "fill it in (coalesce in SQL)" in text) == (2, True, True)
    assert "the sample is 'c', at position 2" in text
    for words, numbers in ((("--columns", "n:json"), [1, 2, None]), (("--where", "n IS NOT NULL"), [1, 2])):
        assert write(capsys, tmp_path / "rows.csv", tmp_path / "out", "--format", "mds", "--overwrite", *words)[0] == 0
        with StreamingDataset(tmp_path / "out", tmp_path / "read") as dataset:
            assert [sample["n"] for sample in dataset] == numbers


def test_a_sample_that_fails_ends_the_writing_which_goes_on_when_it_may_be_left_out(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "img" / "5.jpg").unlink()
    words = ("--format", "tar", "--download", "image", "--max-samples", "2")
    code, text = write(capsys, pictures, tmp_path / "out", *words)
    assert code == 2
    assert "img/5.jpg" in text
    assert not (tmp_path / "out" / "index.json").exists()
    code, text = write(capsys, pictures, tmp_path / "out", *words, "--where", "score > 1", "--resume")
    assert (code, "begun with source=" in text) == (2, True)
    code, document = write(capsys, pictures, tmp_path / "out", *words, "--on-error", "skip", "--resume", "--json")
    assert (code, document["samples"]) == (0, 7)
    code, text = write(capsys, pictures, tmp_path / "out", *words, "--on-error", "skip", "--resume")
    assert (code, "is complete: nothing is written" in text) == (0, True)
    found = [list(members(path)) for path in sorted((tmp_path / "out").glob("*.tar"))]
    assert [name for names in found for name in names if name.endswith("jpg")] == [f"{n:09}.jpg" for n in range(8) if n != 5]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--format", "mds", "--part", "3/3"), "--part '3/3' is no part"),
        (("--format", "mds", "--out-option", "{"), "--out-option '{' is no KEY=VALUE"),
        (("--format", "mds", "--num-samples", "0"), "--num-samples=0 is out of range"),
        (("--format", "mds", "--uploads", "0"), "--uploads=0 is out of range"),
        (("--format", "mds", "--cache-limit", "much"), "--cache-limit='much' is not a size"),
        (("--format", "mds", "--key", "caption"), "--key is of tar and zip, and not of mds"),
        (("--format", "tar", "--compression", "zstd"), "--compression is of mds, and not of tar"),
        (("--format", "tar", "--hashes", "sha1"), "the index of tars has md5 alone"),
        (("--format", "tar", "--columns", "a=b=c"), "write COLUMN, COLUMN=NAME"),
        (("--format", "tar", "--columns", "caption=a", "score=a"), "has 'a' twice"),
        (("--format", "tar", "--transform", "no_such_module:f"), "--transform no_such_module:f: No module named"),
        (("--format", "tar", "--transform", "json"), "is not MODULE:FUNCTION"),
        (
            ("--format", "tar", "--transform", "json:loads", "--columns", "id", "text=txt"),
            "--columns text=txt: with --transform its",
        ),
        (("--format", "tar", "--transform", "json:decoder"), "is a module, and nothing that can be called"),
        (("--format", "tar", "--resume", "--overwrite"), "give one of them"),
        (("--format", "mds", "--columns", "caption:str32"), "encoding 'str32' is unknown"),
    ],
)
def test_wrong_words_are_refused(
    words: tuple[str, ...], message: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = write(capsys, pictures, tmp_path / "out", *words)
    assert code == 2
    assert message in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("out", "--columns", "nope"),
            "t.csv has no such column: it has 'image', 'caption', 'score'; correct the name",
        ),
        (("t.csv",), "t.csv cannot be made, a file is in its place or above it: write elsewhere"),
        (("t.csv/out",), "t.csv/out cannot be made, a file is in its place or above it: write elsewhere"),
        (("out", "--transform", "bad_making:fail"), "transform bad_making:fail failed on sample '0' with fields"),
        (("out", "--transform", "bad_making:number"), "it returned a int: give a dict, a list of dicts, or None"),
    ],
)
def test_what_cannot_be_written_is_said_in_words_of_the_command(
    words: tuple[str, ...],
    message: str,
    pictures: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "bad_making.py").write_text("def fail(sample):\n    raise ValueError\n\n\ndef number(sample):\n    return 5\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, text = write(capsys, pictures, tmp_path / words[0], *words[1:], "--format", "mds")
    assert (code, message in text, "allow_missing_columns" in text) == (2, True, False), text


def test_a_row_without_its_object_is_an_error_with_the_option_that_leaves_it_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.bin").write_bytes(b"a file")
    (tmp_path / "t.csv").write_text("file,n\na.bin,1\n,2\n")
    words = ("--format", "mds", "--download", "file")
    code, text = write(capsys, tmp_path / "t.csv", tmp_path / "out", *words)
    assert (code, "or leave them out with --on-error skip" in text) == (2, True), text
    assert write(capsys, tmp_path / "t.csv", tmp_path / "out", *words, "--on-error", "skip", "--overwrite")[0] == 0
    assert rows_of(tmp_path / "out", "file", "n") == [(b"a file", 1)]


def test_a_writing_that_ended_early_is_gone_on_with_by_the_option_that_is_named(
    pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert write(capsys, pictures, tmp_path / "out", "--format", "tar", "--key", "nope")[0] == 2
    code, text = write(capsys, pictures, tmp_path / "out", "--format", "tar")
    assert (code, "say --overwrite to write over it, or --resume to go on with a writing" in text) == (2, True), text


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("words", [("--overwrite",), ("--resume",), ()])
def test_shards_are_never_written_over_those_that_are_read(
    words: tuple[str, ...], merged: bool, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src = tmp_path / "mds"
    for number in range(2):
        part = ("--part", f"{number}/2") if merged else ("--overwrite",)
        assert write(capsys, pictures, src, "--format", "mds", *part)[0] == 0
    if merged:
        assert shards(capsys, "merge", src)[0] == 0
    (tmp_path / "link").symlink_to(src)
    before = {path: path.read_bytes() for path in src.rglob("*") if path.is_file()}
    for out in (src, tmp_path / "link", *([src / "00000-of-00002"] if merged else [])):
        code, text = write(capsys, src, out, "--format", "mds", "--shuffle", "1", *words)
        assert (code, "holds what is read of" in text) == (2, True), text
    assert {path: path.read_bytes() for path in before} == before
    assert write(capsys, src, src / "below", "--format", "mds", *words)[0] == 0


def test_rows_of_a_database_lie_in_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("out").mkdir()
    with contextlib.closing(sqlite3.connect("rows.db")) as connection, connection:
        connection.execute("CREATE TABLE t AS SELECT 1 AS id")
    monkeypatch.chdir("out")
    source = ("--sql", "SELECT * FROM t", "--cache", tmp_path / "cache", "--overwrite")
    code, text = shards(capsys, "write", f"sqlite:///{tmp_path}/rows.db", ".", "--format", "mds", *source)
    assert code == 0, text
