"""What the ledger says of each host, against the servers' own counts."""

from __future__ import annotations

from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3

BUSY = FaultyAnswer(fault=Fault.STATUS, status=503, headers=(("Retry-After", "1"),))
CUT = FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=10)


def test_every_request_byte_and_retry_of_every_host_is_in_the_ledger(
    s3: LocalS3, server: FaultyHttpServer, tmp_path: Path
) -> None:
    with FaultyHttpServer() as other:
        for each in (server, other):
            each.objects |= {f"/{i}": str(i).encode() * 500 for i in range(40)}
        for i in (3, 13, 23):
            server.script(f"/{i}", BUSY)
            other.script(f"/{i}", CUT)
        other.script("/5", FaultyAnswer(fault=Fault.REDIRECT, location="/7"))
        for i in range(10):
            s3.put(f"accounts/{i}", b"x" * 1000)
        urls = [f"{each.url}/{i}" for each in (server, other) for i in range(40)] + [f"s3://accounts/{i}" for i in range(10)]
        with Cache(tmp_path / "cache", storage_options=s3.storage_options) as cache:
            for start in range(0, len(urls), 30):
                cache.acquire_many(urls[start : start + 30])
                cache.release_many(urls[start : start + 30])
            with cache.pinned(f"{server.url}/0"):  # a hit: no request
                pass
            hosts = {host.host: host for host in cache.statistics().hosts}
        plain, cut, bucket = (hosts[name] for name in (server.url, other.url, "s3://accounts"))
        assert (plain.requests, cut.requests) == (len(server.requests()), len(other.requests())) == (43, 44)
        assert bucket.requests == sum(num for url, num in s3.gets_by_url().items() if url.startswith("s3://accounts/")) == 10
        assert (plain.retries, cut.retries, bucket.retries) == (3, 3, 0)
        assert plain.downloaded_bytes == sum(len(server.objects[f"/{i}"]) for i in range(40))
        assert plain.wait_seconds >= 3.0
        assert cut.wait_seconds > bucket.wait_seconds == 0.0
