"""The helper clients of this process: one for each server and identity, shared by all who read with it."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from sqlstream.config import StorageOptions
from sqlstream.environment import child_environment
from sqlstream.process import fork, interrupts, locks
from sqlstream.storage.client.client import HelperClient
from sqlstream.storage.protocol.messages import HelperTiming

_OF_USERS = frozenset("credential_hosts verify_etag connect_timeout read_timeout timeout".split())
"""Keys of `storage_options` that choose no server and no identity: they go with each request, or are judged before it."""
_PLAIN = frozenset((str, bytes, int, float, bool, type(None), type(Path()), type(PurePath())))


class _Same:
    """Compares by identity: two file systems that look alike may hold different credentials."""

    def __init__(self, thing: object) -> None:
        self._thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._thing is self._thing

    def __hash__(self) -> int:
        return id(self._thing)


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperKey:
    """What a helper may be shared by: whoever has an equal one reads from the same servers as the same identity."""

    options: Hashable = field(repr=False)
    """`storage_options` that choose a server or an identity."""
    providers: Hashable
    is_signed: bool
    environment: frozenset[tuple[str, str]] = field(repr=False)
    """Environment of the process as they began, and of each helper: it may hold endpoints and credentials of any client."""
    timing: HelperTiming


class Helpers:
    """Gives out the clients; a client lives as long as someone reads with it, or its helper runs."""

    def __init__(self) -> None:
        self._lock = locks.StateLock()
        self._clients: weakref.WeakValueDictionary[HelperKey, HelperClient] = weakref.WeakValueDictionary()
        fork.enclose(self, fork.Stage.IDLE)

    def client(self, options: StorageOptions, timing: HelperTiming) -> HelperClient:
        """Return the client for these options, made on first use."""
        locks.occupy_standard_descriptors()
        given = {key: value for key, value in options.storage_options.items() if key not in _OF_USERS}
        environment = child_environment()
        key = HelperKey(
            options=_frozen(given),
            providers=_frozen(options.providers),
            is_signed=options.is_signed,
            environment=frozenset(environment.items()),
            timing=timing,
        )
        with self._lock:
            if (client := self._clients.get(key)) is None:
                server = StorageOptions(storage_options=given, is_signed=options.is_signed, providers=options.providers)
                client = self._clients[key] = HelperClient(server, timing, environment)
            return client

    def before_fork(self) -> None:
        """End the helpers that owe no answer, and their threads: a process that forks should have few, and workers have theirs.

        A thread that forks while it holds the guard keeps them: their threads want it. None of the threads that are joined is
        in a sink, which may wait for other processes.
        """
        if fork.is_guarded() or interrupts.uninterrupted().depth > 1:  # 1: of the fork itself
            return
        for thread in [thread for client in list(self._clients.values()) for thread in client.end_idle()]:
            interrupts.join(thread)

    def after_fork(self, *, is_child: bool) -> None:
        """Parent and child start helpers when they ask something."""


HELPERS = Helpers()
"""Those of this process."""


def _frozen(value: object) -> Hashable:
    """Return what is equal for equal options only, types included."""
    if isinstance(value, Mapping):
        return frozenset((_frozen(key), _frozen(inner)) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return (type(value), tuple(_frozen(inner) for inner in value))
    return (type(value), value) if type(value) in _PLAIN else _Same(value)
