"""TAR archives: the listing of `tarfile`, or an error where it passes over damage."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.tar import TarMember, read_members
from tests.storage.members.kit import FIXTURES, Bytes, expected

LISTINGS = expected("tar/expected.json")
TARS = sorted(name for name in LISTINGS if name.endswith(".tar") and name != "lying_name.tar")
STRICTER = {
    "bad_checksum.tar": ("byte 1024: its checksum is wrong", "a.txt"),
    "truncated_data.tar": ("'b.bin' would end at byte 3584, and the archive at 2236", "a.txt"),
    "truncated_header.tar": ("a header would end at byte 1536, and the archive at 1124", "a.txt"),
    "concatenated.tar": ("byte 2048: another archive follows the end blocks, at byte 10240", "a.cls"),
    "zero_bytes.tar": ("it has no bytes", None),
    "sparse_gnu.tar": ("the sparse file 'a.bin' at byte 0", None),
    "sparse_pax.tar": ("the sparse file 'a.bin' at byte 0", None),
}
"""Where `tarfile` ends silently, or rebuilds what no range holds: what the error says, and the last good member."""
END = bytes(1024)


def listing(data: bytes, read_ahead_bytes: int = 8192) -> tuple[list[TarMember], str | None]:
    """What is read, and the error behind it."""
    archive = read_members(Bytes(data), "s3://b/x.tar", read_ahead_bytes=read_ahead_bytes)
    members: list[TarMember] = []
    try:
        members.extend(archive)
    except SourceError as error:
        found = error
    else:
        return members, None
    assert str(found).startswith("s3://b/x.tar ")
    assert isinstance(found, DamagedShardError) == ("sparse" not in str(found))
    return members, str(found)


def header(name: bytes, size: bytes | int = 0, kind: bytes = b"0", prefix: bytes = b"") -> bytes:
    """A header with any bytes in its fields, and the right checksum."""
    block = bytearray(tarfile.TarInfo("").tobuf(tarfile.USTAR_FORMAT)[:512])
    block[0:100] = name.ljust(100, b"\0")
    block[124:136] = b"%011o\0" % size if isinstance(size, int) else size
    block[156:157] = kind
    block[345:500] = prefix.ljust(155, b"\0")
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def body(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


def record(key: str, value: bytes) -> bytes:
    """A pax record, whose length counts itself."""
    rest = len(key) + len(value) + 3
    length = next(n for n in range(rest, rest + 20) if n == rest + len(str(n)))
    return b"%d %s=%s\n" % (length, key.encode(), value)


def pax(*records: bytes, kind: bytes = b"x") -> bytes:
    data = b"".join(records)
    return header(b"PaxHeaders/x", len(data), kind) + body(data)


def standard(data: bytes) -> list[TarMember]:
    """The listing of `tarfile`."""
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:", encoding="utf-8") as archive:
        return [TarMember(m.name, m.offset, m.offset_data, m.size) for m in archive if m.isreg()]


@pytest.mark.parametrize("name", TARS)
@pytest.mark.parametrize("read_ahead_bytes", [512, 8192, 1 << 20])
def test_an_archive_has_the_members_that_tarfile_lists_or_an_error_where_that_is_silent(
    name: str, read_ahead_bytes: int
) -> None:
    data = (FIXTURES / "tar" / name).read_bytes()
    found, error = listing(data, read_ahead_bytes)
    if name in STRICTER:
        reason, last = STRICTER[name]
        assert error is not None
        assert reason in error
        assert (found[-1].name if found else None) == last
        assert name.startswith("sparse") or f"the last good member is {last!r}" in error or "no good member" in error
        return
    assert error is None
    listed = [member for member in LISTINGS[name]["tarfile"] if member["isreg"]]
    assert [tuple(member) for member in found] == [(m["name"], m["offset"], m["offset_data"], m["size"]) for m in listed]
    contents = [hashlib.sha256(data[m.offset :][: m.size]).hexdigest() for m in found]
    assert contents == [member["content"] for member in listed]


@pytest.mark.parametrize("name", TARS)
def test_an_archive_that_is_cut_anywhere_gives_its_first_members_and_an_error(name: str) -> None:
    data = (FIXTURES / "tar" / name).read_bytes()
    whole, _ = listing(data)
    rng = random.Random(name)
    places = {*range(0, len(data), 512), *(rng.randrange(len(data) + 1) for _ in range(40))} if data else {0}
    for place in sorted(places):
        found, error = listing(data[:place])
        assert found == whole[: len(found)], place
        if error is None:  # it ends between members, or in the end blocks: all that is before the cut was read
            assert len(found) == sum(member.offset + member.size <= place for member in whole)


@settings(max_examples=150)
@given(st.data())
def test_an_archive_with_changed_bytes_gives_no_member_that_its_checksums_tell_from_a_right_one(draws: st.DataObject) -> None:
    name = draws.draw(
        st.sampled_from([name for name in TARS if name != "bad_checksum.tar"])
    )  # a second change may mend the sum
    data = bytearray((FIXTURES / "tar" / name).read_bytes())
    if not data:
        return
    whole, _ = listing(bytes(data))
    contents = [range(member.offset, member.offset + member.size) for member in whole]
    records = [range(member.start, member.offset - 512) for member in whole if member.offset > member.start + 512]
    place = draws.draw(st.integers(0, len(data) - 1))
    data[place] ^= draws.draw(st.integers(1, 255))
    found, error = listing(bytes(data))
    if any(place in span for span in records):
        return  # extended headers have data, and no data has a checksum
    assert found == whole[: len(found)]
    is_content = any(place in span for span in contents)
    assert error is not None or len(found) == len(whole), (place, is_content)


def test_a_read_takes_the_headers_of_small_neighbours_and_one_is_made_for_each_large_member() -> None:
    sizes = [47, 100_000, 3, 47, 50_000, 3]
    parts = [header(f"{n}.bin".encode(), size) + body(b"x" * size) for n, size in enumerate(sizes)]
    source = Bytes(b"".join(parts) + bytes(10240))
    assert [member.size for member in read_members(source, "x")] == sizes
    assert len(source.reads) == 3, "the first, and one behind each of the two large members"
    assert source.num_bytes_read <= 3 * 8192 + 10240
    wide = Bytes(source.data)
    assert len(list(read_members(wide, "x", read_ahead_bytes=1 << 20))) == len(sizes)
    assert len(wide.reads) == 1


def test_a_member_of_8_gib_costs_its_headers(tmp_path: Path) -> None:
    size = 8 << 30
    path = tmp_path / "large.tar"
    with path.open("wb") as file:
        file.write(header(b"large.bin", b"\x80" + size.to_bytes(11, "big")))
        file.seek(512 + size)
        file.write(header(b"b.txt", 2) + body(b"ok") + END)

    class OnDisk:
        size_bytes = path.stat().st_size
        num_read = 0

        def read_at(self, offset: int, num_bytes: int, /) -> bytes:
            self.num_read += 1
            with path.open("rb") as file:
                file.seek(offset)
                return file.read(num_bytes)

    source = OnDisk()
    assert list(read_members(source, "x")) == [
        TarMember("large.bin", 0, 512, size),
        TarMember("b.txt", 512 + size, 1024 + size, 2),
    ]
    assert source.num_read == 2


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("a global header sets path", pax(record("path", b"b.txt"), kind=b"g") + header(b"a.txt")),
        ("a global header sets size", pax(record("size", b"9"), kind=b"g") + header(b"a.txt")),
        ("a pax record begins with b'9 path", pax(b"9 path=abc\n") + header(b"a.txt")),
        ("a pax record begins with b'path", pax(b"path=abc\n") + header(b"a.txt")),
        ("a pax record begins with b'0 path", pax(b"0 path=abc\n") + header(b"a.txt")),
        ("a pax record begins with b'99 path", pax(b"99 path=abc\n") + header(b"a.txt")),
        ("its size is b'-5'", pax(record("size", b"-5")) + header(b"a.txt")),
        ("a name with a NUL", pax(record("path", b"a\0b")) + header(b"a.txt")),
        ("no member follows an extended header", pax(record("path", b"b.txt")) + END),
        ("no member follows an extended header", pax(record("path", b"b.txt"))),
        ("an extended header of 2000000 bytes", header(b"x", 2_000_000, b"L") + bytes(3_000_000)),
        ("an extended header would end at byte 1536", header(b"x", 700, b"L") + bytes(512)),
        ("its size is b'0000000000", header(b"a.txt", b"00000000009\0") + END),
        ("its size is b'-000000001", header(b"a.txt", b"-0000000012\0") + END),
        ("its size is b'\\xff", header(b"a.txt", b"\xff" * 12) + END),
        ("'a.txt' would end at byte", header(b"a.txt", b"\x81" + bytes(11)) + END),
        ("a block of zeros is followed by data", header(b"a.txt") + bytes(512) + header(b"b.txt") + END),
        ("another archive follows", header(b"a.txt") + bytes(4096) + b"content" * 100 + bytes(324) + header(b"b.txt") + END),
        ("another archive follows", header(b"a.txt") + bytes(1024 + 100) + header(b"b.txt") + END),
        ("no TAR header: it begins with b'PK", b"PK\3\4" + bytes(1000)),
    ],
)
def test_what_cannot_be_read_as_it_is_written_is_an_error(reason: str, data: bytes) -> None:
    _, error = listing(data)
    assert error is not None
    assert reason in error


@pytest.mark.parametrize(
    "data",
    [
        pax(record("path", b"first"), record("size", b"1")) + pax(record("path", b"second")) + header(b"a") + body(b"x") + END,
        header(b"", 3, b"K")
        + body(b"to\0")
        + header(b"", 4, b"L")
        + body(b"long")
        + pax(record("path", b"p"))
        + header(b"a")
        + END,
        header(b"old/", 5, b"\0") + header(b"old/a", 0, b"\0") + END,
        header(b"link", 5, b"2") + header(b"a.txt", 1) + body(b"1") + END,
        header(b"a", 700, b"V") + body(b"v" * 700) + header(b"a.txt", 1, b"7") + body(b"1") + END,
        header(b"n" * 100, 0, prefix=b"p" * 155) + END,
        header(b"a.txt", b"            ") + header(b"b.txt", b"    7 \0\0\0\0\0\0") + body(b"1234567") + END,
    ],
)
def test_headers_that_stack_or_have_odd_fields_read_as_in_tarfile(data: bytes) -> None:
    assert listing(data) == (standard(data), None)


def test_a_header_whose_checksum_was_summed_with_signed_bytes_is_read() -> None:
    block = bytearray(header(b"\xc3\xbc.txt"))
    block[148:156] = b"%06o\0 " % (int(block[148:154], 8) - 2 * 256)
    assert listing(bytes(block) + END) == (standard(bytes(block) + END), None)


def test_an_archive_that_shrinks_while_it_is_read_is_an_error() -> None:
    source = Bytes(header(b"a.txt", 100_000) + bytes(100_352) + END)
    source.data = source.data[:50_000]
    with pytest.raises(
        SourceError, match=r"damaged at byte 100864: it ends there, and its size was 101888; the last .* 'a.txt'"
    ):
        list(read_members(source, "x"))


def test_an_archive_without_end_blocks_is_logged_since_it_may_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    for name, num_lines in (("one_zero_block.tar", 0), ("no_end.tar", 1)):
        assert listing((FIXTURES / "tar" / name).read_bytes())[1] is None
        assert len(caplog.messages) == num_lines
    assert caplog.messages == [
        "s3://b/x.tar ends at byte 4096 without end blocks: its writer left them out, or it is cut off",
    ]
