"""Interleavings that break naive versions of the protocol; docs/reliability.md lists all of them, with the tests elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import sqlstream
from sqlstream.cache import Cache
from sqlstream.cache.acquire.outcomes import FIRST_GUESS_BYTES, GUESS_MARGIN
from sqlstream.cache.model.refs import ObjectRef, charged_bytes, object_key
from sqlstream.cache.recovery import recover
from sqlstream.errors import CacheError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.actors import (
    WAIT_SECONDS,
    Stage,
    begin_and_wait,
    body,
    is_right,
    objects,
    pin_until_told,
    say,
    wait_for_helpers,
)
from tests.cache.kit import num_gets, wait_for_download
from tests.cache.session import Session


def lead_with_a_shadow(connection: Connection, directory: Path, url: str) -> None:
    """Begin a download, and fork as C code does, without hooks: the child keeps the part open, as a helper does."""
    cache = Cache(directory, limit=1 << 20)
    Session(cache).acquire_one([ObjectRef.of(url)])
    shadow = ctypes.PyDLL(None).fork()
    if shadow == 0:
        while True:
            signal.pause()
    say(connection, shadow)
    connection.recv()


def test_hole_1_a_part_that_anybody_still_has_open_is_neither_reaped_nor_taken_over(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    """A helper that outlives its leader for a moment may still write: the lock is free only when both are gone."""
    server.objects.update(objects([400_000]))
    url = f"{server.url}/o/0.bin"
    server.script("/o/0.bin", FaultyAnswer(fault=Fault.STALL, after_bytes=50_000, seconds=300))
    leader = stage.start(lead_with_a_shadow, directory, url)
    shadow = leader.hear()
    wait_for_download(server, directory, "/o/0.bin")
    leader.kill_outside_the_write_lock(directory)
    try:
        with Cache(directory, limit=1 << 20) as cache:
            hold = Session(cache).acquire_one([ObjectRef.of(url)])
            assert not Session(cache).wait(hold, timeout_seconds=0.3)
            assert cache.verify(repair=True) == []
            assert cache.clear().kept_filling_entries == 1
            check_invariants(directory)
            assert num_gets(server) == 1
            os.kill(shadow, signal.SIGKILL)
            assert Session(cache).wait(hold, timeout_seconds=WAIT_SECONDS)
            Session(cache).release(hold)
            with cache.pinned(url) as path:  # the download is ours now
                assert path.read_bytes() == body("/o/0.bin", 400_000)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(shadow, signal.SIGKILL)
    assert num_gets(server) == 2
    check_invariants(directory, at_rest=True)


def read_both(_connection: Connection, directory: Path, urls: list[str], num_rounds: int) -> int:
    """Acquire two objects together, again and again; whoever misses one leads it."""
    num_right = 0
    with Cache(directory, limit=1 << 20) as cache:
        for _round in range(num_rounds):
            paths = cache.acquire_many(urls)
            num_right += sum(is_right(path, url) for path, url in zip(paths, urls, strict=True))
            cache.release_many(urls)
            cache.clear()
    return num_right


def test_hole_5_leaders_that_wait_for_each_other_finish_their_own_first(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    server.objects.update(objects([20_000, 20_000]))
    for i in range(2):
        server.script(f"/o/{i}.bin", always=FaultyAnswer(fault=Fault.DRIP, seconds=0.001))
    urls = [f"{server.url}/o/{i}.bin" for i in range(2)]
    assert stage.run_all(read_both, [(directory, urls, 15), (directory, urls[::-1], 15)]) == [30, 30]
    check_invariants(directory, at_rest=True)


def test_hole_8_an_owner_that_was_taken_for_dead_registers_anew_with_its_pins(
    server: FaultyHttpServer, directory: Path
) -> None:
    """Its file and row are gone, as after a reaper's mistake or an `rm` in owners/."""
    server.objects.update(objects([5000] * 3))
    urls = [f"{server.url}/o/{i}.bin" for i in range(3)]
    with Cache(directory, limit=1 << 20) as cache:
        cache.acquire_many(urls[:2])
        owner = Session(cache).owner.id
        assert owner is not None
        with Session(cache).transaction() as tx:
            Session(cache).disk.owners.remove(owner)
            tx.remove_owners([owner])
        cache.acquire_many(urls[2:])
        stats = cache.statistics()
        assert (stats.pinned_entries, len(stats.owners)) == (3, 1)
        assert cache.clear().kept_pinned_entries == 3
        cache.release_many(urls)
    check_invariants(directory, at_rest=True)


