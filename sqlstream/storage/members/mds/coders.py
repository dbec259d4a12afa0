"""Encodings of MDS that a user has added, in this process: what encodes and decodes them, by name.

A shard names its encodings and nothing more. So each process that reads or writes a column of an added one must add it itself:
a forked worker has what its parent had, a spawned one runs the user's module again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class ValueCoder(Protocol):
    """Encodes and decodes the values of a column."""

    size: int | None
    """Bytes of each value; None: they differ."""

    def encode(self, obj: Any) -> bytes:
        """Return the bytes of a value."""

    def decode(self, data: bytes) -> Any:
        """Return the value of some bytes."""


class AddedEncodings:
    """Encodings by name, which makes a coder when it is called; `name:config` is `from_str(config)` of it.

    Example:
        >>> ADDED["mine"] if "mine" in ADDED else ADDED.coder_of("mine") is None
        True
    """

    def __init__(self) -> None:
        self._makers: dict[str, Callable[[], ValueCoder]] = {}
        self._coders: dict[str, ValueCoder] = {}

    def __contains__(self, name: object) -> bool:
        """Return whether an encoding was added."""
        return name in self._makers

    def __getitem__(self, name: str) -> Callable[[], ValueCoder]:
        """Return what makes coders of an encoding."""
        return self._makers[name]

    def names(self) -> list[str]:
        """Return the names of all."""
        return list(self._makers)

    def add(self, name: str, maker: Callable[[], ValueCoder]) -> None:
        """Add an encoding, or replace an added one, also for datasets that are open."""
        self._makers[name] = maker
        self._coders = {}

    def remove(self, name: str) -> None:
        """Remove an encoding."""
        del self._makers[name]
        self._coders = {}

    def coder_of(self, encoding: str) -> ValueCoder | None:
        """Return what encodes and decodes values of an encoding; None: it was not added."""
        found = self._coders.get(encoding)
        if found is None:
            name, colon, config = encoding.partition(":")
            maker: Any = self._makers.get(name)
            if maker is None:
                return None
            self._coders[encoding] = found = maker.from_str(config) if colon else maker()
        return found


ADDED = AddedEncodings()
"""Those of this process."""
