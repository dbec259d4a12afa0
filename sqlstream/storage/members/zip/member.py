"""Members of ZIP archives, and their content."""

from __future__ import annotations

import bz2
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import NamedTuple

from sqlstream.errors import DamagedShardError

_LOCAL = struct.Struct("<6x2H16x2H")
"""Flags, method, bytes of name and extra fields: the rest of a local header may be empty."""
_FIELD = struct.Struct("<2H")
LOCAL_BYTES = 30
"""Of a local header, without name and extra fields."""
_UTF8 = 0x800
"""Flag: the name is UTF-8."""
_UNICODE_PATH = 0x7075


class ZipMethod(IntEnum):
    """How a member is compressed."""

    STORED = 0
    DEFLATED = 8
    BZIP2 = 12
    LZMA = 14
    ZSTD = 93


class ZipMember(NamedTuple):
    """A file in an archive."""

    name: str
    """As in the directory: data, never a path."""
    start: int
    """Offset of its local header, bytes before the archive included."""
    stop: int
    """Offset that its record does not pass: local header, stored bytes, and sizes behind them if there are any."""
    method: int
    """A value of `ZipMethod`."""
    stored_size: int
    """Bytes as stored."""
    size: int
    """Bytes of its content."""
    crc: int
    """CRC-32 of its content."""


def content(record: bytes | memoryview, member: ZipMember, name: str) -> bytes:
    """Return the content of a member.

    Args:
        record: The bytes of the archive from `member.start` up to `member.stop`.
        member: As in the directory, whose sizes and CRC-32 hold; those in the local header may be missing.
        name: The URL of the archive for messages, without credentials.

    Raises:
        DamagedShardError: The record is not that of the member, or damaged. No more than `member.size` + 1 bytes are made.
    """
    data = memoryview(record)
    if (header := local_header(data)) is None:
        raise _bad_record(name, member, f"there is no local header but {bytes(data[:4])!r}")
    if header.name != member.name or header.method != member.method:
        raise _bad_record(name, member, f"its local header is that of {header.name[:200]!r}, {method_name(header.method)}")
    start = header.num_bytes
    stored = data[start : start + member.stored_size]
    if len(stored) != member.stored_size:
        raise _bad_record(name, member, f"its record has {len(stored)} of {member.stored_size} stored bytes")
    try:
        found = UNPACK[ZipMethod(member.method)](stored, member.size)
    except UNPACK_ERRORS as error:
        raise _bad_record(name, member, f"it is no {method_name(member.method)} content: {error}") from error
    if len(found) != member.size:
        more = "more" if len(found) > member.size else len(found)
        raise _bad_record(name, member, f"it has {more} bytes, the directory says {member.size}")
    if (crc := zlib.crc32(found)) != member.crc:
        raise _bad_record(name, member, f"its CRC-32 is {crc:08x}, the directory says {member.crc:08x}")
    return found


class LocalHeader(NamedTuple):
    """What stands before the stored bytes of a member."""

    name: str
    method: int
    num_bytes: int
    """Bytes of it, name and extra fields included."""


def local_header(record: bytes | bytearray | memoryview) -> LocalHeader | None:
    """Return the local header at the start of a record; None: there is none, or not all of it."""
    data = memoryview(record)
    if len(data) < LOCAL_BYTES or bytes(data[:4]) != b"PK\3\4":
        return None
    flags, method, name_bytes, extra_bytes = _LOCAL.unpack_from(data)
    name_stop = LOCAL_BYTES + name_bytes
    stop = name_stop + extra_bytes
    if len(data) < stop:
        return None
    return LocalHeader(decoded_name(bytes(data[LOCAL_BYTES:name_stop]), flags, bytes(data[name_stop:stop])), method, stop)


def local_name(record: bytes | memoryview) -> str:
    """Return the name in the local header of a record; empty where there is none."""
    header = local_header(record)
    return "" if header is None else header.name


def decoded_name(raw: bytes, flags: int, extra: bytes) -> str:
    """Return the name of a member: as its flag and extra field 0x7075 say, else UTF-8 where it is that, or code page 437.

    Without the flag `zipfile` reads UTF-8 as code page 437 (`├╝`); bytes that are both are nearly always UTF-8, from macOS.
    """
    if flags & _UTF8:
        return raw.decode(errors="backslashreplace")
    for kind, data in extra_fields(extra):
        if kind == _UNICODE_PATH and data[:5] == b"\1" + zlib.crc32(raw).to_bytes(4, "little"):
            return data[5:].decode(errors="backslashreplace")
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw.decode("cp437")


def extra_fields(extra: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the extra fields of a header: kind and data."""
    at = 0
    while at + _FIELD.size <= len(extra):
        kind, num_bytes = _FIELD.unpack_from(extra, at)
        yield kind, extra[at + _FIELD.size :][:num_bytes]
        at += _FIELD.size + num_bytes


def _inflated(stored: memoryview, size: int) -> bytes:
    return zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, size + 1)


def _from_bzip2(stored: memoryview, size: int) -> bytes:
    return bz2.BZ2Decompressor().decompress(stored, size + 1)


def _from_lzma(stored: memoryview, size: int) -> bytes:
    """Decompress LZMA behind the header of ZIP: version, bytes of the properties, properties."""
    _, num_bytes, mode, dictionary = struct.unpack_from("<2HBI", stored.tobytes()[:9].ljust(9, b"\0"))
    options = {"lc": mode % 9, "lp": mode // 9 % 5, "pb": mode // 45}
    needed = min(dictionary, max(size, 4096))  # a forged one would take 4 GiB
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA1, "dict_size": needed, **options}])
    return decompressor.decompress(stored[4 + num_bytes :], size + 1)


def _from_zstd(stored: memoryview, size: int) -> bytes:
    import pyarrow as pa

    with pa.CompressedInputStream(pa.BufferReader(stored), "zstd") as stream:
        found: bytes = stream.read(size + 1)
    return found


UNPACK: dict[ZipMethod, Callable[[memoryview, int], bytes]] = {
    ZipMethod.STORED: lambda stored, _: bytes(stored),
    ZipMethod.DEFLATED: _inflated,
    ZipMethod.BZIP2: _from_bzip2,
    ZipMethod.LZMA: _from_lzma,
    ZipMethod.ZSTD: _from_zstd,
}
"""Each returns at most one byte more than the size that it is given."""
UNPACK_ERRORS = (zlib.error, lzma.LZMAError, EOFError, OSError, ValueError)
"""What they raise of damaged content; Arrow raises OSError."""


def method_name(method: int) -> str:
    """Return how a member is compressed, for messages."""
    known = {9: "deflate64", 95: "xz", 98: "PPMd", 99: "AES"}
    return ZipMethod(method).name.lower() if method in list(ZipMethod) else known.get(method, f"method {method}")


def _bad_record(name: str, member: ZipMember, reason: str) -> DamagedShardError:
    return DamagedShardError(
        f"{name}: the member {member.name[:200]!r} at byte {member.start} is damaged: {reason}. Write the archive again",
        offset=member.start,
    )
