"""Files of records, one map behind another without any table: MessagePack or CBOR. Where each is, and what it holds.

Records are found by reading the file once from its start. One that ends early, and anything that is no map, is an error with
its number and offset: behind it nothing can be found.

The packages `msgpack` and `cbor2` read them: the extra `shards`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from functools import partial
from io import BytesIO
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from sqlstream.errors import DamagedShardError, DecodeError, MissingDependencyError

MAX_RECORD_BYTES = 1 << 30
"""Largest record; a damaged length may promise any number of bytes, which would be waited for in memory."""
_STEP_BYTES = 1 << 20  # arbitrary: what is looked through at a time
_MESSAGE_PACK_MAPS = frozenset((*range(0x80, 0x90), 0xDE, 0xDF))
_CBOR_MAPS = frozenset(range(0xA0, 0xE0))
"""First bytes of maps, and of tags, which may stand before them."""


class RecordFormat(StrEnum):
    """How records are written."""

    MSGPACK = "msgpack"
    CBOR = "cbor"


EXTENSIONS: Mapping[str, RecordFormat] = MappingProxyType(
    {
        ".msgpack": RecordFormat.MSGPACK,
        ".mp": RecordFormat.MSGPACK,
        ".msg": RecordFormat.MSGPACK,
        ".mpk": RecordFormat.MSGPACK,
        ".cbor": RecordFormat.CBOR,
    }
)
"""Formats by the extensions of files."""


class RecordPlace(NamedTuple):
    """Where a record is in its file."""

    offset: int
    length: int


def record_places(
    data: bytes | memoryview | Iterable[bytes],
    layout: RecordFormat,
    name: str,
    *,
    max_record_bytes: int = MAX_RECORD_BYTES,
) -> Iterator[RecordPlace]:
    """Yield the place of each record; together they are the whole file.

    Args:
        data: The file, or its chunks in order, which are dropped when they were looked through.
        layout: How it is written.
        name: The file's name in messages.
        max_record_bytes: Largest record.

    Raises:
        DamagedShardError: A record is damaged, cut off, too large, or no map.
        MissingDependencyError: The package that reads them is not installed.
    """
    is_message_pack = layout is RecordFormat.MSGPACK
    skipper = partial(_MessagePackSkipper if is_message_pack else _CborSkipper, _package(layout))
    chunks = _steps((data,) if isinstance(data, bytes | memoryview) else data)
    return _places(skipper, _MESSAGE_PACK_MAPS if is_message_pack else _CBOR_MAPS, chunks, name, max_record_bytes)


class RecordDecoder:
    """Decodes records.

    Args:
        layout: How they are written.

    Example:
        >>> RecordDecoder(RecordFormat.MSGPACK).decode(bytes.fromhex("82 a161 01 a162 c0"), ["a"])
        {'a': 1}
    """

    def __init__(self, layout: RecordFormat) -> None:
        self.layout = layout
        """How records are written."""

    def decode(self, data: bytes | memoryview, wanted: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of a record by name.

        Args:
            data: The record.
            wanted: Names of values, in this order; None: all.

        Raises:
            DecodeError: It is damaged, no map of names, or lacks one that is wanted.
            MissingDependencyError: The package that reads it is not installed.
        """
        package = _package(self.layout)
        try:
            is_message_pack = self.layout is RecordFormat.MSGPACK
            record = package.unpackb(data, strict_map_key=False) if is_message_pack else package.loads(data)
        except Exception as error:
            raise DecodeError(f"{len(data)} bytes are no record of {self.layout}: {type(error).__name__}: {error}") from error
        if not isinstance(record, dict) or not all(isinstance(key, str) for key in record):
            raise DecodeError(f"a record of {self.layout} is no map of names to values but {type(record).__name__}")
        if wanted is None:
            return record
        for key in wanted:
            if key not in record:
                raise DecodeError(f"there is no value {key!r}: the record has {', '.join(record)}")
        return {key: record[key] for key in wanted}


def _package(layout: RecordFormat) -> Any:
    module = "msgpack" if layout is RecordFormat.MSGPACK else "cbor2"
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"{module} is needed to read records and does not import ({error}): pip install 'sqlstream-data[shards]'"
        ) from error


def _steps(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        view = memoryview(chunk)
        for start in range(0, len(view), _STEP_BYTES):
            yield view[start : start + _STEP_BYTES]


class _Skipper(Protocol):
    """Goes from record to record of some bytes."""

    too_short: type[Exception]
    """Raised by `skip` where a record does not end within the bytes."""

    def skip(self) -> int:
        """Return where the next record ends."""


class _MessagePackSkipper:
    def __init__(self, package: Any, data: bytes) -> None:
        self.too_short = package.OutOfData
        self._unpacker = package.Unpacker(max_buffer_size=0)  # 0: all that fits
        self._unpacker.feed(data)

    def skip(self) -> int:
        self._unpacker.skip()
        stop: int = self._unpacker.tell()
        return stop


class _CborSkipper:
    def __init__(self, package: Any, data: bytes) -> None:
        self.too_short = package.CBORDecodeEOF
        self._stream = BytesIO(data)
        self._decoder = package.CBORDecoder(self._stream)

    def skip(self) -> int:
        self._decoder.decode()
        return self._stream.tell()


def _places(
    skipper: Callable[[bytes], _Skipper], maps: frozenset[int], chunks: Iterator[memoryview], name: str, max_bytes: int
) -> Iterator[RecordPlace]:
    number = start = wanted = 0
    rest = b""
    for chunk in chain(chunks, [memoryview(b"")]):  # the empty one: what is left is tried, however short
        rest += chunk
        if len(rest) < wanted and chunk:
            continue
        records, at = skipper(rest), 0
        while at < len(rest):
            if rest[at] not in maps:
                raise DamagedShardError(f"{_at(name, number, start)} is no map: it begins with {rest[at]:#04x}")
            try:
                stop = records.skip()
            except records.too_short:
                break
            except Exception as error:
                raise DamagedShardError(f"{_at(name, number, start)} is damaged: {type(error).__name__}: {error}") from error
            yield RecordPlace(start, stop - at)
            number, start, at = number + 1, start + stop - at, stop
        rest = rest[at:]
        wanted = 2 * len(rest)  # a long record that is tried at each of its n chunks would be read n² times
        if len(rest) > max_bytes:
            raise DamagedShardError(f"{_at(name, number, start)} is damaged, or larger than {max_bytes} bytes")
    if rest:
        raise DamagedShardError(f"{_at(name, number, start)} is cut off: the file ends at byte {start + len(rest)}")


def _at(name: str, number: int, offset: int) -> str:
    return f"{name}: record {number} at byte {offset}"
