"""An object that is replaced while it is read: all of it is of one version, whatever the server says and leaves out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectChangedError, TransientStorageError
from sqlstream.storage.backends.http import HttpStorage
from sqlstream.storage.base.etags import same_version
from sqlstream.storage.base.protocols import ObjectInfo, read_ranges
from sqlstream.storage.fetcher import Fetcher, FetchRequest
from tests.storage.downloads import PLENTY, Downloads
from tests.storage.raw import RawServer

FIRST, SECOND = b"first" * 300_000, b"other" * 300_000
LONGER = b"longer" * 300_000
CUT = 1_200_000
"""Bytes of the first version that come before the break."""
DATES = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT", "Last-Modified: Tue, 02 Jan 2024 00:00:00 GMT"


def tag(name: str) -> str:
    return f'ETag: "{name}"'


class Objects:
    """Serves each object below `/bucket/` by a server of its own."""

    def __init__(self, objects: dict[str, Callable[[str], bytes]]) -> None:
        self._objects = objects

    def __call__(self, request: str) -> bytes:
        return self._objects[request.split(" ")[1].rpartition("/")[2]](request)


class Replaced:
    """Serves one version, cut, to the first request for all of it, and then another; it ignores If-Match.

    Args:
        first: Headers of the version that breaks off.
        second: Headers of the other one.
        data: Bytes of the other one.
        shift: The parts of the other one begin so many bytes later than asked.
    """

    def __init__(self, first: tuple[str, ...], second: tuple[str, ...], data: bytes = SECOND, shift: int = 0) -> None:
        self._first, self._second, self._data, self._shift = first, second, data, shift
        self._is_cut = False

    def __call__(self, request: str) -> bytes:
        fields = dict(line.lower().split(": ", 1) for line in request.split("\r\n")[1:] if line)
        if request.startswith("HEAD"):
            data, headers = (self._data, self._second) if self._is_cut else (FIRST, self._first)
            return head("200 OK", len(data), *headers)
        start, _, last = fields.get("range", "bytes=0-").removeprefix("bytes=").partition("-")
        is_range = "range" in fields
        if not self._is_cut:
            self._is_cut = True
            says = [f"Content-Range: bytes 0-{len(FIRST) - 1}/{len(FIRST)}"] if is_range else []
            status = "206 Partial Content" if is_range else "200 OK"
            return head(status, len(FIRST), *self._first, *says, "Connection: close") + FIRST[:CUT]
        data = self._data
        begin = int(start) + (self._shift if int(start) else 0)
        stop = min(int(last) + 1 if last else len(data), len(data))
        if not is_range:
            return head("200 OK", len(data), *self._second) + data
        says = [f"Content-Range: bytes {begin}-{stop - 1}/{len(data)}"]
        return head("206 Partial Content", stop - begin, *self._second, *says) + data[begin:stop]


def head(status: str, length: int, *headers: str) -> bytes:
    dated = headers if any(header.startswith("Last-Modified") for header in headers) else (*headers, DATES[0])
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\n".encode() + "\r\n".join(dated).encode() + b"\r\n\r\n"


REPLACED = {
    "another-etag": ((tag("1"),), (tag("2"),), SECOND),
    "no-etag-any-more": ((tag("1"),), (), SECOND),
    "weak-etag": ((tag("1"),), ('ETag: W/"1"',), SECOND),
    "another-total": ((tag("1"),), (tag("1"),), LONGER),
    "another-date": ((tag("1"), DATES[0]), (tag("1"), DATES[1]), SECOND),
    "never-an-etag": ((), (), SECOND),
    "empty-etag": (('ETag: ""',), ('ETag: ""',), SECOND),
    "star": (("ETag: *",), ("ETag: *",), SECOND),
    "no-quotes": (("ETag: 1",), ("ETag: 1",), SECOND),
    "always-weak": (('ETag: W/"1"',), ('ETag: W/"2"',), SECOND),
}


def not_cut(first: tuple[str, ...], data: bytes = FIRST, shift: int = 0) -> Replaced:
    """Return a server of one version that breaks nothing off."""
    server = Replaced(first, first, data, shift)
    server("GET / HTTP/1.1\r\n")
    return server


@pytest.fixture
def made() -> Iterator[list[Fetcher]]:
    made: list[Fetcher] = []
    yield made
    for fetcher in made:
        fetcher.stop()


def downloads_from(server: RawServer, client: str, made: list[Fetcher], directory: Path) -> tuple[Downloads, str]:
    """Return downloads with a client, and the URL of the bucket for it."""
    endpoint = server.url.removesuffix("/bucket/x")
    options: dict[str, dict[str, object]] = {
        "http": {},
        "s3": {"anon": True, "endpoint_url": endpoint, "region": "r"},
        "fsspec": {"anon": True, "endpoint_url": endpoint, "backend": "fsspec"},
    }
    made.append(Fetcher(StorageOptions(storage_options=options[client], num_threads=1)))
    return Downloads(made[-1], directory), f"{endpoint}/bucket/" if client == "http" else "s3://bucket/"


def read(downloads: Downloads, ticket: str) -> bytes | str:
    """Return what a download gave: its bytes, or its error's name."""
    (done,) = downloads.wait_done(ticket)
    return type(done.error).__name__ if done.error else downloads.read(ticket)[: done.size_bytes]


