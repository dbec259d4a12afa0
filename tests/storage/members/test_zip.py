"""ZIP archives: the listing and content of `zipfile`, or an error where it reads what should not be read."""

from __future__ import annotations

import hashlib
import io
import random
import re
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sqlstream.errors import SourceError
from sqlstream.storage.members.zip.directory import read_directory
from sqlstream.storage.members.zip.member import ZipMember, ZipMethod, content
from tests.storage.members.kit import FIXTURES, Bytes, expected

LISTINGS = expected("zip/expected.json")
REFUSED = {
    "aes.zip": "'b.bin' is encrypted",
    "encrypted.zip": "'b.bin' is encrypted",
    "deflate64.zip": "'a/2.txt' is compressed with a method that is not read (deflate64)",
    "overlap.zip": "'a.txt' at byte 0 overlaps what follows at byte 0",
    "split.z01": "it has no end record that fits",
    "split.zip": "one of the parts of a split archive",
    "symlink.zip": "'link.txt' is a symbolic link",
    "truncated.zip": "it has no end record that fits",
}
REFUSED_CONTENT = {
    "bad_crc.zip": "its CRC-32 is 7a6c86f1, the directory says 7a6c86f0",
    "name_mismatch.zip": "its local header is that of 'z.txt', stored",
}
NAME = "s3://b/x.zip"


def members_of(data: bytes) -> list[ZipMember]:
    return list(read_directory(Bytes(data), NAME))


def content_of(data: bytes, member: ZipMember) -> bytes:
    return content(data[member.start : member.stop], member, NAME)


def refusal(data: bytes, **options: Any) -> str:
    with pytest.raises(SourceError) as caught:
        read_directory(Bytes(data), NAME, **options)
    assert str(caught.value).startswith(NAME)
    return str(caught.value)


