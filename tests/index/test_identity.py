"""What names a table file in the key of its index."""

from __future__ import annotations

import pytest

from sqlstream.index.sources.plan.parts import FilePart
from sqlstream.index.types.models import SourceFile, fingerprint

MD5 = '"900150983cd24fb0d6963f7d28e17f72"'
SIGNED = "https://h/t.csv?GoogleAccessId=me&Expires={0}&Signature={0}"


def identity(url: str, etag: str | None, content: str = "") -> object:
    return FilePart(source=SourceFile(url=url, size_bytes=7, etag=etag, content=content)).identity()


@pytest.mark.parametrize("etag", ['"v1"', 'W/"v1"', None])
def test_an_etag_that_is_no_hash_names_a_file_only_with_its_query(etag: str | None) -> None:
    assert identity("https://h/t.csv?id=1", etag) != identity("https://h/t.csv?id=2", etag)
    assert identity("https://h/t.csv?id=1", MD5) == identity("https://h/t.csv?id=2", MD5)


@pytest.mark.parametrize("etag", ['"v1"', MD5, None])
def test_another_signature_is_the_same_file(etag: str | None) -> None:
    assert identity(SIGNED.format(1), etag) == identity(SIGNED.format(2), etag)


def test_plain_files_keep_the_keys_of_earlier_versions() -> None:
    assert identity("https://h/t.csv", '"v1"') == ["https://h/t.csv", 7, '"v1"']
    assert identity("https://h/t.csv?id=1", MD5) == ["https://h/t.csv", 7, MD5]
    assert identity("https://h/t.csv", None) == ["https://h/t.csv", 7, fingerprint({"url": "https://h/t.csv"})]
    assert identity("/Data/t@B.csv", "1700000000") == ["/Data/t@B.csv", 7, "1700000000"]


def test_bytes_tell_versions_apart_where_the_server_does_not() -> None:
    for etag in (None, 'W/"modified Mon, 01 Jan 2024 00:00:00 GMT"'):
        assert identity("https://h/t.csv", etag, "one") != identity("https://h/t.csv", etag, "two")