@pytest.mark.parametrize("client", ["http", "s3", "fsspec"])
def test_a_rest_of_another_version_or_from_elsewhere_is_not_joined(made: list[Fetcher], tmp_path: Path, client: str) -> None:
    objects: dict[str, Replaced] = {name: Replaced(*case) for name, case in REPLACED.items()}
    expected = {name: case[2] for name, case in REPLACED.items()}
    if client != "fsspec":  # which does not show where a part begins
        for name, shift in (("later", 7), ("earlier", -7)):
            objects[name], expected[name] = Replaced((tag("1"),), (tag("1"),), FIRST, shift), FIRST
    with RawServer(always=Objects(dict(objects))) as server:
        downloads, root = downloads_from(server, client, made, tmp_path)
        downloads.submit(*[root + name for name in objects])
        found = {name: read(downloads, str(i)) for i, name in enumerate(objects)}
    assert [name for name in objects if found[name] != expected[name]] == []


@pytest.mark.parametrize("client", ["http", "s3"])
def test_a_rest_of_the_same_version_is_joined(made: list[Fetcher], tmp_path: Path, client: str) -> None:
    with RawServer(always=Replaced((tag("1"),), (tag("1"),), FIRST)) as server:
        downloads, root = downloads_from(server, client, made, tmp_path)
        downloads.submit(f"{root}x")
        (done,) = downloads.wait_done()
        assert (done.error, done.num_requests, done.downloaded_bytes) == (None, 2, len(FIRST))
        assert downloads.read("0") == FIRST
        assert "bytes=0-" not in server.requests[-1]
        assert 'if-match: "1"' in server.requests[-1].lower()


def span(start: int, stop: int) -> FetchRequest:
    return FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, span=(start, stop))


@pytest.mark.parametrize("client", ["http", "s3"])
def test_a_span_is_of_one_version_and_begins_where_it_was_asked_for(made: list[Fetcher], tmp_path: Path, client: str) -> None:
    def cut_span(first: tuple[str, ...], versions: Replaced) -> Callable[[str], bytes]:
        is_cut = False

        def answer(request: str) -> bytes:
            nonlocal is_cut
            if is_cut:
                return versions(request)
            is_cut = True
            says = f"Content-Range: bytes 10-1400009/{len(FIRST)}"
            return head("206 Partial Content", 1_400_000, *first, says, "Connection: close") + FIRST[10:CUT]

        return answer

    names = ["another-etag", "another-total", "another-date"]
    objects = {name: cut_span(REPLACED[name][0], not_cut(REPLACED[name][1], REPLACED[name][2])) for name in names}
    lying = {name: not_cut((tag("1"),), FIRST, shift) for name, shift in (("later", 7), ("earlier", -7))}
    with RawServer(always=Objects({**objects, **lying})) as server:
        downloads, root = downloads_from(server, client, made, tmp_path)
        downloads.submit(*[root + name for name in (*names, *lying)], like=span(10, 1_400_010))
        found = [read(downloads, str(i)) for i in range(5)]
        assert [found[i] == REPLACED[name][2][10:1_400_010] for i, name in enumerate(names)] == [True] * 3
        assert found[3:] == ["TransientStorageError"] * 2
        assert downloads.read("3") == downloads.read("4") == b""
        with pytest.raises(TransientStorageError, match="gave up"):
            downloads.fetcher.get_ranges(f"{root}later", [(1000, 2000)])


