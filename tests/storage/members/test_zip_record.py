"""The content of a member of a ZIP as it comes in pieces: that of `zip.content`, or its error."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

import pytest

from sqlstream.errors import DamagedMemberError, SourceError
from sqlstream.storage.base.protocols import ZipRecord
from sqlstream.storage.members.unpacked import unpacked
from sqlstream.storage.members.zip.directory import read_directory
from sqlstream.storage.members.zip.member import ZipMember, content
from tests.storage.members.kit import FIXTURES, Bytes

NAME = "s3://b/x.zip"


def members() -> Iterator[tuple[str, ZipMember, bytes]]:
    """Every member of every golden whose directory can be read: archive, member, the bytes of its record."""
    for path in sorted((FIXTURES / "zip").glob("*.zip")):
        data = path.read_bytes()
        try:
            found = list(read_directory(Bytes(data), NAME))
        except SourceError:
            continue
        yield from ((path.name, member, data[member.start : member.stop]) for member in found)


def record_of(member: ZipMember) -> ZipRecord:
    name_crc = zlib.crc32(member.name.encode())
    return ZipRecord(member.start, member.method, member.stored_size, member.size, member.crc, name_crc)


def in_pieces(data: bytes, seed: int) -> Iterator[bytes]:
    rng, at = random.Random(seed), 0
    while at < len(data):
        step = rng.choice((1, 3, 17, 200, 100_000))
        yield data[at : at + step]
        at += step


def test_every_golden_member_is_read_in_any_pieces() -> None:
    num_read = 0
    for archive, member, data in members():
        try:
            expected = content(data, member, NAME)
        except SourceError:
            with pytest.raises(DamagedMemberError, match=rf"x\.zip: the member at byte {member.start} is damaged"):
                list(unpacked([data], record_of(member), NAME))
            assert archive in ("bad_crc.zip", "name_mismatch.zip")
            continue
        for seed in range(4):
            assert b"".join(unpacked(in_pieces(data, seed), record_of(member), NAME)) == expected
        num_read += 1
    assert num_read > 60


def test_a_record_that_is_cut_or_damaged_is_never_taken_for_another_content() -> None:
    rng = random.Random(0)
    for _, member, data in members():
        record = record_of(member)
        try:
            expected = content(data, member, NAME)
        except SourceError:
            continue
        if not 0 < len(data) < 4000:
            continue
        for _ in range(8):
            at = rng.randrange(len(data))
            for other in (data[:at], data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]):
                try:
                    found = b"".join(unpacked([other], record, NAME))
                except DamagedMemberError:
                    continue
                assert found == expected  # what was hit says nothing of the content


def test_no_more_is_given_than_the_directory_says() -> None:
    raw = bytes(10 << 20)
    squeeze = zlib.compressobj(9, zlib.DEFLATED, -15)
    stored = squeeze.compress(raw) + squeeze.flush()
    head = b"PK\3\4" + bytes(4) + (8).to_bytes(2, "little") + bytes(16) + (1).to_bytes(2, "little") + bytes(2) + b"a"
    record = ZipRecord(0, 8, len(stored), 1000, zlib.crc32(raw[:1000]), zlib.crc32(b"a"))
    given: list[bytes] = []
    with pytest.raises(DamagedMemberError, match="it has more bytes, the directory says 1000"):
        given.extend(unpacked([head + stored], record, NAME))
    assert not given
