"""Where samples lie, as the bytes that an index file holds."""

from __future__ import annotations

import pytest

from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import Place, SamplePart, pack, unpack

PLACES = {
    "one part": Place(((512, 1536),), (SamplePart(3, 512, 88),)),
    "several objects": Place(((0, 70_000), (70_000, 9_000_000)), (SamplePart(0, 0, 6), SamplePart(2, 70_000, 8_930_000))),
    "facts": Place(((8, 64),), (SamplePart(0, 8, 16, (1, 2)), SamplePart(1, 24, 40, (3, 4)))),
    "beyond 4 GiB": Place(((1 << 40, (1 << 40) + 9),), (SamplePart(0, 1 << 40, 9),)),
    "no part": Place((), ()),
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_place_is_unpacked_as_it_was_packed(place: Place) -> None:
    assert unpack(pack(place.entries, place.parts)) == place


@pytest.mark.parametrize(
    "data",
    [b"", b"I", b"X" + bytes(8), b"I" + bytes(7), b"Q" + bytes(12), b"I" + bytes([9, 0, 0, 0, 9, 0, 0, 0])],
    ids=["nothing", "no numbers", "another kind", "half a number", "half a long number", "fewer numbers than it says"],
)
def test_bytes_that_are_no_place_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="the place of a sample"):
        unpack(data)


@pytest.mark.parametrize("num_bytes", range(5, 8 * 4, 4))
def test_a_place_that_is_cut_short_is_refused(num_bytes: int) -> None:
    entries: list[Span] = [(0, 1), (1, 2)]
    whole = pack(entries, [SamplePart(0, 0, 1), SamplePart(1, 1, 1)])
    with pytest.raises(ValueError, match="the place of a sample"):
        unpack(whole[:num_bytes])
