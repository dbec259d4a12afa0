"""Files that a lock keeps: who looks at one leaves neither a descriptor nor a lock behind."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.acquire import checksums
from sqlstream.cache.files import locked_files
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.test_cache import open_files
from tests.cache.test_signals import HandlerError, Injector, fail, handler

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
        cache.store.acquirer.flush()
        (known,) = checksums.find(cache.store.ledger, [ref.key])
        opened = open_files(tmp_path)

        def check() -> None:
            assert open_files(tmp_path) == opened

        interrupt_everywhere(lambda: checksums.read_crc32(cache.store.disk, known), check)
