"""Files that a lock keeps: who looks at one leaves neither a descriptor nor a lock behind."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire import checksums
from sqlstream.cache.files import locked_files
from sqlstream.cache.ledger.database import Database
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheDiskError
from sqlstream.process import locks
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session
from tests.handlers import HandlerError, Injector, fail, handler
from tests.processes import open_files

LOOKS: dict[str, Callable[[str], object]] = {
    "is_locked": locked_files.is_locked,
    "is_read": locked_files.is_read,
    "unlink_unlocked": locked_files.unlink_unlocked,
    "unlink_unread": lambda path: locked_files.unlink_unread(path, is_ours=False),
}


def interrupt_everywhere(look: Callable[[], object], check: Callable[[], object]) -> None:
    """Interrupt `look` at each of its places by a handler that raises, and `check` after each time."""
    with handler(fail):
        for nth in itertools.count(1):
            with contextlib.suppress(HandlerError), Injector(nth) as injector:
                look()
            check()
            if injector.num_places < nth:
                assert nth > 10
                return


@pytest.mark.parametrize("name", LOOKS)
def test_a_handler_that_raises_at_any_place_leaves_no_file_open(tmp_path: Path, name: str) -> None:
    path = tmp_path / "part"

    def look() -> None:
        path.touch()
        LOOKS[name](str(path))

    def check() -> None:
        assert open_files(tmp_path) == []

    interrupt_everywhere(look, check)


def test_a_handler_that_raises_as_a_checksum_is_read_leaves_no_file_open(tmp_path: Path) -> None:
    ref = ObjectRef.of("s3://bucket/object")
    with Cache(tmp_path / "dst", limit="10mb") as cache:
        cache.fetcher = ScriptedFetcher({ref.url: b"bytes"})
        with cache.pinned(ref.url):
            pass
        Session(cache).flush()
        (known,) = checksums.find(Session(cache).ledger, [ref.key])
        opened = open_files(tmp_path)

        def check() -> None:
            assert open_files(tmp_path) == opened

        interrupt_everywhere(lambda: checksums.read_crc32(Session(cache).disk, known), check)


def no_more_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the kernel refuse every lock, as it does when it has no room for more."""

    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(locks, "fcntl", SimpleNamespace(**{**vars(fcntl), "flock": flock}))


def test_a_file_that_cannot_be_locked_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_more_locks(monkeypatch)
    with pytest.raises(OSError, match="No locks available"):
        locked_files.create_locked(str(tmp_path / "new"))
    with pytest.raises(OSError, match="No locks available"):
        locks.open_shared(tmp_path / "new")
    assert open_files(tmp_path) == []


def test_a_ledger_whose_lock_cannot_be_had_closes_with_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(tmp_path / "ledger.sqlite")
    database.read("SELECT 1")
    no_more_locks(monkeypatch)
    with pytest.raises(CacheDiskError, match="No locks available"):
        database.close()
    monkeypatch.undo()
    assert not [path for path in open_files(tmp_path) if path.endswith("lock")]
    assert database.read("SELECT 1") == [(1,)]
    database.close()
