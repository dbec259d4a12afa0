"""What a store says of a failure reaches the user, also when the source is opened, which is asked for with HEAD."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, StorageError
from sqlstream.index.sources.base.access import stat_file
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.service_errors import read_error
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer

PATH, URL = "/bucket/index.parquet", "s3://bucket/index.parquet"
XML = '<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>{}</Code><Message>{}</Message><RequestId>44F9</RequestId></Error>'
EXPIRED = "The provided token has expired."


def answer(status: int, code: str, message: str) -> FaultyAnswer:
    body = XML.format(code, message).encode()
    return FaultyAnswer(fault=Fault.STATUS, status=status, headers=(("Content-Type", "application/xml"),), body=body)


@contextlib.contextmanager
def reader(server: FaultyHttpServer, backend: str) -> Iterator[Fetcher]:
    options = {"endpoint_url": server.url, "backend": backend, "key": "me", "secret": "hidden", "region": "us-east-1"}
    fetcher = Fetcher(StorageOptions(storage_options=options, num_retries=0))
    try:
        yield fetcher
    finally:
        fetcher.stop()


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
@pytest.mark.parametrize(
    ("status", "code", "message", "kind", "shown"),
    [
        (400, "ExpiredToken", EXPIRED, AccessDeniedError, "ExpiredToken: The provided token has expired: give new credentials"),
        (
            403,
            "InvalidAccessKeyId",
            "No such key.",
            AccessDeniedError,
            "InvalidAccessKeyId: No such key: check the credentials",
        ),
        (403, "InvalidObjectState", "Not so.", AccessDeniedError, "InvalidObjectState: Not so: it is archived"),
        (404, "NoSuchBucket", "No bucket.", ObjectNotFoundError, f"the bucket of {URL} does not exist"),
        (404, "NoSuchKey", "No key.", ObjectNotFoundError, f"{URL} does not exist (status 404)"),
    ],
)
def test_s3s_own_code_and_message_are_in_the_error_when_a_source_is_opened(
    server: FaultyHttpServer, backend: str, status: int, code: str, message: str, kind: type[StorageError], shown: str
) -> None:
    server.script(PATH, always=answer(status, code, message))
    with reader(server, backend) as fetcher, pytest.raises(kind) as caught:
        stat_file(URL, fetcher)
    assert shown in str(caught.value)
    assert "<" not in str(caught.value)
    assert "hidden" not in str(caught.value)
    assert [request.method for request in server.requests(PATH)] == ["HEAD", "GET"]


def test_an_object_whose_head_is_refused_and_whose_get_is_not_is_read(server: FaultyHttpServer) -> None:
    server.objects[PATH] = b"12345"
    server.script(PATH, FaultyAnswer(fault=Fault.STATUS, status=403))
    with reader(server, "obstore") as fetcher:
        assert fetcher.head(URL).size_bytes == 5
    assert [request.range for request in server.requests(PATH)] == [None, "bytes=0-0"]


def test_a_signed_web_address_says_what_the_store_says(server: FaultyHttpServer) -> None:
    server.script(PATH, always=answer(403, "AccessDenied", "Request has expired &amp; gone"))
    with (
        reader(server, "obstore") as fetcher,
        pytest.raises(AccessDeniedError, match="AccessDenied: Request has expired & gone:"),
    ):
        fetcher.head(f"{server.url}{PATH}?X-Amz-Signature=hidden")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        (XML.format("AuthenticationFailed", "Server failed.\nRequestId:1\nTime:2"), "AuthenticationFailed", "Server failed"),
        (
            "An error occurred (SlowDown) when calling the GetObject operation (reached max retries: 0): Slow.",
            "SlowDown",
            "Slow",
        ),
        ("<Error><Code>InternalError</Code></Error>", "InternalError", ""),
    ],
)
def test_each_way_to_say_an_error_is_read(text: str, code: str, message: str) -> None:
    assert read_error(text) == (code, message)


@pytest.mark.parametrize(
    "text",
    ["", "Forbidden", "<html><code>x</code></html>", "An error occurred (403) when calling the HeadObject operation: No"],
)
def test_what_is_no_error_of_a_store_is_none(text: str) -> None:
    assert read_error(text) is None


def test_a_wrong_region_and_a_wrong_clock_have_their_cures() -> None:
    for code, cure in (("AuthorizationHeaderMalformed", "['region']"), ("RequestTimeTooSkewed", "clock")):
        assert cure in str(error_for_status(403, URL, detail=XML.format(code, "No.")))
