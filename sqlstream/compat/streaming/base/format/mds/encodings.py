"""What users import from `streaming.base.format.mds.encodings`: `Encoding`, and `_encodings` to which they add their own.

    >>> class Complex(Encoding):
    ...     size = 16
    ...     def encode(self, obj: complex) -> bytes:
    ...         return struct.pack("<2d", obj.real, obj.imag)
    ...     def decode(self, data: bytes) -> complex:
    ...         return complex(*struct.unpack("<2d", data))
    >>> import struct
    >>> _encodings["complex"] = Complex
    >>> mds_decode("complex", mds_encode("complex", 1 + 2j))
    (1+2j)

As there, a process that reads or writes such columns adds the encoding itself: at the top of a module, so that spawned workers
do. MosaicML's own names cannot be given to others: their shards would mean something else in another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

from sqlstream.errors import ConfigError
from sqlstream.storage.members.mds.coders import ADDED, ValueCoder
from sqlstream.storage.members.mds.decoder import ENCODINGS, decoder_of
from sqlstream.write.formats.mds_encoder import encoder_of

__all__ = [
    "Encoding",
    "get_mds_encoded_size",
    "get_mds_encodings",
    "is_mds_encoding",
    "is_mds_encoding_safe",
    "mds_decode",
    "mds_encode",
]


class Encoding(ABC):
    """Encodes and decodes values of one type; subclasses are encodings of one's own."""

    size: int | None = None
    """Bytes of each value; None: they differ."""

    @abstractmethod
    def encode(self, obj: Any) -> bytes:
        """Return the bytes of a value."""

    @abstractmethod
    def decode(self, data: bytes) -> Any:
        """Return the value of some bytes."""

    @staticmethod
    def _validate(data: Any, expected_type: Any) -> None:
        """Raise AttributeError, as theirs does, if a value is of another type."""
        if not isinstance(data, expected_type):
            raise AttributeError(  # noqa: TRY004 - theirs
                f"the value should be of the type {expected_type}, and is of {type(data)}"
            )


class _Known(Encoding):
    """An encoding of MosaicML's.

    Args:
        encoding: Its name, with what follows a colon.
    """

    def __init__(self, encoding: str) -> None:
        self._encode, self.size = encoder_of("value", encoding)
        self._decode = decoder_of(encoding, True)

    def encode(self, obj: Any) -> bytes:
        return self._encode(obj)

    def decode(self, data: bytes) -> Any:
        return self._decode(data)


class _Encodings(MutableMapping[str, Any]):
    """Classes of encodings by name: those of MosaicML's, which stay, and added ones."""

    def __getitem__(self, name: str) -> Any:
        return ADDED[name] if name in ADDED else partial(_Known, name) if name in ENCODINGS else _missing(name)

    def __setitem__(self, name: str, made: Any) -> None:
        if name in ENCODINGS:
            raise ConfigError(f"_encodings[{name!r}] is an encoding that each reader knows: give yours a name of its own")
        if not name or ":" in name or not callable(made) or not hasattr(made, "encode") or not hasattr(made, "decode"):
            raise ConfigError(f"_encodings[{name!r}] = {made!r}: give a name without a colon, and a subclass of Encoding")
        ADDED.add(name, made)

    def __delitem__(self, name: str) -> None:
        if name not in ADDED:
            _missing(name)
        ADDED.remove(name)

    def __iter__(self) -> Iterator[str]:
        return iter((*sorted(ENCODINGS), *ADDED.names()))

    def __len__(self) -> int:
        return len(ENCODINGS) + len(ADDED.names())


def _missing(name: str) -> Any:
    raise KeyError(name)


_encodings = _Encodings()


def get_mds_encodings() -> set[str]:
    """Return the names of all encodings."""
    return set(_encodings)


def is_mds_encoding(encoding: str) -> bool:
    """Return whether an encoding is known here."""
    try:
        _coder(encoding)
    except ConfigError:
        return False
    return True


def is_mds_encoding_safe(encoding: str) -> bool:
    """Return whether reading an encoding runs no code that the data names."""
    return encoding != "pkl"


def mds_encode(encoding: str, obj: Any) -> bytes:
    """Return the bytes of a value; bytes are stored as they are.

    Raises:
        ConfigError: The encoding is unknown.
    """
    return obj if isinstance(obj, bytes) else _coder(encoding).encode(obj)


def mds_decode(encoding: str, data: bytes) -> Any:
    """Return the value of some bytes.

    Raises:
        ConfigError: The encoding is unknown.
    """
    return _coder(encoding).decode(data)


def get_mds_encoded_size(encoding: str) -> int | None:
    """Return the bytes of each value of an encoding; None: they differ.

    Raises:
        ConfigError: The encoding is unknown.
    """
    return _coder(encoding).size


def _coder(encoding: str) -> ValueCoder:
    found = ADDED.coder_of(encoding)
    return _Known(encoding) if found is None else found
