"""`sqlstream index measure`: a column that is computed once, in parts that a stopped run leaves, and joined by later runs."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import Packs, StreamingDataset
from sqlstream.cli.main import main
from sqlstream.cli.measure import Measure, Share, measure_columns
from sqlstream.errors import ConfigError, TransformError
from tests.cli.commands import in_process
from tests.processes import COMMANDS, in_child, is_alive, wait_until

MODULE = """
import os
import signal
import time
from pathlib import Path

import numpy as np
import torch

LOG = Path(__file__).with_suffix(".log")

def count(sample):
    with LOG.open("a") as log:
        log.write(f"{sample['id']}\\n")
    return len(sample["text"].split())

def of_text(sample):
    return len(sample["text"])

def nothing_but_text(sample):
    return len(sample["text"].split())

def sizes(sample):
    return {"words": len(sample["text"].split()), "letters": len(sample["text"])}

def of_file(sample):
    return len(Path(sample["file"]).read_bytes())

def fails(sample):
    if sample["id"] == "row-0003":
        raise ValueError("broken")
    return 1

def nothing(sample):
    return None

def array(sample):
    return np.arange(2)

def tensor(sample):
    return torch.arange(2)

def mixed(sample):
    return "text" if sample["id"] == "row-0003" else 1

def mixed_parts(sample):
    return "text" if sample["id"] > "row-0039" else 1

def huge(sample):
    return 1 << 70

def dies(sample):
    os.kill(os.getpid(), signal.SIGKILL)