def test_hole_10_a_changed_file_that_another_process_reads_is_not_taken_from_it(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    server.objects.update(objects([5000]))
    url = f"{server.url}/o/0.bin"
    holder = stage.start(pin_until_told, directory, 1 << 20, [url])
    (path,) = holder.hear()
    with Cache(directory, limit=1 << 20) as cache:
        while Session(cache).ledger.account().filling_bytes:
            time.sleep(0.01)  # its row is written a little later than its file
        os.truncate(path, 100)
        with pytest.raises(CacheError, match=rf"{url} has 100 bytes instead of 5000, and another process reads it"):
            cache.acquire_many([url])
        assert Path(path).exists()
        holder.kill()
        with cache.pinned(url) as mended:
            assert mended.read_bytes() == body("/o/0.bin", 5000)
    check_invariants(directory, at_rest=True)


def test_hole_10_no_statement_replaces_a_row_for_that_fires_no_delete_trigger() -> None:
    package = Path(sqlstream.__file__).parent
    for path in [*package.rglob("*.py"), *(package.parent / "migrations").rglob("*.py")]:
        if "testing" not in path.parts:
            assert not re.search(r"['\"(]\s*(INSERT OR )?REPLACE INTO", path.read_text()), path


def test_hole_12_the_dead_give_back_before_the_living_lose_anything(
    server: FaultyHttpServer, directory: Path, stage: Stage
) -> None:
    """Room is looked for among what the dead had reserved, then among what nobody uses."""
    server.objects.update(objects([20_000] * 4))
    urls = [f"{server.url}/o/{i}.bin" for i in range(4)]
    server.script("/o/3.bin", FaultyAnswer(fault=Fault.STALL, after_bytes=100, seconds=300))
    limit = 2 * 20_480 + charged_bytes(int(FIRST_GUESS_BYTES * GUESS_MARGIN))  # full with two objects and the guess at a third
    with Cache(directory, limit=limit) as cache:
        for url in urls[:2]:
            with cache.pinned(url):
                pass
        cache.statistics()
        dead = stage.start(begin_and_wait, directory, limit, urls[3])
        assert dead.hear() == "asking"
        wait_for_download(server, directory, "/o/3.bin")
        dead.kill()
        wait_for_helpers(directory)
        assert Session(cache).ledger.account().filling_bytes > 0  # no process has reaped it
        hold = cache.hold([ObjectRef.of(urls[2], size_bytes=20_000)])
        Session(cache).release(hold)
        assert cache.statistics().evictions == 0
    check_invariants(directory, at_rest=True)


@pytest.mark.parametrize(
    "signed",
    [
        "http://host/a.bin?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=1&X-Amz-Date=2&X-Amz-Expires=3"
        "&X-Amz-SignedHeaders=host&X-Amz-Signature=4",
        "http://host/a.bin?sv=2024-11-04&sr=b&sp=r&se=2026-01-01&sig=abcdefgh%3D",
        "http://host/a.bin?GoogleAccessId=1&Expires=2&Signature=3",
    ],
)
def test_hole_14_a_signature_makes_no_other_object_and_a_version_does(signed: str) -> None:
    plain = object_key("http://host/a.bin")
    assert object_key(signed) == plain
    assert object_key("http://host/a.bin?page=1") != plain
    assert object_key("http://host/a.bin", "etag 1") != object_key("http://host/a.bin", "etag 2") != plain


def test_hole_14_two_versions_of_one_object_live_side_by_side(server: FaultyHttpServer, directory: Path) -> None:
    server.objects.update(objects([1000]))
    url = f"{server.url}/o/0.bin"
    with Cache(directory, limit=1 << 20) as cache:
        with cache.pinned(url):
            etag = recover_etag(cache, url)
            old = ObjectRef.of(url, etag=etag)
            hold = cache.hold([old])
            assert cache.path_of(old) != cache.path_of(ObjectRef.of(url))
            assert cache.path_of(old).read_bytes() == body("/o/0.bin", 1000)
            Session(cache).release(hold)
        assert recover.verify(Session(cache).ledger, Session(cache).disk, repair=False) == []
    check_invariants(directory, at_rest=True)


def recover_etag(cache: Cache, url: str) -> str:
    """The version that the server named."""
    Session(cache).owner.flush()
    ((etag,),) = Session(cache).read("SELECT etag FROM entry WHERE key = ?", (object_key(url),))
    return str(etag)
