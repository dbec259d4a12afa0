"""Samples of members, as WebDataset makes them."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.storage.members.damage import before_damage
from sqlstream.storage.members.names import group, split_name
from sqlstream.storage.members.tar import TarMember, read_members
from tests.storage.members.kit import FIXTURES, Bytes, expected

NAMES = expected("wds/names.expected.json")
PEERS = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
LISTINGS = expected("tar/expected.json")
DIFFERENT = {
    "concatenated.tar",
    "sparse_gnu.tar",
    "sparse_pax.tar",
    "bad_checksum.tar",
    "truncated_header.tar",
    "truncated_data.tar",
}
"""What is an error here; `test_tar` has the reasons."""


def samples_of(data: bytes) -> Any:
    return group(read_members(Bytes(data), "s3://b/x.tar"), "s3://b/x.tar")


def hashes(data: bytes, samples: Any) -> list[dict[str, str]]:
    """Samples with the hash of each part."""
    return [
        {"__key__": key, **{ext: hashlib.sha256(data[m.offset :][: m.size]).hexdigest() for ext, m in parts.items()}}
        for key, parts in samples
    ]


def peers(samples: list[dict[str, Any]]) -> list[dict[str, str]]:
    return [{k: v if k == "__key__" else v["sha256"] for k, v in sample.items()} for sample in samples]


@pytest.mark.parametrize("entry", NAMES, ids=lambda entry: repr(entry["name"]))
def test_a_name_is_split_as_webdataset_splits_it(entry: dict[str, Any]) -> None:
    key, extension = entry["base_plus_ext"]
    is_part = key is not None and not entry["skipped_as_meta"]
    assert split_name(entry["name"]) == ((key, extension.lower()) if is_part else None)


@example("a.b/.c.jpg")
@example("a\n/b.c/d.jpg")
@example("x.y/a\n.jpg")
@given(st.text("ab./\n", max_size=10))
def test_any_name_is_split_as_the_expression_of_webdataset_splits_it(name: str) -> None:
    match = PEERS.match(name)
    assert split_name(name) == (match and (match[1], match[2].lower()))


def test_a_long_name_is_split_in_linear_time() -> None:
    assert split_name("/" * (1 << 20)) is None, "the expression takes minutes"


@pytest.mark.parametrize(
    "name", sorted(n for n in LISTINGS if n.endswith(".tar") and n != "lying_name.tar" and n not in DIFFERENT)
)
def test_a_shard_has_the_samples_that_webdataset_makes_of_it(name: str) -> None:
    data = (FIXTURES / "tar" / name).read_bytes()
    theirs = LISTINGS[name]["webdataset"]
    if theirs["end"] == "ended":
        assert hashes(data, samples_of(data)) == peers(theirs["samples"])
        return
    with pytest.raises(SourceError, match=r"rename or remove one of them|has no bytes"):
        list(samples_of(data))


@pytest.mark.parametrize("number", range(3))
def test_shards_of_the_shard_writer_have_the_samples_that_webdataset_makes_of_them(number: int) -> None:
    raw = expected("wds/raw.expected.json")
    data = (FIXTURES / "wds" / raw["shards"][number]).read_bytes()
    found = hashes(data, samples_of(data))
    theirs = peers(raw["samples"])
    assert found
    assert all(sample in theirs for sample in found)


def test_a_part_that_webdataset_names_itself_is_an_error() -> None:
    with pytest.raises(SourceError, match=r"s3://b/x.tar has 'a.__URL__' beside WebDataset's own field"):
        list(group([TarMember("a.__URL__", 0, 512, 1)], "s3://b/x.tar"))


def damaged() -> bytes:
    """Three samples of two parts, of which the second part of the second sample has a damaged header."""
    data = bytearray()
    blocks = (FIXTURES / "tar/gnu_long_names.tar").read_bytes()[4096:5120]  # short.txt, one byte
    for name in (b"a.txt", b"a.cls", b"b.txt", b"b.cls", b"c.txt", b"c.cls"):
        header = bytearray(blocks)
        header[:100] = name.ljust(100, b"\0")
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header[:512])
        data += header
    data[3 * 1024] ^= 1
    return bytes(data)


def test_the_samples_of_a_damaged_shard_are_those_that_the_damage_cannot_have_cut() -> None:
    found = before_damage(samples_of(damaged()))
    assert [key for key, _ in found.samples] == ["a"], "b may have more parts"
    assert "byte 3072: its checksum is wrong; the last good member is 'b.txt'" in str(found.damage)
    assert isinstance(found.damage, DamagedShardError)


def test_of_a_sound_shard_all_samples_are_used_and_what_is_no_damage_is_raised() -> None:
    found = before_damage(samples_of((FIXTURES / "tar/pax_each.tar").read_bytes()))
    assert [key for key, _ in found.samples] == ["a", "b"]
    assert found.damage is None
    with pytest.raises(SourceError, match="the sparse file"):
        before_damage(samples_of((FIXTURES / "tar/sparse_pax.tar").read_bytes()))
