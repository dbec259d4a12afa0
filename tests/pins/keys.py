"""Keys of objects: the names of their files, so a cache that is there stays warm only while they stay.

Not here is what was wrong at the pinned commit: words of signatures in other queries, containers of Azure, users, '#' and
escapes that are no UTF-8 beside a query.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlstream.cache.model.refs import ObjectParts, ObjectRef

BASES = (
    "https://example.org",
    "https://example.org:8443",
    "http://images.example.com",
    "https://EXAMPLE.org",
    "https://[2001:db8::1]",
    "s3://bucket",
    "s3a://bucket.with.dots",
    "gs://bucket",
    "gcs://bucket",
    "az://container",
    "hf://datasets/owner/name",
    "oss://bucket",
    "ftp://example.org",
    "webdav://example.org/dav",
    "hdfs://namenode:8020",
    "file:///data",
    "/data",
)
PATHS = (
    "/a.jpg",
    "/a/b/c.parquet",
    "/with space.png",
    "/with%20space.png",
    "/caf\u00e9/\u6771\u4eac.webp",
    "/caf%C3%A9.jpg",
    "/a//b/../c.txt",
    "/no-extension",
    "/archive.tar.gz",
    "/a+b=c&d;e,f.mp4",
)
QUERIES = (
    "?id=1",
    "?id=2",
    "?b=2&a=1",
    "?a=1&b=2",
    "?a=1&a=2",
    "?q=%C3%A9",
    "?q=a+b",
    "?q=a%20b",
    "?empty=",
    "?url=https%3A%2F%2Fother.org%2Fx",
    "?response-content-type=image%2Fpng",
    "?versionId=abc.DEF_123",
)
DATE = "20260101T000000Z"
SIGNED = (  # every field that the scheme writes: the key is that of the URL without them
    "https://bucket.s3.amazonaws.com/a.jpg?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F20260101%2Fus-east-1%2Fs3"
    f"%2Faws4_request&X-Amz-Date={DATE}&X-Amz-Expires=3600&X-Amz-SignedHeaders=host&X-Amz-Signature=0123456789abcdef",
    "https://s3.eu-west-1.amazonaws.com/bucket/a.jpg?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIA%2F20260101%2F"
    f"eu-west-1%2Fs3%2Faws4_request&X-Amz-Date={DATE}&X-Amz-Expires=60&X-Amz-Security-Token=token&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature=fedcba9876543210",
    "https://storage.googleapis.com/bucket/a.jpg?X-Goog-Algorithm=GOOG4-RSA-SHA256&X-Goog-Credential=me%40project.iam%2F"
    f"20260101%2Fauto%2Fstorage%2Fgoog4_request&X-Goog-Date={DATE}&X-Goog-Expires=3600&X-Goog-SignedHeaders=host"
    "&X-Goog-Signature=0123456789abcdef",
    "https://account.blob.core.windows.net/container/a.jpg?sv=2022-11-02&st=2026-01-01T00%3A00%3A00Z"
    "&se=2026-01-02T00%3A00%3A00Z&sr=b&sp=r&spr=https&sig=c2lnbmF0dXJl",
)
VERSIONED = ("s3://bucket/table.parquet", "https://example.org/table.parquet?id=1", "/data/table.parquet")
ETAGS = ('"0123456789abcdef"', 'W/"weak"', "1700000000000000000")
SPANS = ((0, 1), (4, 4096), (1 << 33, (1 << 33) + 10))


def urls() -> list[str]:
    """Return all URLs, each once."""
    plain = [base + path for base in BASES for path in PATHS]
    queries = [f"https://example.org/get{query}" for query in QUERIES]
    buckets = [f"s3://bucket/key{query}" for query in QUERIES[:2]]
    ends = ["s3://bucket/a@b.jpg", "/data/a@b.jpg", "s3://bucket/percent%", "https://example.org", "https://example.org/"]
    return list(dict.fromkeys([*plain, *queries, *buckets, *ends, *SIGNED]))


def compute(_: Path) -> dict[str, Any]:
    """Return the key of each URL, of versions of some, and of spans of these."""
    spans = {
        f"{url} {etag} {start}-{stop}": ObjectParts(url, etag=etag).part((start, stop)).key.hex()
        for url in VERSIONED
        for etag in ETAGS
        for start, stop in SPANS
    }
    return {
        "urls": {url: ObjectRef.of(url).key.hex() for url in urls()},
        "versions": {f"{url} {etag}": ObjectRef.of(url, etag=etag).key.hex() for url in VERSIONED for etag in ETAGS},
        "spans": spans,
        "extensions": {url: ObjectRef.of(url).ext for url in urls()},
    }
