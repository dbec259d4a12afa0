"""`sqlstream doctor`: a healthy machine, and each thing that can be wrong."""

from __future__ import annotations

import email.utils
import re
import resource
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.cli import doctor
from sqlstream.cli.main import build_parser
from sqlstream.cli.server_clock import seconds_ahead, server_of
from sqlstream.testing.faulty import Fault, FaultyAnswer
from sqlstream.testing.servers import FaultyHttpServer, LocalS3
from sqlstream.testing.storage import ScriptedFetcher
from tests.cli.commands import in_process

ROOT = Path(__file__).parents[2]
KEYS = ("--storage-option", "key=testing", "--storage-option", "secret=testing", "--storage-option", "region=us-east-1")


def found(document: dict[str, Any]) -> dict[str, dict[str, str]]:
    return {fact["what"]: fact for fact in document["facts"]}


def test_the_extras_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        extra: {re.match(r"[\w-]+", package)[0] for package in packages}  # type: ignore[index]
        for extra, packages in extras.items()
        if extra not in ("demo", "dev")
    }
    assert {extra: set(modules.values()) for extra, modules in doctor.EXTRAS.items()} == named


def test_a_sound_machine_has_nothing_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Cache(tmp_path / "cache", limit="1mb"):
        pass
    (tmp_path / "t.csv").write_text("index\n1\n")
    code, text = in_process(capsys, "doctor", tmp_path / "t.csv", tmp_path / "cache")
    assert code == 0, text
    assert re.search(r"^ok +torch +2\.", text, re.MULTILINE)
    assert re.search(r"^ok +extra image +pillow \d", text, re.MULTILINE)
    assert re.search(r"^ok +cache +0 entries, 0 B, limit 1\.0 MB", text, re.MULTILINE)
    assert re.search(r"^ok +ledger +0 disagreements", text, re.MULTILINE)
    assert re.search(r"^ok +source .*t\.csv +is there", text, re.MULTILINE)


def test_what_does_not_import_is_said_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    monkeypatch.setitem(doctor.EXTRAS, "fast", {"no_such_module": "no-such-distribution"})
    _, document = in_process(capsys, "doctor", tmp_path / "none.csv", tmp_path, "--json")
    facts = found(document)
    assert facts["extra image"]["state"] == "note"
    assert "PIL.Image does not import: import of PIL.Image halted" in facts["extra image"]["found"]
    assert facts["extra fast"]["found"] == "not installed: pip install 'sqlstream-data[fast]'"


def test_a_damaged_cache_names_the_repair(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Cache(tmp_path / "cache", limit="1mb") as cache:
        cache.fetcher = ScriptedFetcher({"test://x": b"content"})
        with cache.pinned("test://x") as path:
            pass
    path.unlink()
    code, text = in_process(capsys, "doctor", tmp_path / "missing.csv", tmp_path / "cache")
    assert code == 1
    assert "1 disagreements with the disk" in text
    assert f"- ledger: sqlstream cache verify --repair {tmp_path / 'cache'}" in text
    assert "missing.csv: check the path" in text


def test_few_open_files_are_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    _, document = in_process(capsys, "doctor", "--json", tmp_path / "t.csv", tmp_path)
    assert found(document)["open files"] == {
        "what": "open files",
        "found": "256 (ulimit -n; at most 256)",
        "state": "note",
        "cure": "ulimit -n 1024",
    }


def test_a_source_is_asked_for_by_one_small_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with LocalS3() as s3:
        url = s3.put("bucket/folder/t.csv", b"index\n1\n")
        keys = (*KEYS, "--storage-option", f"endpoint_url={s3.endpoint_url}")
        facts = {
            src: found(in_process(capsys, "doctor", src, tmp_path, "--json", *keys)[1])[f"source {src}"]
            for src in (url, "s3://bucket/folder/", "s3://bucket/folder/*.csv", "s3://bucket/none/", "s3://bucket/none.csv")
        }
    states = [fact["state"] for fact in facts.values()]
    assert states == ["ok", "ok", "ok", "wrong", "wrong"], facts
    assert facts[url]["found"].startswith("8 B, answered in ")
    assert facts["s3://bucket/folder/"]["found"].startswith(f"first object {url}")
    assert "does not exist" in facts["s3://bucket/none.csv"]["found"]


def dated(seconds_ahead: float, *more: tuple[str, str]) -> FaultyAnswer:
    date = email.utils.formatdate(time.time() + seconds_ahead, usegmt=True)
    return FaultyAnswer(fault=Fault.STATUS, status=403, headers=(("Date", date), *more))


@pytest.mark.parametrize("scheme", ["http", "s3"])
def test_a_server_whose_clock_is_far_from_ours_is_wrong(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FaultyHttpServer({"/bucket/t.csv": b"index\n1\n"}) as server:
        src = "s3://bucket/t.csv" if scheme == "s3" else f"{server.url}/bucket/t.csv"
        keys = ("--storage-option", f"endpoint_url={server.url}", "--storage-option", "anon=true") if scheme == "s3" else ()
        server.script("/", dated(-3600))
        code, document = in_process(capsys, "doctor", src, tmp_path, "--json", *keys)
        asked = server.requests("/")
    clock = found(document)["server clock"]
    assert (code, clock["state"]) == (1, "wrong")
    assert re.fullmatch(rf"{server.url} is -3[56]\d\d s from this machine", clock["found"])
    assert clock["cure"].startswith("set the clock (NTP) of this machine")
    assert found(document)[f"source {src}"]["state"] == "ok"
    assert [(request.method, "authorization" in request.headers) for request in asked] == [("HEAD", False)]


def test_the_date_of_a_copy_in_a_cache_is_counted_with_its_age() -> None:
    with FaultyHttpServer() as server:
        for answer, ahead in (
            (dated(-3600, ("Age", "3600")), 0),
            (dated(900), 900),
            (FaultyAnswer(fault=Fault.STATUS, status=200, headers=(("Date", "soon"),)), None),
        ):
            server.script("/", answer)
            told = seconds_ahead(server.url, {})
            assert told == ahead if ahead is None else told is not None and abs(told - ahead) < 200


def test_the_server_of_a_source_is_found_without_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    assert server_of("https://me:word@host:8443/a/t.csv?sig=1", {}) == "https://host:8443"
    assert server_of("s3://b/t.csv", {}) == "https://s3.us-east-1.amazonaws.com"
    assert server_of("s3://b/t.csv", {"region": "eu-west-1"}) == "https://s3.eu-west-1.amazonaws.com"
    monkeypatch.setenv("AWS_REGION", "cn-north-1")
    assert server_of("s3://b/t.csv", {}) == "https://s3.cn-north-1.amazonaws.com.cn"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000")
    assert server_of("s3://b/t.csv", {}) == "http://minio:9000"
    assert server_of("gs://b/t.csv", {}) == "https://storage.googleapis.com"
    assert server_of("hf://datasets/a/b", {}) is None


@pytest.mark.parametrize("pair", ["region", "=x", 'client_kwargs={"a"'])
def test_a_broken_option_is_named(pair: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert in_process(capsys, "doctor", "s3://bucket/t.csv", tmp_path, "--storage-option", pair)[0] == 2


def test_paths_that_cannot_be_looked_at_are_no_tracebacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = in_process(capsys, "doctor", tmp_path / ("s" * 300), tmp_path / ("d" * 300))
    assert code == 1
    assert "does not exist" in text
    assert "none at" in text


def test_no_command_needs_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert build_parser().parse_args(["doctor"]).dst is None
