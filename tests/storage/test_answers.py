"""Answers as they come over the wire: what is taken, and what is refused, never a part for the whole."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from urllib3.util import parse_url

from sqlstream.config import StorageOptions
from sqlstream.errors import ObjectNotFoundError, StorageError, TransientStorageError
from sqlstream.storage.backends.answers import BodyRange, check_part, part_of_answer, plain_url, without_user
from sqlstream.storage.backends.http import HttpStorage
from sqlstream.storage.base.protocols import ObjectInfo
from sqlstream.storage.fetcher import Fetcher
from tests.storage.raw import RawServer

OK = b"HTTP/1.1 200 OK\r\n"
PARTIAL = b"HTTP/1.1 206 Partial Content\r\n"
LARGE = bytes(range(256)) * (1 << 12)
ALL, REST, SPAN = (0, None), (3, None), (3, 7)
"""Of an object of ten bytes."""


@pytest.fixture(scope="module")
def storage() -> HttpStorage:
    return HttpStorage(StorageOptions(read_timeout_seconds=20.0))


def read(storage: HttpStorage, url: str, start: int = 0, stop: int | None = None) -> tuple[ObjectInfo, bytes]:
    stream = storage.get(url, start=start, stop=stop)
    try:
        return stream.info, b"".join(bytes(chunk) for chunk in stream.chunks())
    finally:
        stream.close()


def answer(body: bytes, *headers: str, status: bytes = OK) -> bytes:
    return status + "".join(f"{header}\r\n" for header in headers).encode() + b"\r\n" + body


@pytest.mark.parametrize("body", [b"", b"x", LARGE], ids=["empty", "small", "several reads"])
@pytest.mark.parametrize("cut", [5, 40, 70], ids=["in the first line", "in the head", "in the body"])
def test_answers_are_read_however_they_are_cut(storage: HttpStorage, body: bytes, cut: int) -> None:
    plain = answer(body, 'ETag: "1"', f"content-length:{len(body)}")
    with RawServer(plain, plain.replace(b"\r\nETag", b"\r\nConnection: close\r\nETag"), plain, cut=cut) as server:
        for num_connections in (1, 1, 2):  # kept, and given up when the server says so
            assert read(storage, server.url) == (ObjectInfo(url=server.url, size_bytes=len(body), etag='"1"'), body)
            assert server.num_connections == num_connections


def test_a_kept_connection_that_the_server_has_closed_is_not_used(storage: HttpStorage) -> None:
    with RawServer(answer(b"x", "Content-Length: 1")) as server:
        read(storage, server.url)
    with pytest.raises(StorageError, match=r"(?i)refused"):
        read(storage, server.url)


def test_the_server_is_asked_for_the_bytes_as_they_are(storage: HttpStorage) -> None:
    with RawServer(answer(b"x", "Content-Length: 1")) as server:
        read(storage, server.url)
    assert "accept-encoding: identity" in server.requests[0].lower()


# -- which bytes of the object a body holds ----------------------------------------------------------------------------

TAKEN = [
    (ALL, 200, {"content-length": "10"}, BodyRange(start=0, stop=10, total_bytes=10)),
    (ALL, 200, {"content-length": "10", "content-range": "bytes 0-9/10"}, BodyRange(start=0, stop=10, total_bytes=10)),
    (ALL, 200, {"transfer-encoding": "Chunked"}, BodyRange(start=0, stop=None, total_bytes=None)),
    (ALL, 206, {"content-length": "10", "content-range": "bytes 0-9/10"}, BodyRange(start=0, stop=10, total_bytes=10)),
    (ALL, 200, {"content-length": "4", "content-encoding": "gzip"}, BodyRange(start=0, stop=None, total_bytes=None)),
    (ALL, 200, {"content-encoding": "deflate"}, BodyRange(start=0, stop=None, total_bytes=None)),
    (REST, 206, {"content-length": "7", "content-range": "bytes 3-9/10"}, BodyRange(start=3, stop=10, total_bytes=10)),
    (REST, 206, {"transfer-encoding": "chunked", "content-range": "Bytes 3-9/10"}, BodyRange(start=3, stop=10, total_bytes=10)),
    (REST, 200, {"content-length": "10"}, BodyRange(start=0, stop=10, total_bytes=10)),
    (REST, 200, {"transfer-encoding": "chunked"}, BodyRange(start=0, stop=None, total_bytes=None)),
    (SPAN, 206, {"content-length": "4", "content-range": "bytes 3-6/10"}, BodyRange(start=3, stop=7, total_bytes=10)),
    (SPAN, 206, {"content-length": "4", "content-range": "bytes 3-6/*"}, BodyRange(start=3, stop=7, total_bytes=None)),
    (SPAN, 206, {"content-length": "2", "content-range": "bytes 3-4/5"}, BodyRange(start=3, stop=5, total_bytes=5)),
    (SPAN, 200, {"content-length": "10"}, BodyRange(start=0, stop=10, total_bytes=10)),
]


@pytest.mark.parametrize(("asked", "status", "headers", "part"), TAKEN)
def test_an_answer_to_the_question_says_what_it_holds(
    asked: tuple[int, int | None], status: int, headers: dict[str, str], part: BodyRange
) -> None:
    assert part_of_answer("http://h/x", status, headers, start=asked[0], stop=asked[1]) == part


REFUSED = [
    *[(ALL, status, {"content-length": "0"}) for status in (100, 101, 103, 201, 202, 203, 204, 205, 207, 226, 304)],
    (ALL, 200, {}),  # up to the end of the connection
    (ALL, 200, {"content-length": ""}),
    (ALL, 200, {"content-length": "10, 10"}),
    (ALL, 200, {"content-length": "-10"}),
    (ALL, 200, {"content-length": "+10"}),
    (ALL, 200, {"content-length": "1e1"}),
    (ALL, 200, {"content-length": "١٠"}),
    (ALL, 200, {"content-length": "9" * 30}),
    (ALL, 200, {"content-length": "10", "transfer-encoding": "chunked"}),
    (ALL, 200, {"transfer-encoding": "gzip, chunked"}),
    (ALL, 200, {"transfer-encoding": "chunked "}),  # http.client reads it as no chunks
    (ALL, 200, {"transfer-encoding": ""}),
    (ALL, 200, {"transfer-encoding": "gzip"}),
    (ALL, 200, {"content-length": "5", "content-range": "bytes 5-9/10"}),
    (ALL, 206, {"content-length": "10"}),
    (ALL, 206, {"content-length": "5", "content-range": "bytes 5-9/10"}),
    (ALL, 206, {"content-length": "5", "content-range": "bytes 0-4/10"}),
    (ALL, 206, {"content-length": "10", "content-range": "bytes 0-9/*"}),
    (ALL, 206, {"content-length": "10", "content-range": "bytes 0-9/10", "content-encoding": "gzip"}),
    (REST, 206, {"content-length": "5", "content-range": "bytes 5-9/10"}),  # later
    (REST, 206, {"content-length": "8", "content-range": "bytes 2-9/10"}),  # earlier
    (REST, 206, {"content-length": "6", "content-range": "bytes 3-8/10"}),  # less
    (REST, 206, {"content-length": "7", "content-range": "bytes 3-9/*"}),
    (REST, 206, {"content-length": "6", "content-range": "bytes 3-9/10"}),
    (REST, 206, {"content-length": "8", "content-range": "bytes 3-9/10"}),
    (REST, 206, {"content-length": "7", "content-range": "bytes 3-9/9"}),
    (REST, 206, {"content-length": "7", "content-range": "bytes 9-3/10"}),
    (REST, 206, {"content-length": "7", "content-range": "bytes */10"}),
    (REST, 206, {"content-length": "7", "content-range": "3-9/10"}),
    (REST, 206, {"content-length": "7", "content-range": "bytes 3-9/10, bytes 3-9/10"}),
    (REST, 206, {"content-length": "7", "content-type": "multipart/byteranges; boundary=x"}),
    (REST, 200, {"content-length": "7", "content-range": "bytes 3-9/10"}),
    (SPAN, 206, {"content-length": "4", "content-range": "bytes 4-7/10"}),
    (SPAN, 206, {"content-length": "4", "content-range": "bytes 2-5/10"}),
    (SPAN, 206, {"content-length": "5", "content-range": "bytes 3-7/10"}),  # beyond
    (SPAN, 206, {"content-length": "3", "content-range": "bytes 3-5/10"}),
    (SPAN, 206, {"content-length": "10", "content-range": "bytes 0-9/10"}),
    (SPAN, 206, {"content-length": "3", "content-range": "bytes 3-5/*"}),
    (SPAN, 206, {"content-length": "4", "content-range": "bytes 3-6/10", "content-type": "Multipart/ByteRanges; boundary=x"}),
]


@pytest.mark.parametrize(("asked", "status", "headers"), REFUSED)
def test_an_answer_to_another_question_or_that_contradicts_itself_is_refused(
    asked: tuple[int, int | None], status: int, headers: dict[str, str]
) -> None:
    with pytest.raises(StorageError, match="http://h/x"):
        part_of_answer("http://h/x?secret=1", status, headers, start=asked[0], stop=asked[1])


def test_a_part_beyond_the_end_is_no_answer() -> None:
    with pytest.raises(TransientStorageError):
        check_part("x", BodyRange(start=5, stop=3, total_bytes=3), start=5, stop=9)


# -- bodies ------------------------------------------------------------------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    "sent",
    [
        answer(b"xxx", "Content-Length: 5", "Connection: close"),
        answer(b"5\r\nxxxxx\r\n", CHUNKED, "Connection: close"),
        answer(b"5\r\nxx", CHUNKED, "Connection: close"),
        answer(b"", CHUNKED, "Connection: close"),
        answer(b"-5\r\nxxxxx\r\n0\r\n\r\n", CHUNKED, "Connection: close"),
        answer(b"+5\r\nxxxxx\r\n0\r\n\r\n", CHUNKED),
        answer(b" 5\r\nxxxxx\r\n0\r\n\r\n", CHUNKED),
        answer(b"0x5\r\nxxxxx\r\n0\r\n\r\n", CHUNKED),
        answer(b"1_0\r\nxxxxxxxxxxxxxxxx\r\n0\r\n\r\n", CHUNKED),
        answer(b"5\r\nxxxxx\r\n0_0\r\n\r\n", CHUNKED),
        answer(b"5\r\nxxxxxyy5\r\nxxxxx\r\n0\r\n\r\n", CHUNKED),
        answer(b"3\r\nxxx\r\n0\r\n\r\n", CHUNKED, "Content-Range: bytes 0-4/5", status=PARTIAL),
        answer(b"7\r\nxxxxxxx\r\n0\r\n\r\n", CHUNKED, "Content-Range: bytes 0-4/5", status=PARTIAL),
        answer(b"xxxxx", "Content-Length: 5", "Content-Range: bytes 0-9/100", status=PARTIAL),
        answer(b"xxxxx", "Content-Length: 5", status=PARTIAL),
        answer(b"xxxxxmore", "Content-Length: 5"),
        answer(LARGE + b"more", f"Content-Length: {len(LARGE)}"),
        answer(b"more", "Content-Length: 0"),
        answer(b"xxxxx", "Content-Length: 5", "Content-Length: 6"),
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n",
        answer(b"xxxxx", "Content-Length: 5", "no header", "Content-Encoding: gzip"),
        answer(b"xxxxx", "Content-Length: 5", " Content-Encoding : gzip"),
        answer(b"xxxxx", "X-Name: a\rContent-Length: 5", "Connection: close"),
        b"",
    ],
)
def test_a_body_that_is_not_the_one_announced_is_tried_again(storage: HttpStorage, sent: bytes) -> None:
    with RawServer(sent) as server, pytest.raises(TransientStorageError):
        read(storage, server.url)


def test_sizes_of_chunks_may_have_zeros_blanks_extensions_and_trailers(storage: HttpStorage) -> None:
    sent = answer(b"0005 \t;a=1\r\nwhole\r\n00A;b\r\n and right\r\n000\r\nX-Size: 1_0\r\nX-Other: y\r\n\r\n", CHUNKED)
    with RawServer(sent, sent) as server:
        assert [read(storage, server.url)[1] for _ in range(2)] == [b"whole and right"] * 2
        assert server.num_connections == 1


@pytest.mark.parametrize("coding", ["chunked ", "chunked\t", "\r\n chunked", "chunked\x0b", "\xa0chunked", "\x1cchunked", ""])
def test_sizes_of_chunks_are_no_content_where_their_announcement_is_spelled_otherwise(
    storage: HttpStorage, coding: str
) -> None:
    head = f"Connection: close\r\nTransfer-Encoding: {coding}\r\n\r\n".encode("latin-1")
    with RawServer(OK + head + b"5\r\nright\r\n0\r\n\r\n") as server, pytest.raises(StorageError, match="Transfer-Encoding"):
        read(storage, server.url)


@pytest.mark.parametrize(
    "stray",
    [
        answer(b"whole?", "Content-Length: 5"),
        answer(b"5\r\nwhole\r\n0\r\n\r\n?", CHUNKED),
        answer(b"?", "Content-Length: 0", status=b"HTTP/1.1 404 Not Found\r\n"),
        answer(b"", status=b"HTTP/1.1 101 Switching Protocols\r\n"),
    ],
    ids=["behind a length", "behind chunks", "behind an error", "another protocol"],
)
@pytest.mark.parametrize("is_head", [False, True], ids=["get", "head"])
def test_a_connection_with_bytes_that_belong_to_no_answer_is_not_kept(
    storage: HttpStorage, stray: bytes, is_head: bool
) -> None:
    """What comes next there may be the rest of them, and not the answer to the next question."""
    with RawServer(stray, always=answer(b"right", "Content-Length: 5"), cut=1 << 20) as server:
        with contextlib.suppress(StorageError):
            storage.head(server.url) if is_head else read(storage, server.url)
        assert read(storage, server.url)[1] == b"right"
        assert server.num_connections == len(server.requests) >= 2


@pytest.mark.parametrize("body", [b"", b"xxxxx"])
@pytest.mark.parametrize("version", [b"HTTP/1.0", b"HTTP/1.1"])
def test_a_body_whose_end_nobody_names_is_refused(storage: HttpStorage, version: bytes, body: bytes) -> None:
    sent = answer(body, "Connection: close", status=version + b" 200 OK\r\n")
    with RawServer(sent) as server, pytest.raises(StorageError, match=r"could have broken off; use .*Length; chunks do"):
        read(storage, server.url)


@pytest.mark.parametrize("num_hints", [1, 3])
def test_hints_before_the_answer_are_not_the_answer(storage: HttpStorage, num_hints: int) -> None:
    hints = b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\nContent-Length: 3\r\n\r\n" * num_hints
    sent = b"HTTP/1.1 100 Continue\r\n\r\n" + hints + answer(b"whole", "Content-Length: 5")
    with RawServer(sent, sent) as server:
        assert [read(storage, server.url)[1] for _ in range(2)] == [b"whole", b"whole"]
        assert server.num_connections == 1


def test_hints_without_end_are_given_up(storage: HttpStorage) -> None:
    with RawServer(b"HTTP/1.1 102 Processing\r\n\r\n" * 100) as server, pytest.raises(TransientStorageError, match="1xx"):
        read(storage, server.url)


def test_an_answer_without_content_leaves_nothing_on_its_connection(storage: HttpStorage) -> None:
    """What follows it there is not taken for the next answer."""
    poison = answer(b"", "Content-Length: 6", status=b"HTTP/1.1 204 No Content\r\n") + answer(b"poison", "Content-Length: 6")
    with RawServer(poison, answer(b"right", "Content-Length: 5")) as server:
        with pytest.raises(StorageError, match="204"):
            read(storage, server.url)
        assert read(storage, server.url)[1] == b"right"


@pytest.mark.parametrize(
    "sent",
    [b"<html>" + b"x" * 60_000, b"\x00\xff" * 40 + b"\r\n", b"HTTP/1.1 2000 OK\r\n\r\n"],
    ids=["long", "binary", "no status"],
)
def test_an_answer_that_is_no_http_is_shown_by_its_beginning_alone(storage: HttpStorage, sent: bytes) -> None:
    with RawServer(sent + b"\n") as server, pytest.raises(TransientStorageError, match="check scheme and port") as caught:
        read(storage, server.url)
    assert len(str(caught.value)) < 600


# -- codings -----------------------------------------------------------------------------------------------------------

GZIP = gzip.compress(LARGE, mtime=0)
RAW = zlib.compress(LARGE, wbits=-15)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", GZIP),
        ("X-GZip", GZIP),
        ("deflate", zlib.compress(LARGE)),
        ("deflate", RAW),
        ("gzip", gzip.compress(LARGE[:7], mtime=0) + gzip.compress(LARGE[7:], mtime=0)),
        ("gzip", gzip.compress(b"", mtime=0) + GZIP),
        ("identity", LARGE),
    ],
    ids=["gzip", "x-gzip", "deflate", "raw deflate", "two members", "an empty member", "identity"],
)
@pytest.mark.parametrize("length", ["Content-Length", "chunks", "close"])
def test_a_coded_body_is_decoded_when_it_is_whole(storage: HttpStorage, encoding: str, body: bytes, length: str) -> None:
    if length == "close" and encoding != "deflate":
        return
    framed, how = {
        "Content-Length": (body, f"Content-Length: {len(body)}"),
        "chunks": (b"1\r\n%s\r\n%x\r\n%s\r\n0\r\n\r\n" % (body[:1], len(body) - 1, body[1:]), CHUNKED),
        "close": (body, "Connection: close"),
    }[length]
    with RawServer(answer(framed, f"Content-Encoding: {encoding}", how)) as server:
        info, data = read(storage, server.url)
    assert data == LARGE
    assert info.size_bytes in (None, len(LARGE))


def test_a_gzip_body_that_could_have_broken_off_between_two_members_is_refused(storage: HttpStorage) -> None:
    sent = answer(GZIP, "Content-Encoding: gzip", "Connection: close")
    with RawServer(sent) as server, pytest.raises(StorageError, match="could have broken off"):
        read(storage, server.url)


@pytest.mark.parametrize(
    ("encoding", "body"),
    [
        ("gzip", b""),
        ("gzip", GZIP[:1]),
        ("gzip", GZIP[: len(GZIP) // 2]),
        ("gzip", GZIP[:-8]),
        ("gzip", GZIP[:-1]),
        ("gzip", GZIP[:-8] + bytes(8)),
        ("gzip", GZIP + GZIP[:-1]),
        ("gzip", GZIP + b"more"),
        ("gzip", LARGE),
        ("deflate", zlib.compress(LARGE)[:-1]),
        ("deflate", RAW[:-1]),
        ("deflate", RAW + b"more"),
    ],
)
def test_a_coded_body_that_is_cut_or_damaged_is_tried_again(storage: HttpStorage, encoding: str, body: bytes) -> None:
    sent = answer(body, f"Content-Encoding: {encoding}", f"Content-Length: {len(body)}")
    with RawServer(sent) as server, pytest.raises(TransientStorageError, match=encoding):
        read(storage, server.url)


def test_blanks_around_a_length_are_no_part_of_it(storage: HttpStorage) -> None:
    with RawServer(answer(b"right", "Content-Length: \t5 \t")) as server:
        assert read(storage, server.url)[1] == b"right"


@pytest.mark.parametrize("encoding", ["br", "zstd", "gzip, gzip", "compress", "aes128gcm", "gzip;q=1"])
def test_a_coding_that_is_not_undone_is_named(storage: HttpStorage, encoding: str) -> None:
    with RawServer(answer(b"x", f"Content-Encoding: {encoding}", "Content-Length: 1")) as server:
        with pytest.raises(StorageError, match=f"Content-Encoding '{encoding}'") as caught:
            read(storage, server.url)
        assert type(caught.value) is StorageError


def test_a_head_that_is_refused_or_coded_says_no_length_of_its_own(storage: HttpStorage) -> None:
    with RawServer(answer(b"", "Content-Encoding: gzip", "Content-Length: 5")) as server:
        assert storage.head(server.url).size_bytes is None
    says = 'ETag: "1"', "Last-Modified: then"
    with RawServer(answer(b"", *says), answer(b"", *says, "Transfer-Encoding: chunked")) as server:
        assert storage.head(server.url) == ObjectInfo(url=server.url, size_bytes=None, etag='"1"', last_modified="then")
    with RawServer(answer(b"", status=b"HTTP/1.1 404 Not Found\r\n")) as server, pytest.raises(ObjectNotFoundError):
        storage.head(server.url)


@pytest.mark.parametrize(
    ("status", "says"),
    [
        (OK, ("Content-Length: 0",)),
        (OK, ()),
        (OK, ("Transfer-Encoding: chunked",)),
        (b"HTTP/1.1 204 No Content\r\n", ()),
        (PARTIAL, ("Content-Range: bytes 0-4/5", "Content-Length: 5")),
        (b"HTTP/1.1 405 Method Not Allowed\r\n", ("Content-Length: 0",)),
    ],
)
def test_where_an_answer_to_head_says_no_size_that_to_get_holds(
    storage: HttpStorage, status: bytes, says: tuple[str, ...]
) -> None:
    with RawServer(answer(b"", *says, status=status), answer(b"right", "Content-Length: 5", 'ETag: "1"')) as server:
        assert storage.head(server.url) == ObjectInfo(url=server.url, size_bytes=5, etag='"1"')
    with RawServer(always=answer(b"", "Content-Length: 0")) as server:
        assert storage.head(server.url).size_bytes == 0


@pytest.mark.parametrize(("scheme", "accepted"), [("s3", "identity"), ("gs", "gzip")])
def test_objects_of_a_store_come_as_they_are_stored(tmp_path: Path, scheme: str, accepted: str) -> None:
    """Its Content-Encoding is theirs; GCS unfolds what was stored as gzip for clients that do not take it."""
    says = f"Content-Range: bytes 0-{len(GZIP) - 1}/{len(GZIP)}", f"Content-Length: {len(GZIP)}", 'ETag: "1"'
    dated = "Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT"
    with RawServer(always=answer(GZIP, "Content-Encoding: gzip", dated, *says, status=PARTIAL)) as server:
        endpoint = server.url.removesuffix("/bucket/x")
        options = {"s3": {"endpoint_url": endpoint, "region": "r"}, "gs": {"base_url": endpoint}}[scheme]
        fetcher = Fetcher(StorageOptions(storage_options={"anon": True, **options}, num_retries=0))
        fetcher.download(f"{scheme}://bucket/x", tmp_path / "x")
        fetcher.stop()
    assert (tmp_path / "x").read_bytes() == GZIP
    assert f"accept-encoding: {accepted}\r\n" in server.requests[-1].lower()


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked"),
    [("a\tb", "a%09b"), ("a\nb?c=\rd", "a%0Ab?c=%0Dd"), ("a b\x00ü#c", "a%20b%00%C3%BC"), ("a%0Ab", "a%0Ab")],
)
def test_no_character_of_a_name_is_left_out(storage: HttpStorage, name: str, asked: str) -> None:
    with RawServer(answer(b"right", "Content-Length: 5")) as server:
        assert read(storage, server.url.removesuffix("x") + name)[1] == b"right"
        assert server.requests[0].split(" ")[1] == f"/bucket/{asked}"


@pytest.mark.parametrize("host", ["[::1", "h\u2100", "us\udc80er:hidden@h"])
def test_what_is_no_url_is_an_error_of_ours_without_its_password(storage: HttpStorage, host: str) -> None:
    with pytest.raises(StorageError, match="is no URL") as caught:
        storage.head(f"http://me:hidden@{host}/x")
    assert "hidden" not in str(caught.value)
    assert caught.value.__suppress_context__  # that of the standard library shows the whole host with its user


# -- redirects ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "asked"),
    [
        (b"/caf\xe9.jpg", "/caf%E9.jpg"),
        ("/café.jpg".encode(), "/caf%C3%A9.jpg"),
        (b"/caf%e9.jpg", "/caf%E9.jpg"),
        (b"/x \t", "/x"),
        (b"x y", "/bucket/x%20y"),
        (b"/a%2Fb?x=%20#y", "/a%2Fb?x=%20"),
        (b"/a\x7fb", "/a%7Fb"),
    ],
)
def test_a_redirect_leads_to_the_very_name_that_the_server_says(storage: HttpStorage, location: bytes, asked: str) -> None:
    found = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: " + location + b"\r\n\r\n"
    with RawServer(found, answer(b"right", "Content-Length: 5")) as server:
        assert read(storage, server.url)[1] == b"right"
        assert server.requests[1].split(" ")[1] == asked


@pytest.mark.parametrize("location", ["http://[", "//[::1/x", "http://[zz]/"])
def test_a_redirect_to_what_is_no_url_is_an_error_of_ours(storage: HttpStorage, location: str) -> None:
    found = answer(b"", "Content-Length: 0", f"Location: {location}", status=b"HTTP/1.1 302 Found\r\n")
    with RawServer(found) as server, pytest.raises(StorageError, match="redirects"):
        read(storage, server.url)


def test_a_redirect_to_two_places_is_an_error_and_one_that_says_its_place_twice_is_none(storage: HttpStorage) -> None:
    one, other = (
        answer(b"", "Content-Length: 0", "Location: /x", more, status=b"HTTP/1.1 302 Found\r\n")
        for more in ("Location: /y", "Location: /x")
    )
    with RawServer(one, other, answer(b"right", "Content-Length: 5")) as server:
        with pytest.raises(StorageError, match="redirects to 2 places at once"):
            read(storage, server.url)
        assert read(storage, server.url)[1] == b"right"


PIECES = [
    " ",
    "\t",
    "\n",
    *"http:// https:// HTTP:// host Host h-1.example.org 127.0.0.1 [::1] . .. / /. /./ // a A ~ + %20".split(),
]
PIECES += '%2f %2F % %zz ? ?a=1&b=/? # @ me:pw@ : :80 :8080 :99999 :0 \\ ä ; | " ^ [ ]'.split()


@given(st.sampled_from(["http://", "https://", ""]), st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
@example("http://", "h:65535/")
@example("http://", "h:65536/")
@example("http://", "h/a/..b/%2E%2e/c")
def test_a_plain_url_is_what_urllib3_and_the_standard_library_make_of_it(start: str, rest: str) -> None:
    url = start + rest
    if (plain := plain_url(url)) is not None:
        parsed, split = parse_url(url), urlsplit(url)
        assert (parsed.scheme, parsed.auth, parsed.host, parsed.port, parsed.request_uri, parsed.fragment) == (
            plain.scheme, None, plain.hostname, plain.port, plain.target, None,
        )  # fmt: skip
        assert (split.scheme, split.username, split.hostname, split.port) == (plain.scheme, None, plain.hostname, plain.port)
        assert split.geturl() == url
        assert without_user(url) == (url, {})


@pytest.mark.parametrize("url", ["http://h/", "https://1.2.3.4:8080/b/a-b_c~d.jpg", "http://h/a%20%E4?b=%2F&c=d/e?"])
def test_the_usual_urls_are_plain(url: str) -> None:
    assert plain_url(url) is not None
