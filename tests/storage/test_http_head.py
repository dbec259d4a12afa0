"""A head that is taken apart at once is the message that the standard library's parser makes of it."""

from __future__ import annotations

import email.parser
import http.client
import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sqlstream.config import StorageOptions
from sqlstream.storage.backends import http_head
from sqlstream.storage.backends.http import HttpStorage
from tests.storage.raw import RawServer

PLAIN = (
    b'Server: nginx/1.22.1\r\nContent-Type: application/octet-stream\r\nContent-Length: 44000\r\nETag: "6745-abe0"\r\n'
    b"Set-Cookie: a=1\r\nset-cookie: b=2; Path=/\r\nX-Empty:\r\nX-Blanks:  a: b  \r\n\r\n"
)
PIECES = [
    b"Content-Length: 5",
    b"content-type: multipart/mixed; boundary=x",
    b"Content-Type:message/rfc822",
    b"Content-Type: text/plain",
    b"Content-Transfer-Encoding: base64",
    b"From here",
    b" folded",
    b"\tfolded",
    b"X",
    b":",
    b": ",
    b"\r",
    b"\n",
    b"\r\n",
    b"\r\n\r\n",
    b"\xff",
    b"\x0b",
    b"caf\xc3\xa9: caf\xe9",
    b"Name With Blank: x",
    b"From : a",
    b"--x",
]
HEADS = st.lists(st.sampled_from(PIECES) | st.binary(max_size=4) | st.just(b"\r\n"), max_size=12).map(b"".join)


def read_by(read: Callable[[Any], http.client.HTTPMessage], data: bytes, size: int) -> tuple[object, ...]:
    """Return all that shows of the message that a function reads, or its error, and the bytes that it leaves."""
    lines = io.BufferedReader(io.BytesIO(data), size)
    try:
        message = read(lines)
    except http.client.HTTPException as error:
        return type(error), str(error)
    payload = message.is_multipart() or message.get_payload()
    shown = message.items(), payload, [type(defect) for defect in message.defects], message.as_string()
    return type(message), *shown, message.preamble, message.epilogue, message.get_unixfrom(), lines.read()


@settings(max_examples=150, deadline=None)
@given(HEADS, st.booleans(), st.sampled_from([32, 1 << 16]))
@example(PLAIN, False, 32)
@example(PLAIN, False, 1 << 16)
@example(b"A: b\r\n" * 99, True, 1 << 16)
@example(b"A: b\r\n" * 100, True, 1 << 16)
@example(b"A: " + b"b" * 70_000 + b"\r\n", True, 1 << 18)
@example(b"A: b\n", True, 32)
@example(b"Content-Type: multipart/mixed; boundary=x\r\n", True, 1 << 16)
def test_a_head_reads_as_the_standard_library_reads_it(head: bytes, is_ended: bool, buffer_bytes: int) -> None:
    data = head + b"\r\nbody\r\n\r\n" * is_ended
    assert read_by(http_head.read_head, data, buffer_bytes) == read_by(http.client.parse_headers, data, buffer_bytes)


def test_the_head_of_a_plain_answer_goes_through_no_parser_for_e_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the standard library's parser is asked")

    monkeypatch.setattr(email.parser.Parser, "parsestr", refuse)
    with RawServer(b'HTTP/1.1 200 OK\r\nETag: "1"\r\nContent-Length: 4\r\n\r\nbody', cut=0) as server:  # as a whole
        stream = HttpStorage(StorageOptions()).get(server.url)
        assert b"".join(map(bytes, stream.chunks())) == b"body"
        assert stream.info.etag == '"1"'
