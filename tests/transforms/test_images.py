"""Image decoding: modes, orientation, the fast path against Pillow, bad input."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms import image_decode
from sqlstream.transforms.image import (
    ConvertImageToByteTensorTransform,
    DecodeImageTransform,
    DecodeResizedImageTransform,
    NormalizeFramesTransform,
    ReshapeImageAsVideoTransform,
    ResizeImageTransform,
)
from sqlstream.transforms.image_decode import EXACT_TOLERANCE, REDUCED_TOLERANCE, decode_image, decode_resized
from sqlstream.transforms.pixels import image_to_tensor, resize_image, rgb_view
from sqlstream.transforms.presets import (
    ConvertVideoToByteTensorTransform,
    ResizeToBucket,
    ResizeVideoTransform,
    create_standard_image_pipeline,
)
from sqlstream.transforms.resize import ResizeOptions, ResizePlan, Size, plan_resize, scale_plan

from .media import drawing, encode, photo, quadrants


def by_pillow(data: bytes, options: ResizeOptions) -> torch.Tensor:
    """Plain Pillow: decode all, convert, crop, resize."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return image_to_tensor(resize_image(image, plan_resize(options, (image.height, image.width)), options.interpolation_mode))


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each JPEG decoder; without the extra, Pillow serves alone."""
    if request.param == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(image_decode, "find", lambda _module: None)
    return str(request.param)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_decoded_whole_stay_within_the_exact_tolerance_of_pillow(decoder: str, kind: str, mode: str) -> None:
    data = encode(photo(375, 500), kind)
    options = ResizeOptions(resolution=(256, 256), interpolation_mode=mode)
    difference = (decode_resized(data, options).int() - by_pillow(data, options).int()).abs()
    assert difference.float().mean() <= EXACT_TOLERANCE.mean
    assert difference.max() <= EXACT_TOLERANCE.most


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("picture", [photo, drawing])
@pytest.mark.parametrize("subsampling", [0, 2])
def test_jpegs_decoded_at_a_reduced_scale_stay_within_the_stated_tolerance_of_pillow(
    decoder: str, picture: object, mode: str, subsampling: int
) -> None:
    assert callable(picture)
    data = encode(picture(1200, 1600), "JPEG", quality=90, subsampling=subsampling)
    options = ResizeOptions(resolution=(256, 256), interpolation_mode=mode)
    difference = (decode_resized(data, options).int() - by_pillow(data, options).int()).abs()
    assert difference.max() > 2, "nothing was reduced: the fast path is gone"
    assert difference.float().mean() <= REDUCED_TOLERANCE.mean
    assert difference.max() <= REDUCED_TOLERANCE.most


@pytest.mark.parametrize("orientation", [1, 7])
@pytest.mark.parametrize("picture", [photo, drawing])
@pytest.mark.parametrize(("height", "width", "side"), [(1201, 1601, 256), (333, 500, 64)])
def test_a_jpeg_whose_reduced_size_is_rounded_up_is_not_stretched(
    decoder: str, height: int, width: int, side: int, picture: object, orientation: int
) -> None:
    assert callable(picture)
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(height, width), "JPEG", quality=90, exif=exif)
    options = ResizeOptions(resolution=(side, side), interpolation_mode="bilinear")
    upright = decode_image(data)
    whole = image_to_tensor(resize_image(upright, plan_resize(options, (upright.height, upright.width)), "bilinear"))
    difference = (decode_resized(data, options).int() - whole.int()).abs()
    assert difference.float().mean() <= REDUCED_TOLERANCE.mean
    assert difference.max() <= REDUCED_TOLERANCE.most


def test_a_reduced_jpeg_is_never_decoded_below_twice_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_decode, "find", lambda _module: None)
    seen: list[tuple[int, int]] = []

    def spy(plan: ResizePlan, size: Size, decoded: Size, mirrored: Sequence[int]) -> ResizePlan:
        seen.append(decoded)
        return scale_plan(plan, size, decoded, mirrored)

    monkeypatch.setattr(image_decode, "scale_plan", spy)
    for height, width in ((511, 700), (1024, 1024), (1200, 1600), (2049, 2300), (300, 3000)):
        data = encode(Image.new("RGB", (width, height)), "JPEG")
        assert decode_resized(data, ResizeOptions(resolution=(256, 256))).shape == (3, 256, 256)
        decoded = seen.pop()
        assert min(decoded) >= min(512, height, width)
    assert seen == []


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF", "GIF", "BMP"])
def test_every_format_gives_bytes_of_the_right_shape_and_colours(kind: str) -> None:
    frame = decode_resized(encode(quadrants(64, 96), kind), ResizeOptions(resolution=(32, 48)))
    assert (frame.dtype, tuple(frame.shape), frame.is_contiguous()) == (torch.uint8, (3, 32, 48), True)
    corners = frame[:, [4, 4, 27, 27], [4, 43, 4, 43]].T.tolist()
    assert np.abs(np.array(corners) - [[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255]]).max() <= 12


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_exif_orientation_is_applied_by_both_ways_of_decoding(decoder: str, orientation: int, kind: str) -> None:
    undo = [None, Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.ROTATE_180, Image.Transpose.FLIP_TOP_BOTTOM]
    undo += [Image.Transpose.TRANSPOSE, Image.Transpose.ROTATE_90, Image.Transpose.TRANSVERSE, Image.Transpose.ROTATE_270]
    upright = quadrants(128, 192)
    method = undo[orientation - 1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(upright if method is None else upright.transpose(method), kind, exif=exif)
    for size in ((64, 96), (16, 24)):  # the second one is decoded at a reduced scale
        frame = decode_resized(data, ResizeOptions(resolution=size)).float()
        expected = image_to_tensor(upright.resize(size[::-1])).float()
        assert (frame - expected).abs().mean() < 6, f"orientation {orientation} at {size}"
    assert np.abs(np.asarray(decode_image(data)).astype(int) - np.asarray(upright).astype(int)).mean() < 6


def test_vertical_inputs_turn_the_resolution_only_when_asked_and_after_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(quadrants(100, 200), "JPEG", exif=exif)  # shown 200 high, 100 wide
    assert decode_resized(data, ResizeOptions(resolution=(32, 48), allow_vertical=True)).shape == (3, 48, 32)
    assert decode_resized(data, ResizeOptions(resolution=(32, 48))).shape == (3, 32, 48)


def test_sixteen_bit_greys_are_scaled_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    for kind in ("PNG", "TIFF"):
        levels = np.asarray(decode_image(encode(Image.fromarray(ramp), kind)))
        assert levels.shape == (64, 64, 3)
        assert np.abs(levels[..., 0].astype(float) - ramp / 257).max() <= 0.51


def test_float_greys_of_0_to_1_are_scaled_and_others_taken_as_levels() -> None:
    ramp = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
    assert np.asarray(decode_image(encode(Image.fromarray(ramp), "TIFF")))[..., 0].max() == 255
    assert np.asarray(decode_image(encode(Image.fromarray(ramp * 100), "TIFF")))[..., 0].max() == 100


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_alpha_is_dropped_or_composited_on_the_background(mode: str) -> None:
    image = Image.new("RGBA", (8, 8), (200, 200, 200, 0)).convert(mode)
    options: dict[str, int] = {"transparency": 0} if mode == "P" else {}
    if mode == "P":
        image = Image.new("P", (8, 8), 0)
        image.putpalette([200, 200, 200] + [0] * 765)
    data = encode(image, "PNG", **options)
    dropped = DecodeImageTransform("x")({"x": data})["x"]
    white = DecodeImageTransform("x", background=(255, 255, 255))({"x": data})["x"]
    assert (dropped.mode, dropped.getpixel((0, 0))) == ("RGB", (200, 200, 200))
    assert white.getpixel((0, 0)) == (255, 255, 255)


def test_cmyk_and_grey_jpegs_become_rgb(decoder: str) -> None:
    options = ResizeOptions(resolution=(16, 16))
    for mode in ("CMYK", "L"):
        data = encode(quadrants(32, 32).convert(mode), "JPEG", quality=95)
        assert (decode_resized(data, options).int() - by_pillow(data, options).int()).abs().max() <= 2


def test_an_animation_gives_its_first_frame() -> None:
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = encode(frames[0], kind, save_all=True, append_images=frames[1:])
        assert decode_image(data).getpixel((3, 3))[0] > 240  # type: ignore[index]  # an RGB pixel is a tuple


def test_the_steps_one_by_one_give_what_the_fused_transform_gives(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(encode(photo(90, 120)))
    sample: dict[str, Any] = {"image": str(path)}
    steps = [
        DecodeImageTransform("image"),
        ResizeImageTransform("image", resolution=(32, 32)),
        ConvertImageToByteTensorTransform("image"),
    ]
    for step in steps:
        sample = step(sample)
    fused = DecodeResizedImageTransform("image", resolution=(32, 32), interpolation_mode="bilinear")({"image": str(path)})
    assert (sample["image"].int() - fused["image"].int()).abs().max() <= EXACT_TOLERANCE.most


def test_resize_and_normalize_work_on_tensors_and_images_alike() -> None:
    image = photo(60, 80)
    tensor = image_to_tensor(image)
    for mode in ("nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"):
        resize = ResizeImageTransform("x", resolution=(20, 20), interpolation_mode=mode)
        a, b = resize({"x": image})["x"], resize({"x": tensor})["x"]
        assert (image_to_tensor(a).int() - b.int()).abs().max() <= 2, mode
    normal = NormalizeFramesTransform("x")({"x": torch.tensor([0, 255], dtype=torch.uint8)})["x"]
    assert normal.tolist() == [-1.0, 1.0]


def test_letterbox_keeps_the_whole_picture_between_black_bars() -> None:
    frame = decode_resized(encode(Image.new("RGB", (80, 40), "white")), ResizeOptions(resolution=(40, 40), fit="letterbox"))
    assert frame[:, 10:30].min() == 255
    assert frame[:, :10].max() == 0
    assert frame[:, 30:].max() == 0


def test_an_image_as_video_has_one_frame_and_a_framerate() -> None:
    sample = ReshapeImageAsVideoTransform("image", "video")({"image": torch.zeros(3, 4, 5)})
    assert sample["video"].shape == (1, 3, 4, 5)
    assert sample["framerate"] == 960.0


def test_grey_images_get_three_channels() -> None:
    assert ConvertImageToByteTensorTransform("x")({"x": Image.new("L", (3, 2), 7)})["x"].tolist() == [[[7] * 3] * 2] * 3


PICTURES: list[Any] = [
    photo(4, 4).quantize(8),
    photo(4, 4).convert("YCbCr"),
    Image.new("1", (4, 4)),
    Image.new("I;16", (4, 4), 40_000),
]
ARRAYS = [np.full((4, 4, 3), 0.5), np.full((4, 4, 3), 300), np.zeros((4, 4, 4), np.uint8)]


@pytest.mark.parametrize("value", [*PICTURES, *ARRAYS])
def test_values_that_are_no_levels_of_rgb_are_refused(value: Any) -> None:
    what = f"mode {value.mode}" if hasattr(value, "mode") else f"ndarray {value.dtype}"
    for transform, given in (
        (ConvertImageToByteTensorTransform("x"), value),
        (ConvertVideoToByteTensorTransform("x"), [value]),
    ):
        with pytest.raises(TransformError, match=f"expected an image of 3 channels of 8 bits, got {what}"):
            transform({"x": given})
    if hasattr(value, "mode"):
        with pytest.raises(TransformError, match=f"got {what}: decode it to RGB first"):
            ResizeToBucket("x")({"x": value, "__bucket__": (2, 2)})


def test_damaged_bytes_give_a_decode_error_that_names_transform_field_and_sample(decoder: str) -> None:
    whole = encode(photo(64, 64), "JPEG")
    for data in (b"", b"no image", whole[:200], whole[: len(whole) // 2], encode(photo(64, 64))[:-300]):
        for transform in (DecodeResizedImageTransform("jpg", resolution=(8, 8)), DecodeImageTransform("jpg")):
            with pytest.raises(DecodeError, match="jpg") as caught:
                transform({"__sample_key__": "k7", "jpg": data, "caption": "a cat"})
            for part in (type(transform).__name__, "'k7'", "caption: str 'a cat'", f"{len(data)} bytes"):
                assert part in str(caught.value)


def test_postscript_is_refused_because_pillow_would_run_it() -> None:
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
    with pytest.raises(DecodeError, match="PostScript"):
        decode_image(data)


def test_wrong_fields_types_and_options_are_named() -> None:
    with pytest.raises(TransformError, match=r"ResizeImageTransform: field 'image' is missing; sample None holds jpg: bytes"):
        ResizeImageTransform("image", resolution=(8, 8))({"jpg": b"1"})
    with pytest.raises(TransformError, match="expected an image"):
        ResizeImageTransform("image", resolution=(8, 8))({"image": 3})
    with pytest.raises(ConfigError, match=r"ResizeImageTransform has no option 'size': it knows resolution"):
        ResizeImageTransform("image", size=(8, 8))
    with pytest.raises(ConfigError, match="resolution"):
        ResizeImageTransform("image")
    with pytest.raises(ConfigError, match="interpolation_mode='cubic'"):
        ResizeImageTransform("image", resolution=(8, 8), interpolation_mode="cubic")
    with pytest.raises(ConfigError, match="no option 'foo'"):
        DecodeImageTransform("image", foo=1)


def test_what_is_ours_resizes_bicubic_and_what_is_named_as_in_sds_bilinear() -> None:
    assert ResizeOptions(resolution=(8, 8)).interpolation_mode == "bicubic"
    assert DecodeResizedImageTransform("x", resolution=(8, 8)).options.interpolation_mode == "bicubic"
    for transform in (ResizeImageTransform("x", resolution=(8, 8)), ResizeVideoTransform("x", resolution=(8, 8))):
        assert transform.options.interpolation_mode == "bilinear"
    for kwargs, expected in (({}, "bilinear"), ({"interpolation_mode": "bicubic"}, "bicubic")):
        fused = create_standard_image_pipeline("x", (8, 8), resize_kwargs=kwargs)[1]
        assert isinstance(fused, DecodeResizedImageTransform)
        assert fused.options.interpolation_mode == expected


@pytest.mark.parametrize("size", [(1, 1), (37, 50), (2100, 2100)])
def test_pillow_s_memory_is_read_as_it_is_in_one_piece_or_several(size: Size) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    view = rgb_view(image)
    del image  # the view keeps what it needs
    assert np.array_equal(view[:3].permute(1, 2, 0).numpy(), pixels)


def test_a_decoded_image_keeps_no_more_memory_than_its_pixels() -> None:
    for kind in ("JPEG", "PNG"):
        frame = decode_resized(encode(photo(64, 64), kind), ResizeOptions(resolution=(32, 32)))
        assert frame.is_contiguous()
        assert frame.untyped_storage().nbytes() == 3 * 32 * 32
