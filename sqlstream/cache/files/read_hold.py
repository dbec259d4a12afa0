"""A hold that is no row: locks of the kernel on files that were all here when their sample was planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from sqlstream.cache.files import read_locks
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.cache.model.rows import ReadyRow

_NO_FILES: Mapping[str, tuple[int, int]] = MappingProxyType({})


class ReadLockPool:
    """What all read holds on a cache directory share.

    Args:
        data: The cache's folder of files.
        was_missed: Called with the number of a hold's objects when not all of them are as the ledger says.
    """

    def __init__(self, data: str, was_missed: Callable[[int], None]) -> None:
        self.data = data
        self.was_missed = was_missed
        self.unused: list[read_locks.ReadLocks] = []
        """Locks without a user, none of them on a file: the next claim takes them."""


class ReadHold:
    """Objects of one sample that were all here when it was planned; claimed, it keeps them there by locks on their files.

    A read hold has no row in the ledger; the shared lock on the file keeps it from eviction. It has those attributes of a
    `Hold` that waiting and reading need.

    Args:
        refs: Its objects.
        ready: What the ledger says of each, by key, and maybe of others.
        pool: Where the files are, and locks to take.
    """

    __slots__ = ("_locks", "_pool", "_ready", "paths", "refs")

    is_read_hold: ClassVar[bool] = True
    is_settled: ClassVar[bool] = True
    is_released: ClassVar[bool] = False
    outstanding: ClassVar[frozenset[bytes]] = frozenset()
    error: ClassVar[Exception | None] = None
    files: ClassVar[None] = None

    def __init__(self, refs: Sequence[ObjectRef], ready: Mapping[bytes, ReadyRow], pool: ReadLockPool) -> None:
        self.refs = refs
        self.paths: list[str] = []
        """Where its objects are, in their order, from the claim to the release."""
        self._ready = ready
        self._pool = pool
        self._locks: read_locks.ReadLocks | None = None

    @property
    def charges(self) -> dict[bytes, int]:
        """What each of its objects counts on disk."""
        return {ref.key: self._ready[ref.key][2] for ref in self.refs}

    @property
    def open_files(self) -> Mapping[str, tuple[int, int]]:
        """Descriptor and size by path, from the claim to the release: a reader of the object need not open it again."""
        return _NO_FILES if self._locks is None else self._locks.files

    def claim(self) -> bool:
        """Lock the files; False, with none of them locked, when one is not what its row says, or cannot be locked.

        Its sample must then be acquired again, by rows.
        """
        ready, pool = self._ready, self._pool
        try:
            held = self._locks = pool.unused.pop()
        except IndexError:
            held = self._locks = read_locks.ReadLocks()
        data, files = pool.data, held.files
        paths = self.paths = []
        for ref in self.refs:
            key, size_bytes, _, ext = ready[ref.key]
            name = key.hex()
            path = f"{data}/{name[:2]}/{name}{ext}"
            paths.append(path)
            # Two columns may name one object. False: it is gone or on its way out, or there are too few descriptors: the
            # ledger will tell.
            if path not in files and not held.add(path, size_bytes):
                self.close()
                pool.was_missed(len(self.charges))
                return False
        return True

    def close(self) -> None:
        """Give the locks back; safe to call twice, and in a forked child, whose copies are closed already."""
        held = self._locks
        if held is not None:
            held.close()
            self._locks = None
            self._pool.unused.append(held)  # last: a Ctrl-C before it loses them, one after it must not give them twice
