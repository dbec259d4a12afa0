"""What the header of a JPEG tells without Pillow: the same as with it, or nothing."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.errors import DecodeError
from sqlstream.transforms.image_decode import decode_image, decode_resized, orientation_of
from sqlstream.transforms.jpeg import MAX_PIXELS, plain_size
from sqlstream.transforms.resize import ResizeOptions

from .media import encode, photo

PLAIN: dict[str, dict[str, Any]] = {
    "baseline": {},
    "progressive": {"progressive": True},
    "optimized, 4:4:4": {"optimize": True, "subsampling": 0},
    "restart markers": {"restart_marker_blocks": 4},
    "comment": {"comment": b"\xff\xd9 a comment"},
    "colour profile": {"icc_profile": bytes(70_000)},  # two segments
}


def exif(orientation: int) -> Image.Exif:
    block = Image.Exif()
    block[0x0112] = orientation
    return block


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    return data[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + data[2:]


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("options", PLAIN.values(), ids=PLAIN.keys())
def test_a_plain_jpeg_is_known_without_pillow(options: dict[str, Any], mode: str) -> None:
    data = encode(photo(61, 90).convert(mode), "JPEG", **options)
    assert plain_size(data) == (61, 90)


@pytest.mark.parametrize(
    "data",
    [
        encode(photo(60, 90), "PNG"),
        encode(photo(60, 90), "JPEG", exif=exif(6)),
        encode(photo(60, 90).convert("CMYK"), "JPEG"),
        encode(photo(60, 90), "MPO", save_all=True, append_images=[photo(60, 90, 1)]),
        with_segment(encode(photo(60, 90), "JPEG"), 0xE1, b"http://ns.adobe.com/xap/1.0/\0<x/>"),
        with_segment(encode(photo(60, 90), "JPEG"), 0xEE, b"Adobe\0\x64\0\0\0\0\0"),
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xda" + bytes(40),
        b"\xff\xd8\xff\xe0\0\0" + bytes(40),
    ],
    ids=["png", "exif", "cmyk", "several pictures", "xmp", "adobe", "empty", "cut", "no frame", "no length"],
)
def test_what_may_need_more_than_a_decoder_is_left_to_pillow(data: bytes) -> None:
    assert plain_size(data) is None


def test_a_picture_that_is_too_large_is_left_to_pillow() -> None:
    data = bytearray(encode(photo(60, 90), "JPEG"))
    at = data.index(b"\xff\xc0")
    data[at + 5 : at + 9] = b"\xff\xff\xff\xff"
    assert MAX_PIXELS < 0xFFFF * 0xFFFF
    assert plain_size(bytes(data)) is None
    data[at + 5 : at + 9] = bytes(4)
    assert plain_size(bytes(data)) is None


def test_a_file_that_is_cut_or_damaged_is_told_as_pillow_tells_it_or_not_at_all() -> None:
    whole = encode(photo(48, 64), "JPEG", icc_profile=bytes(300))
    generator = np.random.default_rng(0)
    num_known = 0
    for number in range(2000):
        data = bytearray(whole[: int(generator.integers(0, 900))] if number % 2 else whole)
        for at in generator.integers(0, 900, 1 + number % 3):
            if at < len(data):
                data[at] = generator.integers(0, 256)
        size = plain_size(bytes(data))
        if size is None:
            continue
        try:
            image = Image.open(io.BytesIO(data))
        except Exception:  # Pillow reads tables here that its decoder would refuse
            continue
        num_known += 1
        assert (image.height, image.width, image.format) == (*size, "JPEG")
        assert image.mode in ("RGB", "L")
        assert orientation_of(image) == 1
    assert num_known > 200


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_plain_jpeg_has_the_pixels_that_it_has_by_way_of_pillow_s_header(mode: str) -> None:
    pytest.importorskip("simplejpeg")
    options = ResizeOptions(resolution=(40, 56))
    for height, width in ((61, 90), (333, 500)):  # the larger one is decoded at a reduced scale
        plain = encode(photo(height, width).convert(mode), "JPEG")
        other = with_segment(plain, 0xE1, b"not known")
        assert plain_size(plain) is not None
        assert plain_size(other) is None
        assert decode_resized(plain, options).equal(decode_resized(other, options))
        assert decode_image(plain).tobytes() == decode_image(other).tobytes()


def test_the_limit_that_pillow_was_told_holds_on_the_fast_path_too(monkeypatch: pytest.MonkeyPatch) -> None:
    data, target = encode(photo(60, 90), "JPEG"), ResizeOptions(resolution=(16, 24))
    expected = decode_resized(data, target)  # [c, h, w]
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 90)
    assert plain_size(data) == (60, 90)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 90 - 1)
    assert plain_size(data) is None
    with pytest.warns(Image.DecompressionBombWarning, match="5400 pixels"):
        assert torch.equal(decode_resized(data, target), expected)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 60 * 90 // 2 - 1)
    with pytest.raises(DecodeError, match="DecompressionBombError"):
        decode_resized(data, target)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    assert plain_size(data) == (60, 90)
