"""The content of a member of a ZIP, piece by piece as its record comes: a large member is never in memory as a whole.

A generator for members that are stored or deflated; the other methods, which few writers use, are decompressed at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from sqlstream.errors import DamagedMemberError, SqlStreamError
from sqlstream.storage.base.protocols import ZipRecord
from sqlstream.storage.members.zip.member import LOCAL_BYTES, UNPACK, UNPACK_ERRORS, ZipMethod, local_header, method_name

_LARGEST_HEADER = LOCAL_BYTES + 2 * 0xFFFF
_PIECE_BYTES = 1 << 20
"""Most bytes that are made of deflated ones at a time. Arbitrary."""


def record_content(chunks: Iterable[bytes | memoryview], record: ZipRecord, name: str) -> Iterator[bytes]:
    """Yield the content of a member; its CRC-32 is compared behind the last piece.

    Args:
        chunks: The bytes of the archive from `record.start` on, in order.
        record: What the directory says of the member, whose sizes and CRC-32 hold.
        name: The URL of the archive for messages, without credentials.

    Raises:
        DamagedMemberError: The record is not that of the member, or damaged. No more than `record.raw_bytes` are given.
    """
    crc = num_bytes = 0
    try:
        for piece in _pieces(_stored(chunks, record, name), record):
            num_bytes += len(piece)
            if num_bytes > record.raw_bytes:
                break
            crc = zlib.crc32(piece, crc)
            yield piece
    except SqlStreamError:  # of the network, while the next bytes were waited for: some are OSErrors, too
        raise
    except UNPACK_ERRORS as error:
        raise _damage(name, record, f"it is no {method_name(record.method)} content: {error}") from error
    if num_bytes != record.raw_bytes:
        found = "more" if num_bytes > record.raw_bytes else num_bytes
        raise _damage(name, record, f"it has {found} bytes, the directory says {record.raw_bytes}")
    if crc != record.crc:
        raise _damage(name, record, f"its CRC-32 is {crc:08x}, the directory says {record.crc:08x}")


def _stored(chunks: Iterable[bytes | memoryview], record: ZipRecord, name: str) -> Iterator[bytes]:
    """Yield the stored bytes, behind a local header that is the member's."""
    head, header, left = bytearray(), None, record.stored_bytes
    for chunk in chunks:
        data = bytes(chunk)
        if header is None:
            head += data
            if (header := local_header(head)) is None:
                if len(head) > _LARGEST_HEADER:
                    break
                continue
            if zlib.crc32(header.name.encode()) != record.name_crc or header.method != record.method:
                raise _damage(name, record, f"its local header is that of {header.name[:200]!r}, {method_name(header.method)}")
            data = bytes(head[header.num_bytes :])
        if not left:
            break
        yield data[:left]
        left -= min(left, len(data))
    if header is None:
        raise _damage(name, record, f"there is no local header but {bytes(head[:4])!r}")
    if left:
        raise _damage(name, record, f"its record lacks {left} of {record.stored_bytes} stored bytes")


def _pieces(stored: Iterator[bytes], record: ZipRecord) -> Iterator[bytes]:
    method = ZipMethod(record.method)
    if method is ZipMethod.STORED:
        yield from stored
    elif method is ZipMethod.DEFLATED:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        for data in stored:
            while data:
                yield inflate.decompress(data, _PIECE_BYTES)
                data = inflate.unconsumed_tail  # noqa: PLW2901 - what waits for the next piece
        yield inflate.flush()
    else:
        yield UNPACK[method](memoryview(b"".join(stored)), record.raw_bytes)


def _damage(name: str, record: ZipRecord, reason: str) -> DamagedMemberError:
    return DamagedMemberError(
        f"{name}: the member at byte {record.start} is damaged: {reason}. Write the archive again",
        url=name,
        offset=record.start,
    )
