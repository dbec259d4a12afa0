"""`sqlstream shards info`, `verify` and `index`: what is said of shards of all programs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import json
import lzma
import shutil
import sqlite3
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cli.main import main
from sqlstream.testing.servers import FaultyHttpServer
from tests.cli.commands import shards, write, write_pictures
from tests.goldens import FIXTURES, expected


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A table of eight rows that name files."""
    return write_pictures(tmp_path)


DATASETS = ("mds/plain", "mds/zstd", "mds/jsonl", "mds/xsv", "mds/jsonl_zstd", "mds/merged", "wds", "wds/index.json")


@pytest.mark.parametrize("name", DATASETS)
def test_what_other_programs_wrote_is_shown_and_found_sound(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    src = FIXTURES / name
    code, shown = shards(capsys, "info", src, "--json")
    assert code == 0
    code, checked = shards(capsys, "verify", src, "--json")
    assert (code, checked["damaged"]) == (0, [])
    assert checked["samples"] == shown["samples"] > 0
    assert (checked["shards"], checked["bytes"]) == (len(shown["shards"]), shown["bytes"])


def test_shards_are_shown_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, text = shards(capsys, "info", FIXTURES / "mds" / "zstd")
    assert code == 0
    assert "caption (str), image (png)" in text
    assert "shard.00002.mds.zstd" in text
    code, text = shards(capsys, "info", FIXTURES / "wds" / "shard-{000000..000001}.tar")
    assert "not known: `sqlstream shards verify` counts them" in text
    assert "shard-000001.tar" in text
    code, text = shards(capsys, "info", FIXTURES / "mixing")
    assert (code, "has no index.json and no file of .tar, .zip, .parquet" in text) == (2, True)


@pytest.mark.parametrize(("name", "index"), [("mds/plain", "index.json"), ("mds/jsonl", "./index.json"), ("wds", "index.json")])
def test_an_index_in_the_working_directory_names_what_lies_beside_it(
    name: str, index: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FIXTURES / name)
    code, checked = shards(capsys, "verify", index, "--json")
    assert (code, checked["damaged"]) == (0, [])


def test_a_wildcard_names_shards_and_one_that_is_not_there_is_an_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, shown = shards(capsys, "info", FIXTURES / "wds" / "shard-*.tar", "--json")
    assert (code, len(shown["shards"]), shown["bytes"] > 0) == (0, 3, True)
    code, checked = shards(capsys, "verify", FIXTURES / "wds" / "shard-*.tar", "--json")
    assert (code, checked["shards"], checked["damaged"]) == (0, 3, [])
    with FaultyHttpServer() as server:
        for src in (f"{tmp_path}/no-*.tar", f"{tmp_path}/no.tar", f"{server.url}/no-{{0..1}}.tar"):
            code, text = shards(capsys, "info", src)
            assert (code, "no file matches" in text or "is not there: check the path" in text) == (2, True)


def test_damage_of_each_kind_is_found_and_named(pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def flip(path: Path, offset: int) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0xFF
        path.write_bytes(data)

    def problem(name: str) -> str:
        code, checked = shards(capsys, "verify", tmp_path / name, "--json")
        (damaged,) = checked["damaged"]
        assert (code, checked["shards"]) == (1, 2)
        return str(damaged["problem"])

    words = ("--download", "image", "--max-samples", "4")
    write(capsys, pictures, tmp_path / "tar", "--format", "tar", *words, "--hashes", "md5")
    write(capsys, pictures, tmp_path / "plain_tar", "--format", "tar", *words)
    write(capsys, pictures, tmp_path / "zip", "--format", "zip", *words)
    write(capsys, pictures, tmp_path / "parquet", "--format", "parquet", "--download", "image", "--size-limit", "3000")
    write(
        capsys, pictures, tmp_path / "mds", "--format", "mds", "--download", "image", "--size-limit", "3200", "--hashes", "sha1"
    )
    for name in ("tar", "plain_tar", "zip", "parquet", "mds"):
        assert shards(capsys, "verify", tmp_path / name)[0] == 0
    flip(tmp_path / "tar" / "shard-000001.tar", 600)
    assert "its md5 is" in problem("tar")
    flip(tmp_path / "plain_tar" / "shard-000001.tar", 5)
    assert "at byte 0: its checksum is wrong" in problem("plain_tar")
    flip(tmp_path / "plain_tar" / "shard-000001.tar", 5)
    flip(tmp_path / "plain_tar" / "shard-000001.tar.idx", 0)
    assert "its .idx does not fit its headers" in problem("plain_tar")
    flip(tmp_path / "zip" / "shard-000001.zip", 70)
    assert "as a ZIP archive" in problem("zip") or "has another CRC" in problem("zip")
    flip(tmp_path / "parquet" / "shard-000001.parquet", -1)
    assert "as a Parquet file" in problem("parquet")
    flip(tmp_path / "mds" / "shard.00001.mds", 400)
    assert "its sha1 is" in problem("mds")
    longer = (tmp_path / "mds" / "shard.00001.mds").read_bytes() + b"x"
    for content, reason in ((longer, "bytes were added"), (longer[:-2], "it is cut off")):
        (tmp_path / "mds" / "shard.00001.mds").write_bytes(content)
        assert reason in problem("mds")
    (tmp_path / "mds" / "shard.00001.mds").unlink()
    assert "there is no file" in problem("mds")
    assert "damaged shard" in shards(capsys, "verify", tmp_path / "mds")[1]


def test_hidden_members_are_no_samples_and_a_link_that_leads_nowhere_is_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s").mkdir()
    with zipfile.ZipFile(tmp_path / "s/a.zip", "w") as archive:
        for name in ("d/a.txt", "d/a.cls", "b.txt", ".DS_Store", "__MACOSX/._b.txt", "README"):
            archive.writestr(name, "x")
    (tmp_path / "s/b.tar").symlink_to("nowhere")
    assert shards(capsys, "info", tmp_path / "s")[0] == 0
    code, found = shards(capsys, "verify", tmp_path / "s", "--json")
    with StreamingDataset(str(tmp_path / "s/a.zip"), str(tmp_path / "cache")) as dataset:
        assert (code, found["samples"]) == (1, len(dataset))
    (damaged,) = found["damaged"]
    assert (Path(damaged["shard"]).name, "there is no file" in damaged["problem"]) == ("b.tar", True)


def test_the_index_of_wids_and_offsets_are_written_beside_tars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in (FIXTURES / "wds").glob("*.tar"):
        shutil.copy(path, tmp_path)
    words = (tmp_path, "--wids", tmp_path / "index.json", "--idx", "--name", "golden", "--json")
    code, document = shards(capsys, "index", *words)
    assert (code, len(document["written"])) == (0, 4)
    ours = json.loads((tmp_path / "index.json").read_text())
    theirs = json.loads((FIXTURES / "wds" / "index.json").read_text())
    keys = ("nsamples", "filesize", "md5sum")
    assert [[shard[key] for key in keys] for shard in ours["shardlist"]] == [
        [shard[key] for key in keys] for shard in theirs["shardlist"]
    ]
    assert [shard["url"] for shard in ours["shardlist"]] == [f"shard-00000{n}.tar" for n in range(3)]
    assert shards(capsys, "verify", tmp_path)[0] == 0
    monkeypatch.chdir(tmp_path)
    assert (
        shards(capsys, "index", "shard-{000000..000002}.tar", "--wids", "again.json", "--name", "golden", "--energon")[0] == 0
    )
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "index.json").read_bytes()
    for out, tar, name in [
        ("../elsewhere.json", "shard-000000.tar", f"{tmp_path.name}/shard-000000.tar"),
        ("below/index.json", "shard-000000.tar", str(tmp_path / "shard-000000.tar")),
        (str(tmp_path / "index.json"), "shard-000000.tar", "shard-000000.tar"),
    ]:
        assert shards(capsys, "index", tar, "--wids", out)[0] == 0
        assert [shard["url"] for shard in json.loads(Path(out).read_text())["shardlist"]] == [name]
        assert shards(capsys, "verify", out)[0] == 0
    assert (tmp_path / ".nv-meta" / "index.sqlite").exists()
    assert shards(capsys, "index", tmp_path)[0] == 2
    assert shards(capsys, "index", FIXTURES / "zip" / "deflated.zip", "--idx")[0] == 2


@pytest.mark.parametrize(("name", "compress"), [("s.tar.gz", gzip.compress), ("s.txz", lzma.compress), ("s.tar", bz2.compress)])
def test_a_tar_that_is_compressed_as_a_whole_is_sound_and_has_an_index_but_no_offsets(
    name: str, compress: Callable[[bytes], bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tar = tmp_path / name
    tar.write_bytes(compress((FIXTURES / "wds" / "shard-000000.tar").read_bytes()))
    code, checked = shards(capsys, "verify", tmp_path, "--json")
    assert (code, checked["damaged"], checked["samples"]) == (0, [], 4)
    assert shards(capsys, "info", tar, "--json")[1]["format"] == "tar"
    code, written = shards(capsys, "index", tar, "--wids", tmp_path / "index.json", "--json")
    assert (code, written["samples"]) == (0, 4)
    assert shards(capsys, "verify", tmp_path, "--json")[1]["samples"] == 4
    for word in ("--idx", "--energon"):
        code, text = shards(capsys, "index", tar, word)
        assert (code, f"{name} is compressed as a whole, where no offset leads to a sample" in text) == (2, True)
    tar.write_bytes(tar.read_bytes()[:-20])
    assert shards(capsys, "verify", tar, "--json")[0] == 1


def test_an_index_of_wids_may_name_a_file_by_its_scheme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tar = FIXTURES / "wds" / "shard-000000.tar"
    (tmp_path / "index.json").write_text(json.dumps({"shardlist": [{"url": f"file:{tar}", "nsamples": 4}]}))
    assert shards(capsys, "verify", tmp_path)[0] == 0


def test_the_files_of_energon_equal_the_golden_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (FIXTURES / "energon").glob("*.tar"):
        shutil.copy(path, tmp_path)
    code, document = shards(capsys, "index", tmp_path / "shard-{000..002}.tar", "--energon", "--idx", "--json")
    assert (code, document["samples"], len(document["written"])) == (0, 10, 8)
    golden = expected("energon/energon.expected.json")
    with contextlib.closing(sqlite3.connect(tmp_path / ".nv-meta" / "index.sqlite")) as connection:
        for table in ("samples", "sample_parts"):
            assert [list(row) for row in connection.execute(f"SELECT * FROM {table}")] == golden[table]
        schema = [sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")]
        assert {" ".join(sql.split()).replace("( ", "(").replace(" )", ")") for sql in schema} == {
            " ".join(sql.split()).replace("( ", "(").replace(" )", ")") for sql in golden["schema"]
        }
    assert json.loads((tmp_path / ".nv-meta" / ".info.json").read_text()) == golden[".info.json"]
    for name in golden["tar.idx"]:
        assert (tmp_path / name).read_bytes() == (FIXTURES / "energon" / name).read_bytes()
    shutil.copy(tmp_path / "shard-000.tar", tmp_path / "shard-003.tar")
    code, text = shards(capsys, "index", tmp_path / "shard-{000..003}.tar", "--energon")
    assert (code, "shard-003.tar: a key of it comes twice" in text) == (2, True)


def test_a_link_that_leads_nowhere_is_a_shard_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.tar").symlink_to("nowhere")
    assert main(["shards", "info", str(tmp_path), "--json"]) == 0
    (shard,) = json.loads(capsys.readouterr().out)["shards"]
    assert shard["bytes"] is None
    assert main(["shards", "verify", str(tmp_path)]) == 1
    assert f"there is no file {tmp_path}/a.tar" in capsys.readouterr().out
