"""Index files, and what is downloaded to be indexed, count against a limit of their own while they grow."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.config import IndexOptions, StorageOptions
from sqlstream.errors import CacheFullError, ConfigError
from sqlstream.index.build.build import open_index
from sqlstream.index.file.room import IndexRoom
from sqlstream.storage.fetcher import Fetcher
from tests.index.sources import all_rows, build, write_csv

MIB = 1 << 20


def table(path: Path, num_bytes: int) -> Path:
    lines = num_bytes // 1024
    return write_csv(path, "index,text\n" + "".join(f"{at},{at:01000}\n" for at in range(lines)))


def used(directory: Path) -> int:
    num_blocks = 0
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # a build ends as it is looked at
            num_blocks += path.stat().st_blocks
    return num_blocks * 512


class Endless(BaseHTTPRequestHandler):
    """A CSV file without an end, or as long as it says."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        line = b"1,%s\n" % (b"x" * 65_000)
        self.wfile.write(b"b\r\nindex,text\n\r\n")
        try:
            for _ in range(4000):  # 260 MB: enough to show that nothing stopped it
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        except OSError:
            return
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """Be silent."""


@pytest.fixture
def endless() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/rows.csv"
    server.shutdown()
    server.server_close()


def test_a_table_without_an_end_stops_at_the_limit_and_leaves_nothing(endless: str, tmp_path: Path) -> None:
    directory = tmp_path / "index"
    directory.mkdir()
    fetcher = Fetcher(StorageOptions())
    largest = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal largest
        while not done.wait(0.005):
            largest = max(largest, used(directory))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with pytest.raises(CacheFullError, match=r"of a limit of 8388608.*index_limit"):
            open_index(IndexOptions(src=endless, index_limit="8mb"), directory, fetcher, show_progress=False)
    finally:
        done.set()
        watcher.join()
        fetcher.stop()
    assert 0 < largest <= 8 * MIB
    assert not list(directory.iterdir())


def test_a_download_leaves_the_free_bytes_that_were_asked_for(endless: str, tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    too_much = status.f_bavail * status.f_frsize + 1
    fetcher = Fetcher(StorageOptions())
    try:
        with pytest.raises(CacheFullError, match=f"{too_much} must stay so"):
            open_index(IndexOptions(src=endless, index_free_bytes=too_much), tmp_path, fetcher, show_progress=False)
    finally:
        fetcher.stop()


def test_an_index_that_grows_beyond_the_limit_is_not_kept(tmp_path: Path) -> None:
    with pytest.raises(CacheFullError, match="index_limit"):
        build(tmp_path, table(tmp_path / "t.csv", 6 * MIB), index_limit="4mb")
    assert not list((tmp_path / "index").iterdir())


def test_unused_indexes_go_first_and_those_in_use_stay(tmp_path: Path) -> None:
    sources = [table(tmp_path / f"{at}.csv", MIB + at * 1024) for at in range(4)]
    indexes = [build(tmp_path, source) for source in sources[:3]]
    for at, index in enumerate(indexes):
        os.utime(index.path, ns=(at, at))
    paths = [index.path for index in indexes]
    indexes[1].close()
    indexes[2].close()
    new = build(tmp_path, sources[3], index_limit=used(tmp_path / "index") + MIB // 2)
    assert [path.exists() for path in [*paths, new.path]] == [True, False, True, True]
    assert len(all_rows(indexes[0])) == 1024


def test_positions_and_results_of_a_query_are_counted(tmp_path: Path) -> None:
    source = table(tmp_path / "t.csv", 3 * MIB)
    base = build(tmp_path, source)
    limit = used(tmp_path / "index") + MIB // 2
    with pytest.raises(CacheFullError):
        build(tmp_path, source, index_limit=limit, sql_query="SELECT \"index\", text || 'x' AS text FROM dataframe")
    assert [path for path in (tmp_path / "index").iterdir() if path.is_file()] == [base.path]


@pytest.mark.parametrize(("limit", "least"), [("auto", 1), (None, None), ("1gb", 1 << 30), (5, 5)])
def test_limits_as_users_write_them(limit: object, least: int | None, tmp_path: Path) -> None:
    room = IndexRoom(tmp_path, IndexOptions(src="t.csv", index_limit=limit))  # type: ignore[arg-type]
    assert 64 << 10 <= room.step_bytes <= 8 * MIB
    if least == 5:
        with pytest.raises(CacheFullError, match="of a limit of 5"):
            room.need(6)
    else:
        room.need(1)


def test_a_limit_that_is_no_size_is_named() -> None:
    with pytest.raises(ConfigError, match="index_limit='much'"):
        IndexOptions(src="t.csv", index_limit="much")


def test_a_dataset_takes_the_limit(tmp_path: Path) -> None:
    source = table(tmp_path / "t.csv", 2 * MIB)
    with pytest.raises(CacheFullError, match="index_limit"):
        StreamingDataset(str(source), str(tmp_path / "cache"), columns_to_download=[], index_limit="1mb", show_progress=False)