@pytest.mark.parametrize(("data", "date"), [(SECOND, DATES[1]), (LONGER, DATES[0])], ids=["date", "total"])
def test_ranges_of_two_versions_are_an_error_without_etags_too(data: bytes, date: str) -> None:
    first, second = not_cut((DATES[0],)), not_cut((date,), data)
    with RawServer(first, second) as server, pytest.raises(ObjectChangedError):
        read_ranges(HttpStorage(StorageOptions()), server.url, [(0, 10), (1_400_000, 1_400_010)])


@pytest.mark.parametrize(
    ("unsaid", "one", "other"),
    [
        (("*",), ("2000000",), ("3000000",)),
        (("2000000",), ("2000000", DATES[0]), ("2000000", DATES[1])),
        (("2000000",), ("2000000", tag("1")), ("2000000", tag("2"))),
    ],
    ids=["total", "date", "etag"],
)
def test_ranges_of_two_versions_are_an_error_where_the_first_answer_does_not_say_which(
    unsaid: tuple[str, ...], one: tuple[str, ...], other: tuple[str, ...]
) -> None:
    ranges = [(start, start + 10) for start in (0, 700_000, 1_400_000)]
    answers = [
        head("206 Partial Content", 10, f"Content-Range: bytes {start}-{stop - 1}/{total}", *headers) + bytes(10)
        for (start, stop), (total, *headers) in zip(ranges, (unsaid, one, other), strict=True)
    ]
    with RawServer(*answers) as server, pytest.raises(ObjectChangedError):
        read_ranges(HttpStorage(StorageOptions()), server.url, ranges)


def test_parts_are_not_joined_by_a_weak_etag_however_its_mark_is_written() -> None:
    strong = {'"W/a"', '"a,b"', '"\xe4"'}
    for etag in ('W/"a"', 'w/"a"', "a", "a b", '"a", "b"', '"a" ', '"a b"', *strong):
        info = ObjectInfo(url="http://h/x", size_bytes=1, etag=etag)
        assert (info.strong_etag, info.is_surely(info)) == ((etag, True) if etag in strong else (None, False))
    for etag, kept in (("a", "a"), ("W/a", None)):
        assert ObjectInfo(url="gs://b/x", size_bytes=1, etag=etag, is_of_file_system=True).strong_etag == kept
    assert same_version('w/"a"', '"a"')


def by_the_grammar(request: str) -> bytes:
    """Serve an object as Go's `net/http` does for a handler that sets its ETag without quotes."""
    fields = dict(line.lower().split(": ", 1) for line in request.split("\r\n")[1:] if line)
    if not re.fullmatch(r'"[^"]*"', fields.get("if-match", '"v1"')):
        return head("412 Precondition Failed", 0)
    return not_cut(("ETag: v1",))(request)


@pytest.mark.parametrize("client", ["http", "s3"])
def test_an_etag_without_quotes_names_a_version_and_is_no_condition(made: list[Fetcher], tmp_path: Path, client: str) -> None:
    with RawServer(always=by_the_grammar) as server:
        downloads, bucket = downloads_from(server, client, made, tmp_path)
        span = FetchRequest(ticket="", url="", fd=-1, granted_bytes=PLENTY, span=(3, 8), whole_bytes=len(FIRST))
        for etag in ("v1", '"v1"', "v2"):
            downloads.submit(f"{bucket}x", like=span._replace(expected_etag=etag))
        assert read(downloads, "0") == FIRST[3:8]
        assert read(downloads, "1") == FIRST[3:8]  # named by a listing, which has other quotes
        assert read(downloads, "2") == "ObjectChangedError"
        far = [(0, 3), (1_400_000, 1_400_003)]
        assert made[-1].get_ranges(f"{bucket}x", far) == [FIRST[start:stop] for start, stop in far]
