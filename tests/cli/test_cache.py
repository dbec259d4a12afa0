"""`sqlstream cache`, against real caches filled from a real HTTP server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.ledger.reports import Failure, record_failures
from sqlstream.errors import ObjectNotFoundError
from sqlstream.testing.disk import cached_files
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.session import Session
from tests.cli.commands import run, run_json, run_python
from tests.processes import ROOT

NUM_FILES, FILE_BYTES, CHARGED_BYTES = 6, 10_000, 12_288  # three blocks of 4096 each


@pytest.fixture
def urls() -> Iterator[list[str]]:
    objects = {f"/pictures/{i}.jpg": bytes([i]) * FILE_BYTES for i in range(NUM_FILES)}
    with FaultyHttpServer(objects) as server:
        yield [server.url + path for path in objects]


@pytest.fixture
def dst(tmp_path: Path, urls: list[str]) -> Path:
    """A cache that holds every file, used by nobody."""
    with Cache(tmp_path / "cache", limit="1mb") as cache:
        cache.acquire_many(urls)
        cache.release_many(urls)
        cache.acquire_many(urls[:2])  # two hits
        cache.release_many(urls[:2])
    return tmp_path / "cache"


def test_stats_as_json_equals_what_is_on_disk_and_what_was_done(dst: Path) -> None:
    stats = run_json("cache", "stats", dst)
    assert stats["entries"] == NUM_FILES == len(cached_files(dst))
    assert stats["used_bytes"] == NUM_FILES * CHARGED_BYTES
    assert stats["limit_bytes"] == 1 << 20
    assert stats["free_bytes"] == (1 << 20) - NUM_FILES * CHARGED_BYTES
    assert stats["filling_bytes"] == stats["pinned_entries"] == stats["evictions"] == stats["failures"] == 0
    assert (stats["misses"], stats["hits"]) == (NUM_FILES, 2)
    assert stats["requests"] == NUM_FILES
    assert stats["downloaded_bytes"] == NUM_FILES * FILE_BYTES


def test_stats_counts_what_each_host_of_storage_was_asked_for(dst: Path, urls: list[str]) -> None:
    host = urls[0].rpartition("/pictures")[0]
    (use,) = run_json("cache", "stats", dst)["hosts"]
    assert use == {
        "host": host,
        "requests": NUM_FILES,
        "downloaded_bytes": NUM_FILES * FILE_BYTES,
        "retries": 0,
        "wait_seconds": 0.0,
    }
    assert host in run("cache", "stats", dst).stdout


def test_stats_for_people_names_each_fact(dst: Path) -> None:
    result = run("cache", "stats", dst)
    assert result.returncode == 0, result.stderr
    facts = dict(line.split("  ", 1) for line in result.stdout.split("\n\n")[0].splitlines())
    assert {name: value.strip() for name, value in facts.items()} | {
        "limit": "1.0 MB",
        "entries": "6",
        "hits": "2 (25 %)",
        "misses": "6",
        "requests": "6",
        "downloaded": "58.6 KB",
    } == {name: value.strip() for name, value in facts.items()}
    assert set(facts) >= {"used", "filling", "free", "pinned entries", "evictions", "failures", "overhead", "index files"}


def test_stats_tells_who_pins(dst: Path, urls: list[str]) -> None:
    with Cache(dst) as cache, cache.pinned(urls[0]):
        stats = run_json("cache", "stats", dst)
        text = run("cache", "stats", dst).stdout
    assert stats["pinned_entries"] == 1
    assert [owner["pinned_entries"] for owner in stats["owners"] if owner["pid"] == os.getpid()] == [1]
    assert str(os.getpid()) in text


def test_stats_imports_neither_torch_nor_alembic(dst: Path) -> None:
    """So that it starts fast; numbers of imports do not depend on how busy the machine is. Reports read through SQLAlchemy."""
    script = "import sys; from sqlstream.cli.main import main; code = main(sys.argv[1:]); print(*sys.modules); sys.exit(code)"
    result = run_python("-c", script, "cache", "stats", str(dst), "--json")
    assert result.returncode == 0, result.stderr
    packages = {name.partition(".")[0] for name in result.stdout.rsplit("}", 1)[1].split()}
    assert "sqlstream" in packages
    assert not packages & {"torch", "alembic", "pyarrow", "fsspec", "obstore", "PIL", "tqdm", "moto"}


def test_stats_of_what_is_no_cache_is_wrong_use_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    for path in (tmp_path, tmp_path / "missing"):
        result = run("cache", "stats", path)
        assert result.returncode == 2
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert result.stderr.startswith("sqlstream: ")
        assert str(path) in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_clear_removes_nothing_without_a_terminal_or_yes(dst: Path) -> None:
    result = run("cache", "clear", dst)
    assert result.returncode == 2
    assert "--yes" in result.stderr
    closed = subprocess.run(
        ["sh", "-c", '"$0" -m sqlstream cache clear "$1" <&-', sys.executable, dst], capture_output=True, text=True, check=False
    )
    assert (closed.returncode, closed.stderr) == (2, result.stderr)
    assert len(cached_files(dst)) == NUM_FILES


def test_clear_never_takes_a_pinned_file_and_says_so(dst: Path, urls: list[str]) -> None:
    with Cache(dst) as cache, cache.pinned(urls[0]) as path:
        result = run("cache", "clear", dst, "--yes")
        assert path.read_bytes() == bytes([0]) * FILE_BYTES
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"removed {NUM_FILES - 1} files ({5 * CHARGED_BYTES / 1024:.1f} KB), 0 index files",
        "left 1 pinned files (12.0 KB): a running process uses them",
    ]
    assert len(cached_files(dst)) == 1


def test_clear_as_json_reports_what_it_removed(dst: Path) -> None:
    report = run_json("cache", "clear", dst, "--yes")
    assert report["removed_entries"] == NUM_FILES
    assert report["removed_bytes"] == NUM_FILES * CHARGED_BYTES
    assert report["kept_pinned_entries"] == 0
    assert cached_files(dst) == {}
    assert run_json("cache", "stats", dst)["entries"] == 0


def test_clear_older_than_takes_only_what_was_not_used_for_that_long(dst: Path) -> None:
    assert run_json("cache", "clear", dst, "--yes", "--older-than", "7d")["removed_entries"] == 0
    assert run_json("cache", "clear", dst, "--yes", "--older-than", "0s")["removed_entries"] == NUM_FILES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--older-than", "soon"], "older-than='soon' is not a duration"),
        (["--dataset", "nobody"], "no dataset 'nobody'"),
    ],
)
def test_clear_refuses_a_wrong_choice_in_one_line_and_removes_nothing(dst: Path, words: list[str], message: str) -> None:
    result = run("cache", "clear", dst, "--yes", *words)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert len(cached_files(dst)) == NUM_FILES


@pytest.mark.parametrize(("answer", "num_left"), [("y", 0), ("n", NUM_FILES), ("", NUM_FILES)])
def test_clear_asks_on_a_terminal_and_takes_only_yes(dst: Path, answer: str, num_left: int) -> None:
    terminal, keyboard = os.openpty()
    command = [sys.executable, "-m", "sqlstream", "cache", "clear", str(dst)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, stdin=keyboard, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    os.write(terminal, f"{answer}\n".encode())
    output, errors = process.communicate(timeout=500)
    for fd in (terminal, keyboard):
        os.close(fd)
    assert process.returncode == 0, errors
    assert "[y/N]" in errors
    assert f"{NUM_FILES} files" in errors
    assert output.startswith("removed") == (answer == "y")
    assert len(cached_files(dst)) == num_left


def test_verify_of_a_sound_cache_finds_nothing(dst: Path) -> None:
    result = run("cache", "verify", dst)
    assert (result.returncode, result.stdout) == (0, "nothing found: the ledger and the disk agree\n")
    assert run_json("cache", "verify", dst) == {"findings": [], "num_left": 0}


def test_verify_prints_each_finding_and_repair_mends_it(dst: Path) -> None:
    damaged = sorted(path for path in (dst / "data").rglob("*") if path.is_file())[0]
    damaged.write_bytes(b"short")
    result = run("cache", "verify", dst, "--json")
    assert result.returncode == 1
    found = json.loads(result.stdout)
    assert found["num_left"] == 1
    assert damaged.name.startswith(found["findings"][0]["key"])
    assert found["findings"][0]["url"].startswith("http://127.0.0.1")

    result = run("cache", "verify", dst)
    assert result.returncode == 1
    assert "1 found, 0 repaired, 1 left" in result.stdout
    assert f"the file has 5 bytes instead of {FILE_BYTES}: another program changed it; a repair forgets it" in result.stdout
    assert "--repair" in result.stdout

    result = run("cache", "verify", dst, "--repair")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 found, 1 repaired, 0 left" in result.stdout
    assert run("cache", "verify", dst).returncode == 0
    assert run_json("cache", "stats", dst)["entries"] == NUM_FILES - 1


def test_a_reader_that_leaves_early_is_no_error(dst: Path) -> None:
    command = f"'{sys.executable}' -m sqlstream cache stats '{dst}' | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment, timeout=500, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_failures_names_row_step_url_error_and_count(dst: Path) -> None:
    told = [
        Failure(url="s3://b/x.jpg", error="gone", row=7, step=3),
        Failure(url="s3://b/x.jpg", error="gone"),  # the download itself knows neither row nor step
        Failure(url="s3://b/x.jpg", error="gone", row=9, step=12, count=0),
        Failure(url="s3://b/y.jpg", error="e" * 1000, row=1, step=1, count=0),
    ]
    with Cache(dst) as cache, Session(cache).transaction() as tx:
        record_failures(tx, told)
    (record,) = run_json("cache", "failures", dst)["failures"]
    assert {name: record[name] for name in record if name != "last_at"} == {
        "url": "s3://b/x.jpg",
        "error": "gone",
        "row": 9,
        "step": 12,
        "count": 2,
    }
    shown = run("cache", "failures", dst).stdout.splitlines()
    assert shown[0].split() == ["count", "last", "row", "step", "url", "error"]


def test_failures_lists_what_could_not_be_brought(dst: Path, urls: list[str]) -> None:
    assert "nothing has failed" in run("cache", "failures", dst).stdout
    missing = urls[0].replace("0.jpg", "none.jpg")
    with Cache(dst) as cache, pytest.raises(ObjectNotFoundError):
        cache.acquire_many([missing])
    (record,) = run_json("cache", "failures", dst)["failures"]
    assert (record["url"], record["row"], record["step"], record["count"]) == (missing, None, None, 1)
    shown = run("cache", "failures", dst)
    assert shown.returncode == 0
    assert missing in shown.stdout