def files_of(listing: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The files of a listing of `zipfile`, of several with one name the last."""
    last = {member["name"]: member for member in listing}
    return [member for member in listing if last[member["name"]] is member and not member["is_dir"]]


def standard(name: str) -> list[dict[str, Any]]:
    """The listing of `zipfile`, or what is right where that reads nothing or another name."""
    if name == "fake_end.zip":
        name = "deflated.zip"
    listing = files_of(LISTINGS[name]["zipfile"]["members"])
    if name == "zstd.zip":
        contents = [member["content"] for member in files_of(LISTINGS["stored.zip"]["zipfile"]["members"])]
        listing = [{**member, "content": right} for member, right in zip(listing, contents, strict=True)]
    if name == "names_437.zip":
        listing = [{**member, "name": member["name"].replace("├╝", "ü")} for member in listing]
    return listing


def archive(files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, method)
    return out.getvalue()


def patched(data: bytes, signature: bytes, at: int, value: bytes) -> bytes:
    """An archive with other bytes in its first record of a kind."""
    place = data.index(signature) + at
    return data[:place] + value + data[place + len(value) :]


@pytest.mark.parametrize("name", sorted(LISTINGS))
def test_an_archive_has_the_files_that_zipfile_reads_or_is_an_error_for_a_reason(name: str) -> None:
    data = (FIXTURES / "zip" / name).read_bytes()
    if name in REFUSED:
        assert REFUSED[name] in refusal(data)
        return
    found = members_of(data)
    if name in REFUSED_CONTENT:
        with pytest.raises(SourceError, match=rf"{NAME}: the member 'a.txt' at byte 0 is damaged: {REFUSED_CONTENT[name]}"):
            content_of(data, found[0])
        return
    fields = ("name", "header_offset", "method", "compress_size", "file_size", "crc32", "content")
    assert [(m.name, m.start, *m[3:], hashlib.sha256(content_of(data, m)).hexdigest()) for m in found] == [
        tuple(member[field] for field in fields) for member in standard(name)
    ]
    assert all(data[member.stop :][:2] in (b"PK", b"") for member in found)


@pytest.mark.parametrize("name", sorted(LISTINGS))
def test_an_archive_that_is_cut_anywhere_gives_no_wrong_sample(name: str) -> None:
    data = (FIXTURES / "zip" / name).read_bytes()
    rng = random.Random(name)
    right = contents(data) if name not in REFUSED else {}
    for place in {*range(0, len(data), 512), *(rng.randrange(len(data)) for _ in range(20)), *range(len(data) - 25, len(data))}:
        found = contents(data[: max(place, 0)])
        assert not found or found == right, place  # what is cut off was a comment, or garbage


def contents(data: bytes) -> dict[str, bytes]:
    """What can be read, by name."""
    found = {}
    try:
        for member in read_directory(Bytes(data), NAME):
            try:
                found[member.name] = content_of(data, member)
            except SourceError:
                continue
    except SourceError:
        return {}
    return found


@settings(max_examples=300)
@given(st.data())
def test_an_archive_with_a_changed_byte_gives_no_wrong_content(draws: st.DataObject) -> None:
    name = draws.draw(st.sampled_from(sorted(set(LISTINGS) - {"long_comment.zip", "split.z01", "split.zip"})))
    data = bytearray((FIXTURES / "zip" / name).read_bytes())
    right = {*contents(bytes(data)).items(), ("twice.txt", b"old"), ("é.txt", b"cp437")}
    place = draws.draw(st.integers(0, len(data) - 1))
    data[place] ^= draws.draw(st.integers(1, 255))
    found = contents(bytes(data))
    if name in REFUSED or name in REFUSED_CONTENT:
        return  # the change may mend it
    assert set(found.items()) <= right  # a member whose name is damaged uncovers an older one of that name


@pytest.mark.filterwarnings("ignore:Duplicate name")  # which is what is tested
def test_names_of_a_large_directory_are_those_of_zipfile_and_of_equal_ones_the_last_is_there() -> None:
    names = [f"{number:06}.{'jpg' if number % 1000 else 'bêta'}" for number in range(70_000)]
    names += [names[5], "folder/", names[69_999], names[5]]
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name in names:
            file.writestr(zipfile.ZipInfo(name), b"")
    found = [member.name for member in members_of(data.getvalue())]
    assert found == [name for name in names[:69_999] if name != names[5]] + [names[69_999], names[5]]


def test_a_directory_in_another_order_than_its_members_is_read_block_by_block(tmp_path: Path) -> None:
    data = archive({f"{number:06}": b"%d" % number for number in range(20_000)}, zipfile.ZIP_STORED)
    start = data.index(b"PK\1\2")
    entries = [data[start + 52 * number :][:52] for number in range(20_000)]
    random.Random(1).shuffle(entries)
    shuffled = data[:start] + b"".join(entries) + data[start + 52 * 20_000 :]
    for folder in (None, tmp_path):
        found = [*read_directory(Bytes(shuffled), NAME, folder=folder)]
        assert [member.name.encode() for member in found] == [entry[46:] for entry in entries]
        assert all(content_of(shuffled, member) == b"%d" % int(member.name) for member in found[::500])
    twice = data[:start] + b"".join([*entries[:-1], entries[0]]) + data[start + 52 * 20_000 :]
    assert "overlaps what follows" in refusal(twice), "far from each other, in two blocks"


def test_a_directory_takes_one_read_or_two_and_its_bytes_once() -> None:
    small = Bytes(archive({f"{number:06}.jpg": b"1" for number in range(500)}, zipfile.ZIP_STORED))
    assert len(list(read_directory(small, NAME))) == 500
    assert len(small.reads) == 1
    large = Bytes(archive({f"{number:06}.jpg": b"1" * 50 for number in range(20_000)}, zipfile.ZIP_STORED))
    assert len(list(read_directory(large, NAME))) == 20_000
    assert len(large.reads) == 2
    assert large.num_bytes_read == 20_000 * 56 + 22, "the directory and the end record"


def test_an_archive_of_65_536_members_is_read_with_zip64_and_where_an_old_writer_let_the_count_wrap() -> None:
    data = archive({f"{number:06}": b"" for number in range(65_536)}, zipfile.ZIP_STORED)
    assert b"PK\6\6" in data
    found = members_of(data)
    assert [found[0].name, found[-1].name, len(found)] == ["000000", "065535", 65_536]
    start = data.index(b"PK\1\2")
    stop = data.index(b"PK\6\6")
    wrapped = data[:stop] + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 0, 0, stop - start, start, 0)
    assert members_of(wrapped) == found
    assert "has 65536 entries" in refusal(patched(wrapped, b"PK\5\6", 8, b"\1\0\1\0"))


def test_an_archive_behind_another_one_or_of_which_only_an_inner_one_is_left_is_an_error() -> None:
    first, second = archive({"a.txt": b"1"}), archive({"b.txt": b"2"})
    joined = "it begins with a member, and the directory lists none before byte"
    assert f"{joined} {len(first)}" in refusal(first + second)
    nested = archive({"c.txt": b"3", "inner.zip": second, "d.txt": b"4"}, zipfile.ZIP_STORED)
    assert joined in refusal(nested[: nested.index(second) + len(second)])
    assert joined in refusal(nested[: nested.index(second) + len(second) + 10])
    assert joined in refusal(nested[: nested.index(b"PK\5\6") + 22])


@pytest.mark.parametrize(
    ("reason", "data"),
    [
        ("is a directory with content", patched(archive({"a/": b""}), b"PK\1\2", 24, b"\1")),
        ("is stored as it is, with two sizes", patched(archive({"a": b"12"}, zipfile.ZIP_STORED), b"PK\1\2", 24, b"\1")),
        ("is compressed with a method that is not read (PPMd)", patched(archive({"a": b"12"}), b"PK\1\2", 10, b"\x62")),
        ("is in another part of a split archive", patched(archive({"a": b"12"}), b"PK\1\2", 34, b"\1")),
        ("has no zip64 field for its size", patched(archive({"a": b"12"}), b"PK\1\2", 24, b"\xff" * 4)),
        ("a name has a NUL in it", archive({"abc": b"12"}).replace(b"abc", b"a\0c")),
        ("'a' at byte 0 overlaps what follows at byte 35", patched(archive({"a": b"12"}), b"PK\1\2", 20, b"\x80")),
        ("an entry of its directory has no signature", patched(archive({"a": b"1", "b": b"2"}), b"PK\1\2", 47, b"QK")),
        (
            "its directory has 2 entries in 94 bytes, the end record says 3",
            patched(archive({"a": b"1", "b": b"2"}), b"PK\5\6", 8, b"\3\0\3\0"),
        ),
        ("it has no end record that fits", b""),
        ("it has no end record that fits", b"PK\5\6"),
        ("would hold 2000000 bytes in ", archive({"a": bytes(2_000_000)})),
    ],
)
def test_what_cannot_or_must_not_be_read_is_an_error(reason: str, data: bytes) -> None:
    assert reason in refusal(data, largest_bytes=1_000_000)


def test_an_archive_may_hold_what_deflate_makes_of_it_and_no_more() -> None:
    data = archive({"a": bytes(2_000_000)})
    assert len(members_of(data)) == 1, "a thousand times its size"
    bomb = patched(data, b"PK\1\2", 24, (3 << 30).to_bytes(4, "little"))
    assert "would hold 3221225472 bytes" in refusal(bomb)


@pytest.mark.parametrize("method", list(ZipMethod))
def test_content_that_is_larger_smaller_or_other_than_the_directory_says_is_an_error(method: ZipMethod) -> None:
    name = {0: "stored", 8: "deflated", 12: "bzip2", 14: "lzma", 93: "zstd"}[method]
    data = (FIXTURES / "zip" / f"{name}.zip").read_bytes()
    member = next(member for member in read_directory(Bytes(data), NAME) if member.name == "a/2.txt")
    right = content_of(data, member)
    assert len(right) == member.size == 480
    for changes, reason in (
        ({"size": 479}, "it has more bytes, the directory says 479"),
        ({"size": 481}, "it has 480 bytes, the directory says 481"),
        ({"crc": member.crc ^ 1}, "its CRC-32 is"),
        ({"name": "a/3.txt"}, "its local header is that of 'a/2.txt'"),
        ({"method": 8 if method != ZipMethod.DEFLATED else 12}, "its local header is that of 'a/2.txt'"),
    ):
        with pytest.raises(
            SourceError, match=rf"{NAME}: the member 'a/.\.txt' at byte {member.start} is damaged: .*({reason})"
        ):
            content_of(data, member._replace(**changes))
    record = data[member.start : member.stop]
    for cut in range(len(record)):
        with pytest.raises(SourceError, match="is damaged"):
            content(record[:cut], member, NAME)
    assert content(memoryview(record), member, NAME) == right


def test_a_forged_dictionary_of_lzma_takes_no_memory() -> None:
    data = (FIXTURES / "zip/lzma.zip").read_bytes()
    place = data.index(b"\5\0\x5d") + 3
    forged = data[:place] + b"\xff" * 4 + data[place + 4 :]
    assert content_of(forged, members_of(forged)[0]) == b"one"


def test_a_record_ends_at_the_next_header_but_not_far_behind_its_own_bytes() -> None:
    data = bytearray(archive({"a": b"1", "b": b"2"}, zipfile.ZIP_STORED))
    hole = 1 << 20
    second, directory = data.rindex(b"PK\3\4"), data.index(b"PK\1\2")
    data[second:second] = bytes(hole)
    data = bytearray(patched(bytes(data), b"PK\5\6", 16, (directory + hole).to_bytes(4, "little")))
    entry = data.rindex(b"PK\1\2") + 42
    data[entry : entry + 4] = (second + hole).to_bytes(4, "little")
    found = members_of(bytes(data))
    assert [member.start for member in found] == [0, second + hole]
    assert found[0].stop < 70_000
    assert [content_of(bytes(data), member) for member in found] == [b"1", b"2"]


def test_names_are_read_as_their_flag_and_extra_field_say() -> None:
    found = members_of((FIXTURES / "zip/names_437.zip").read_bytes())
    assert [(member.name, member.start) for member in found] == [("ü.txt", 40), ("é.txt", 85)]
    raw, name = b"??.txt", "日本.txt"
    field = struct.pack("<HHBI", 0x7075, 5 + len(name.encode()), 1, zlib.crc32(raw)) + name.encode()
    info = zipfile.ZipInfo(raw.decode())
    info.extra = field
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        made.writestr(info, b"x")
    (member,) = members_of(out.getvalue())
    assert member.name == name
    assert content_of(out.getvalue(), member) == b"x"
    japanese = archive({name: b"x"}).replace(struct.pack("<H", 0x800) + b"\0\0", bytes(4))  # as macOS writes: no flag
    assert re.fullmatch("日本.txt", members_of(japanese)[0].name)
