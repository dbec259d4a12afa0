"""A cache whose objects are all here, and ways to read them: what the tests of read holds share."""

from __future__ import annotations

import os
from pathlib import Path

from sqlstream.cache import Cache
from sqlstream.cache.acquire.room import evict
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.session import AnyHold
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.kit import descriptors
from tests.cache.session import Session

NUM_OBJECTS = 64
OBJECTS = {f"http://nowhere/o/{i}.bin": bytes([i]) * (100 + i) for i in range(NUM_OBJECTS)}
URLS = list(OBJECTS)
REFS = [ObjectRef.of(url) for url in URLS]
FAR_LIMIT = 4 * 4096 * NUM_OBJECTS


def opened(directory: Path, limit: int | None = FAR_LIMIT) -> Cache:
    cache = Cache(directory, limit=limit)
    cache.fetcher = ScriptedFetcher(OBJECTS)
    return cache


def read_all(cache: Cache) -> None:
    session = Session(cache)
    for hold in session.acquire([[ref] for ref in REFS]):
        assert session.claim(hold)
        session.release(hold)
    session.flush()


def read_hold(cache: Cache, *refs: ObjectRef) -> ReadHold:
    """A read hold on one sample, claimed."""
    hold = Session(cache).acquire_one(refs, for_reading=True)
    assert isinstance(hold, ReadHold)
    assert Session(cache).wait(hold)
    assert Session(cache).claim(hold)
    return hold


def sample(cache: Cache, ref: ObjectRef) -> bytes:
    """The bytes of an object, read as the engine does: by read locks, and if that fails by rows."""
    session = Session(cache)
    for for_reading in (True, False, False):  # a file that was changed makes the second one void
        hold = session.acquire_one([ref], for_reading=for_reading)
        session.wait(hold)
        if session.claim(hold):
            data = cache.path_of(ref, hold).read_bytes()
            session.release(hold)
            return data
        session.release(hold)
    raise AssertionError("a hold by rows is whole when no other process is there")


def evict_all(cache: Cache) -> int:
    """Evict whatever may go, 32 files a transaction; return how many went."""
    num_evicted = cache.statistics().evictions
    while Session(cache).owner.run(lambda tx: evict(tx, Session(cache).disk, 1 << 40)).num_files:
        pass
    return cache.statistics().evictions - num_evicted


def read_open(hold: AnyHold, ref: ObjectRef) -> bytes:
    """What an object holds, read where its hold has it open."""
    assert isinstance(hold, ReadHold)
    file = hold.open_files[hold.paths[list(hold.refs).index(ref)]]
    return os.pread(descriptors(file)[0], file.size_bytes + 1, 0)


def path_of(cache: Cache, ref: ObjectRef) -> Path:
    return Path(Session(cache).disk.data_path(ref.key, ref.ext))
