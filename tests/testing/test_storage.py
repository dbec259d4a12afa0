"""The storage with scripted faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import ObjectNotFoundError, StorageError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session

URLS = [f"http://nowhere/{i}.bin" for i in range(3)]


def test_faults_come_as_scripted_and_then_the_bytes(tmp_path: Path) -> None:
    fetcher = ScriptedFetcher({URLS[0]: b"data"}, errors={URLS[1]: StorageError("always")})
    fetcher.script(URLS[0], StorageError("at first"), None, StorageError("never reached"))
    with Cache(tmp_path, limit=1 << 20) as cache:
        cache.fetcher = fetcher
        with pytest.raises(StorageError, match="at first"):
            cache.acquire_many(URLS[:1])
        with cache.pinned(URLS[0]) as path:
            assert path.read_bytes() == b"data"
        for _ in range(2):
            with pytest.raises(StorageError, match="always"):
                cache.acquire_many(URLS[1:2])
        with pytest.raises(ObjectNotFoundError):
            cache.acquire_many(URLS[2:])
        assert fetcher.num_gets == {URLS[0]: 2, URLS[1]: 2, URLS[2]: 1}
    check_invariants(tmp_path, at_rest=True)


def test_a_download_that_is_held_back_is_on_its_way_until_it_is_delivered(tmp_path: Path) -> None:
    fetcher = ScriptedFetcher(dict.fromkeys(URLS, b"data"))
    with Cache(tmp_path, limit=1 << 20) as cache:
        cache.fetcher = fetcher
        fetcher.holds_back = True
        hold = Session(cache).acquire_one([ObjectRef.of(URLS[0], size_bytes=4)])
        assert fetcher.pending == URLS[:1]
        assert cache.statistics().filling_bytes == 4096
        assert not Session(cache).wait(hold, timeout_seconds=0)
        fetcher.deliver(URLS[0])
        assert Session(cache).wait(hold, timeout_seconds=0)
        assert fetcher.pending == []
        assert cache.path_of(hold.refs[0]).read_bytes() == b"data"
        Session(cache).release(hold)
    check_invariants(tmp_path, at_rest=True)