def waits(sample):
    Path(f"{os.getpid()}.waits").touch()
    time.sleep(3600)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A table of 90 texts in three parts, with functions to measure them, as the current directory."""
    module = f"measures_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    texts = ["word " * (number % 7 + 1) for number in range(90)]
    pq.write_table(pa.table({"id": [f"row-{number:04d}" for number in range(90)], "text": texts}), tmp_path / "t.parquet")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def measured(folder: Path) -> Callable[..., dict[str, Any]]:
    def measure(
        function: str, *columns: str, src: str = "t.parquet", num_workers: int = 0, makes_null: bool = False, **options: Any
    ) -> dict[str, Any]:
        given = {"columns_to_download": [], **options}
        what = Measure(
            src=str(folder / src),
            dst=str(folder / "cache"),
            columns=columns or ("n",),
            transform=f"{module_of(folder)}:{function}",
            on="id",
            options=given,
            makes_null=makes_null,
            part_rows=40,
        )
        return measure_columns(what, num_workers, out=None, overwrite=False)

    return measure


def module_of(folder: Path) -> str:
    return next(folder.glob("measures_*.py")).stem


def asked(folder: Path) -> list[str]:
    log = folder / f"{module_of(folder)}.log"
    return log.read_text().split() if log.exists() else []


def test_a_measured_column_is_joined_and_packs_are_made_of_it(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["index", "measure", "t.parquet", "cache", "--column", "num_words", "--on", "id", "--where", "id < 'row-0050'"]
    words += ["--transform", f"{module_of(folder)}:count"]
    code, document = in_process(capsys, *words, "--json")
    assert (code, document["rows"], document["computed"], document["failed"]) == (0, 50, 50, 0)
    code, text = in_process(capsys, *words)
    assert f"join={{'num_words': '{document['path']}'}}, on='id')" in text
    assert len(asked(folder)) == 50, "the second run computes nothing"
    join = {"num_words": document["path"]}
    packs = Packs("num_words", capacity=32, pack_fn=lambda pack: {"sizes": [part["num_words"] for part in pack["parts"]]})
    with StreamingDataset(
        "t.parquet", "cache", join=join, on="id", missing="drop", batches=packs, show_progress=False
    ) as joined:
        sizes = [pack["sizes"] for pack in joined]
    assert sum(map(len, sizes)) == 50
    assert max(map(sum, sizes)) <= 32
    assert in_process(capsys, *words, "--overwrite", "--json")[1]["computed"] == 50


def test_a_run_that_was_stopped_goes_on_with_the_parts_that_are_missing(folder: Path, measured: Any) -> None:
    whole = measured("count", "other")
    path = Path(whole["path"])
    expected = pq.read_table(path)
    assert expected.column("id").to_pylist() == [f"row-{number:04d}" for number in range(90)]
    parts = path.with_suffix(".parts")
    assert not parts.exists()
    parts.mkdir()
    pq.write_table(expected.slice(40, 40), parts / "000000000040-000000000080.parquet")
    (parts / "000000000000-000000000040.parquet.1234.tmp").write_bytes(b"half")
    path.unlink()
    before = len(asked(folder))
    assert measured("count", "other")["computed"] == 90 - 40
    assert len(asked(folder)) - before == 90 - 40
    assert pq.read_table(path).equals(expected)
    assert not parts.exists()


@pytest.mark.parametrize(("event", "place"), [("os.rename", 1), ("shutil.rmtree", 0)])
def test_a_run_that_is_killed_as_its_table_comes_leaves_nothing_beside_it(
    event: str, place: int, folder: Path, measured: Any
) -> None:
    def hook(happened: str, args: tuple[Any, ...]) -> None:
        if happened == event and Path(args[place]).parent.name == "measured":
            os.kill(os.getpid(), signal.SIGKILL)

    def be_killed() -> None:
        sys.addaudithook(hook)
        measured("count")

    assert in_child(be_killed) == -signal.SIGKILL
    path = Path(measured("count")["path"])
    assert [left.name for left in path.parent.iterdir()] == [path.name]
    assert pq.read_table(path).num_rows == 90


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_end_with_the_one_that_is_killed(number: signal.Signals, folder: Path) -> None:
    words = ["index", "measure", "t.parquet", "cache", "--column", "n", "--on", "id", "--num-workers", "1"]
    run = COMMANDS.start(main, *words, "--transform", f"{module_of(folder)}:waits", directory=folder)
    assert wait_until(lambda: any(folder.glob("*.waits")))
    (worker,) = (int(path.stem) for path in folder.glob("*.waits"))
    os.kill(run.pid, number)
    if not (is_over := wait_until(lambda: not is_alive(worker), 60)):
        os.kill(worker, signal.SIGKILL)
    assert run.finish().returncode == -number
    assert is_over


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_compute_what_one_does(folder: Path, measured: Any) -> None:
    one = pq.read_table(measured("sizes", "words", "letters")["path"])
    Path(measured("sizes", "words", "letters")["path"]).unlink()
    document = measured("sizes", "words", "letters", num_workers=2)
    assert document["computed"] == 90
    assert pq.read_table(document["path"]).equals(one)


def test_rows_that_have_a_value_keep_it_and_objects_are_downloaded(folder: Path, measured: Any) -> None:
    for number in range(3):
        (folder / f"{number}.bin").write_bytes(bytes(number + 5))
    table = pa.table({"id": ["a", "b", "c"], "file": [f"{number}.bin" for number in range(3)], "n": [None, 70, None]})
    pq.write_table(table, folder / "files.parquet")
    document = measured("of_file", src="files.parquet", columns_to_download=["file"])
    assert document["computed"] == 2
    assert pq.read_table(document["path"]).to_pydict() == {"id": ["a", "b", "c"], "n": [5, 70, 7]}


def test_rows_that_fail_are_an_error_that_names_them_or_null(measured: Any) -> None:
    with pytest.raises(TransformError, match="failed on row 3: ValueError: broken"):
        measured("fails", where="id < 'row-0010'")
    document = measured("fails", where="id < 'row-0010'", makes_null=True)
    assert (document["computed"], document["failed"]) == (9, 1)
    assert pq.read_table(document["path"]).column("n").to_pylist() == [1, 1, 1, None, 1, 1, 1, 1, 1, 1]
    with pytest.raises(TransformError, match="gave no n for row 0: return the value"):
        measured("nothing")
    with pytest.raises(TransformError, match="gave no words, letters for row 0"):
        measured("count", "words", "letters", where="id < 'row-0001'")


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("array", r"an array of several values for row 0 \(.*\): return one value for each column, or .tolist"),
        ("tensor", "an array of several values for row 0"),
        ("mixed", r"values for 'n' in rows 0 to 39 that no column of a table holds \(.*'text'.*\): return"),
        ("mixed_parts", r"values of several types \(.*\): return one type"),
        ("huge", "values for 'n' in rows 0 to 39"),
    ],
)
def test_values_that_are_no_column_are_an_error_that_names_the_function(function: str, problem: str, measured: Any) -> None:
    with pytest.raises(TransformError, match=f":{function} gave {problem}"):
        measured(function)


def test_a_process_that_dies_is_named_with_the_cure(measured: Any) -> None:
    with pytest.raises(TransformError, match=r"a process of --num-workers .* died .*: the same command goes on"):
        measured("dies", num_workers=1)


KEYS = {
    "uint64": pa.array([2**63, 2**63 + 1], pa.uint64()),
    "milliseconds": pa.array([1, 2], pa.timestamp("ms")),
    "nanoseconds": pa.array([1, 2], pa.timestamp("ns", "UTC")),
    "decimal": pa.array([Decimal("0.5"), Decimal("100.25")], pa.decimal128(20, 2)),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_keeps_its_type_so_that_what_is_measured_can_be_joined(name: str, folder: Path, measured: Any) -> None:
    pq.write_table(pa.table({"id": KEYS[name], "text": ["a b", "c"]}), folder / "keys.parquet")
    join = {"n": measured("nothing_but_text", src="keys.parquet")["path"]}
    with StreamingDataset(folder / "keys.parquet", "cache", columns_to_download=[], join=join, on="id") as joined:
        assert [sample["n"] for sample in joined] == [2, 1]


@pytest.mark.parametrize(
    ("keys", "problem"), [(["a", "b", "a"], "several rows have 'a' there"), ([0.5, 1, 2], "has values of type double")]
)
def test_a_column_that_cannot_name_rows_is_refused_before_anything_is_computed(
    keys: list[Any], problem: str, folder: Path, measured: Any
) -> None:
    pq.write_table(pa.table({"id": keys, "text": ["a", "b", "c"]}), folder / "keys.parquet")
    with pytest.raises(ConfigError, match=f"--on id .*{problem}"):
        measured("count", src="keys.parquet")
    assert asked(folder) == []


def test_a_table_of_something_else_is_neither_taken_for_the_result_nor_written_over(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(function: str, *words: str, src: str = "t.parquet") -> tuple[int, str]:
        start = ["index", "measure", src, "cache", "--on", "id", "--out", "n.parquet", "--transform"]
        code = main([*start, f"{module_of(folder)}:{function}", *words])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    code, text = measure("count", "--column", "n")
    assert (code, "join={'n': 'n.parquet'}" in text) == (0, True)
    before = Path("n.parquet").read_bytes()
    pq.write_table(pq.read_table("t.parquet").slice(0, 10), "fewer.parquet")
    for function, words, src in [
        ("of_text", ["--column", "n"], "t.parquet"),
        ("count", ["--column", "m"], "t.parquet"),
        ("count", ["--column", "n"], "fewer.parquet"),
        ("of_text", ["--column", "n", "--part", "1/2"], "t.parquet"),
        ("of_text", ["--column", "n", "--merge"], "t.parquet"),
    ]:
        code, text = measure(function, *words, src=src)
        assert (code, "n.parquet is there, and is no table of" in text) == (2, True)
    assert Path("n.parquet").read_bytes() == before
    assert len(asked(folder)) == 90
    assert measure("count", "--column", "n")[0] == 0
    assert len(asked(folder)) == 90, "what is there is taken"
    Path("n.parquet").write_text("no table")
    assert measure("count", "--column", "n")[0] == 2
    assert measure("count", "--column", "n", "--overwrite")[0] == 0
    assert pq.read_table("n.parquet").num_rows == 90
    assert "is the source: give another file" in measure("count", "--column", "n", "--out", "t.parquet", "--overwrite")[1]
    assert pq.read_metadata("t.parquet").num_rows == 90


@pytest.mark.parametrize(
    ("src", "out", "problem"),
    [
        ("data/*.parquet", "data/1.parquet", "is of the source data/*.parquet"),
        ("data/*.parquet", "data/n.parquet", "would be read as a file of the source data/*.parquet"),
        ("data/**/*.parquet", "data/new/n.parquet", "would be read as a file of the source data/**/*.parquet"),
        ("list.txt", "data/1.parquet", "is of the source list.txt"),
        ("list.txt", "link.parquet", "is of the source list.txt"),
        ("photos", "photos/b/1.jpg", "is of the source photos"),
        ("photos", "photos/n.parquet", "is of the source photos"),
        ("sqlite:///rows.db", "rows.db", "is the source"),
        ("sqlite:///file:rows.db?uri=true&mode=ro", "rows.db", "is the source"),
    ],
)
def test_a_table_never_takes_the_place_of_what_rows_are_read_from(
    src: str, out: str, problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("data").mkdir()
    for number in range(2):
        pq.write_table(pq.read_table("t.parquet").slice(number * 45, 45), f"data/{number}.parquet")
    Path("list.txt").write_text("data/0.parquet\ndata/1.parquet\n")
    Path("link.parquet").symlink_to("data/1.parquet")
    for name in ("a", "b"):
        Path("photos", name).mkdir(parents=True)
        Path("photos", name, "1.jpg").write_bytes(name.encode())
    with contextlib.closing(sqlite3.connect("rows.db")) as database:
        database.executescript("CREATE TABLE rows (id, text); INSERT INTO rows VALUES (1, 'a')")
    before = {path: path.read_bytes() for path in Path().rglob("*") if path.is_file()}
    words = ["--data-type", "image", "--on", "image"] if src == "photos" else ["--on", "id"]
    words += ["--sql", "SELECT * FROM rows"] if src.startswith("sqlite") else []
    words += ["--column", "n", "--transform", f"{module_of(folder)}:count", "--out", out, "--overwrite"]
    assert main(["index", "measure", src, "cache", *words]) == 2
    assert f"--out {out} {problem}: give another file" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    assert not Path(out).exists() or Path(out) in before


def test_what_cannot_be_measured_is_refused(folder: Path, measured: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="no_such' is not there"):
        measured("no_such")
    start = ["index", "measure", "t.parquet", "cache", "--column", "n", "--transform", f"{module_of(folder)}:count"]
    for words, problem in (
        ([], "no column names the rows of t.parquet: give --on one of id, text"),
        (["--on", "key"], "key names the rows"),
        (["--on-error", "skip"], "--on-error skip is unknown: give raise or null"),
        (["--num-workers", "-1"], "--num-workers -1 is out of range"),
    ):
        assert in_process(capsys, *start, *words)[0] == 2, problem


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--column", "n", "--out", "n.csv"], "--out n.csv would not be read as what it is"),
        (["--column", "n", "--out", "s3://bucket/n.parquet"], "--out s3://bucket/n.parquet is of another machine"),
        (["--column", ""], "--column '' is no name of a column"),
        (["--column", "__row__"], "--column '__row__' is no name of a column"),
        (["--column", "id"], "--column id beside --on id names a column twice"),
        (["--column", "n", "n"], "--column n n beside --on id names a column twice"),
    ],
)
def test_tables_that_no_run_could_join_are_refused(
    words: list[str], problem: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {*folder.iterdir()}
    start = ["index", "measure", "t.parquet", "cache", "--on", "id", "--transform", f"{module_of(folder)}:count"]
    assert main([*start, *words]) == 2
    assert problem in capsys.readouterr().err
    assert {*folder.iterdir()} - before <= {folder / "cache", folder / "__pycache__"}
    assert asked(folder) == []


@pytest.mark.parametrize("name", ["image/width", "../../n", "größe" * 60])
def test_a_column_of_any_name_is_computed_into_the_folder_of_tables(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--on", "id", "--transform", f"{module_of(folder)}:count", "--column", name, "--json"]
    document = in_process(capsys, "index", "measure", "t.parquet", "cache", *words)[1]
    assert Path(document["path"]).parent == folder / "cache" / "measured"
    with StreamingDataset("t.parquet", "cache", join={"n": document["path"]}, on="id", columns_to_download=[]) as dataset:
        assert isinstance(dataset[5][name], int)


def test_shares_that_machines_compute_are_merged_to_the_table_of_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def words(dst: str, *more: str, src: str = "rows.parquet") -> list[str]:
        start = ["index", "measure", src, dst, "--column", "words", "letters", "--on", "id"]
        return [*start, "--transform", f"{module_of(folder)}:sizes", *more]

    rows = pa.table({"id": [f"row-{number:05d}" for number in range(9000)], "text": ["a b", "c d e", "f"] * 3000})
    (folder / "copy").mkdir()
    for path in ("rows.parquet", "copy/rows.parquet"):
        pq.write_table(rows, folder / path)
    out = ["--out", "shared/sizes.parquet"]
    whole = in_process(capsys, *words("cache", "--json"))[1]
    assert in_process(capsys, *words("one", "--json", "--part", "1/2", *out))[1]["computed"] == 4096 + 808
    code = in_process(capsys, *words("one", "--merge", *out))[0]
    assert code == 2, "a share is missing"
    assert not Path("shared/sizes.parquet").exists()
    again = in_process(capsys, *words("one", "--json", "--part", "1/2", *out))[1]
    assert again["computed"] == 0, "what is there is kept"
    other = in_process(capsys, *words("two", "--json", "--part", "2/2", *out, src="copy/rows.parquet"))[1]
    assert (other["rows"], other["computed"]) == (4096, 4096)
    merged = in_process(capsys, *words("two", "--json", "--merge", *out, src="copy/rows.parquet"))[1]
    assert (merged["rows"], merged["computed"]) == (9000, 0)
    assert pq.read_table(merged["path"]).equals(pq.read_table(whole["path"]))
    assert [path.name for path in Path("shared").iterdir()] == ["sizes.parquet"]


def test_shares_that_cannot_be_are_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["index", "measure", "t.parquet", "cache", "--column", "n", "--on", "id"]
    start += ["--transform", f"{module_of(folder)}:count"]
    for words in (["--part", "1/2"], ["--merge"], ["--part", "1/2", "--merge", "--out", "n.parquet"]):
        assert in_process(capsys, *start, *words)[0] == 2
    for text in ("0/2", "3/2", "2", "a/b"):
        with pytest.raises(ConfigError, match=f"--part {text} is no share: give i/n"):
            Share.of(text)


def test_a_directory_is_measured_by_its_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(3):
        (folder / "files").mkdir(exist_ok=True)
        (folder / "files" / f"{number}.txt").write_text("a" * number)
    (folder / "lengths.py").write_text(
        "from pathlib import Path\ndef of(sample):\n    return len(Path(sample['text']).read_text())\n"
    )
    words = ["index", "measure", "files", "cache", "--column", "n", "--transform", "lengths:of"]
    assert in_process(capsys, *words)[0] == 2, "nothing says whose files make a sample"
    document = in_process(capsys, *words, "--json", "--data-type", "text", "--download", "text")[1]
    assert pq.read_table(document["path"]).column("n").to_pylist() == [0, 1, 2]
