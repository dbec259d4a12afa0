"""Decodes fields by their names, which are extensions of files: what WebDataset's `decode` does, and what wids does.

    .gz stripped ─ image? ─ text, number, JSON, array, … ─ else the bytes stay

| last extension | value |
|---|---|
| txt text transcript | str |
| cls cls2 index inx id | int |
| json jsn | the value |
| npy, npz | array, dict of arrays |
| ten tb | list of arrays |
| mp msg, cbor | the value |
| pkl pickle pyd, pth | the object, with `allow_pickle=True` |
| an extension that Pillow reads | as `images` says |

All else stays as it is, also what others write and WebDataset does not read back (class, count, html, msgpack, tenbin, …), and
videos and sounds: their own transforms read only what they need.
"""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from sqlstream.errors import ConfigError, DecodeError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import is_content, read_bytes
from sqlstream.transforms.field import summary, with_names
from sqlstream.transforms.image_decode import open_image
from sqlstream.transforms.optional import PILLOW, import_ahead, require


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageForm:
    """What images become."""

    container: str
    """`numpy` ([h, w, c], or [h, w] for L), `torch` ([c, h, w], or [h, w] for L) or `pil`."""
    mode: str | None
    """Pillow's mode; None: the file's."""
    is_float: bool = False
    """float32 of 0 to 1, not uint8."""


_MODES = {"l": "L", "rgb": "RGB", "rgba": "RGBA"}
IMAGE_FORMS: Mapping[str, ImageForm] = MappingProxyType(
    {
        **{f"{name}8": ImageForm(container="numpy", mode=mode) for name, mode in _MODES.items()},
        **{name: ImageForm(container="numpy", mode=mode, is_float=True) for name, mode in _MODES.items()},
        **{f"torch{name}8": ImageForm(container="torch", mode=mode) for name, mode in _MODES.items()},
        **{f"torch{name}": ImageForm(container="torch", mode=mode, is_float=True) for name, mode in _MODES.items()},
        "torch": ImageForm(container="torch", mode="RGB", is_float=True),
        "pil": ImageForm(container="pil", mode="RGB"),
        **{f"pil{name}": ImageForm(container="pil", mode=mode) for name, mode in _MODES.items()},
        "wids-pil": ImageForm(container="pil", mode=None),
        "wids-numpy": ImageForm(container="numpy", mode=None),
    }
)
"""Forms of images by WebDataset's names; those of wids have `wids-` before them."""
IMAGE_EXTENSIONS = frozenset(
    """
    blp bmp dib bufr cur pcx dcx dds ps eps fit fits fli flc ftc ftu gbr gif grib h5 hdf png apng jp2 j2k jpc jpf jpx j2c icns
    ico im iim tif tiff jfif jpe jpg jpeg mpg mpeg msp pcd pxr pbm pgm ppm pnm psd bw rgb rgba sgi ras tga icb vda vst webp wmf
    emf xbm xpm
    """.split()
)
"""What WebDataset takes for images; some of them Pillow cannot open (mpg, h5, fits, …), which is an error there and here."""
WIDS_IMAGE_EXTENSIONS = frozenset("jpg png ppm pgm pbm pnm".split())


class DecodeByExtension:
    """Decodes each field whose name is an extension (`jpg`, `seg.png`, `meta.json.gz`, `.txt`), by its last one, in place.

    Fields that begin with `__`, None, and fields of other names stay as they are; so do images without `images`. Images are
    converted by Pillow without regard to EXIF: under `rgb8` an RGBA image loses its alpha.

    Args:
        images: One of `l8 rgb8 rgba8` (uint8 arrays), `l rgb rgba` (float32 of 0 to 1), each of them with `torch` before it
            (tensors `[c, h, w]`), `torch` (as torchrgb), `pil` (as pilrgb), `pill`, `pilrgb`, `pilrgba`; or `wids-pil`,
            `wids-numpy`: wids' own, shorter table of extensions, and images as they are stored. None: images stay bytes.
        allow_pickle: Decode pkl, pickle, pyd, pth and pt too, which run whatever code the file names.
        only: Names of the fields to decode, as a list or as one text with spaces; None: all.
        partial: Leave fields alone that hold no content, as `index_members` or another transform has decoded them already;
            False: an error.
        max_inflated_bytes: Largest content of a gzipped field: of a few kilobytes any number can be made.

    Example:
        >>> sample = {"__key__": "a", "cls": b"3", "json": b"[1]", "meta.txt": b"caption", "width": 512}
        >>> DecodeByExtension("pil")(sample)
        {'__key__': 'a', 'cls': 3, 'json': [1], 'meta.txt': 'caption', 'width': 512}

    Source: the table of `webdataset/autodecode.py` (1.0.2) and of `wids_decode.py` (0.1.11).
    """

    def __init__(
        self,
        images: str | None = None,
        *,
        allow_pickle: bool = False,
        only: Sequence[str] | str | None = None,
        partial: bool = False,
        max_inflated_bytes: int = 1 << 30,
    ) -> None:
        if images is not None and images not in IMAGE_FORMS:
            raise ConfigError(f"DecodeByExtension: images={images!r} is not one of {', '.join(IMAGE_FORMS)}")
        if images is not None:
            import_ahead(*PILLOW)
        self.images = images
        self.allow_pickle = allow_pickle
        self.only = None if only is None else tuple(only.split() if isinstance(only, str) else only)
        self.partial = partial
        self.max_inflated_bytes = max_inflated_bytes

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the fields decoded.

        Raises:
            DecodeError: The content of a field does not decode, it is a pickle, or the field holds no content.
            MissingDependencyError: A package that decodes a field is not installed.
        """
        for field in sample:  # values change, keys do not
            if field.startswith("__") or (self.only is not None and field not in self.only):
                continue
            inner, is_zipped = self._unzipped_name(field)
            decode = self._decoder_of(inner.rpartition(".")[2].lower())
            value = sample[field]
            if value is None or (decode is None and not is_zipped):
                continue
            if not is_content(value) and not isinstance(value, bytearray | memoryview):
                if self.partial:
                    continue
                raise with_names(_no_content(value), self, sample, field)
            try:
                data = read_bytes(value)
                data = _inflate(data, self.max_inflated_bytes) if is_zipped else data
                sample[field] = data if decode is None else decode(data)
            except Exception as error:
                raise with_names(_undecodable(error), self, sample, field) from error
        return sample

    def _unzipped_name(self, field: str) -> tuple[str, bool]:
        """Return the name before `.gz`, and whether there is one; wids does not unzip what has no other extension."""
        if self._is_wids:
            return field.removesuffix(".gz"), field.endswith(".gz") and field != ".gz"
        return ("." + field).removesuffix(".gz"), ("." + field).endswith(".gz")

    @property
    def _is_wids(self) -> bool:
        return self.images is not None and self.images.startswith("wids")

    def _decoder_of(self, extension: str) -> Callable[[bytes], Any] | None:
        form = None if self.images is None else IMAGE_FORMS[self.images]
        if form is not None and extension in (WIDS_IMAGE_EXTENSIONS if self._is_wids else IMAGE_EXTENSIONS):
            return lambda data: _decode_image(form, data)
        if extension in (_WIDS_PICKLES if self._is_wids else _PICKLES) and not self.allow_pickle:
            return _refuse_pickle
        return (_WIDS_DECODERS if self._is_wids else _DECODERS).get(extension)


def _no_content(value: Any) -> DecodeError:
    return DecodeError(
        f"expected the content of a file, got {summary(value)}: if index_members or another transform has decoded it, say "
        "partial=True or name the fields to decode in only=[…]; load a path with LoadFromDiskTransform first"
    )


def _undecodable(error: Exception) -> Exception:
    if isinstance(error, DecodeError | ImportError):
        return error
    return DecodeError(f"{type(error).__name__}: {error}")


def _refuse_pickle(data: bytes) -> Any:  # noqa: ARG001
    raise DecodeError(
        "unpickling runs whatever code the file names: say DecodeByExtension(allow_pickle=True) if you trust its writer, or "
        "name the other fields in only=[…]"
    )


def _inflate(data: bytes, max_bytes: int) -> bytes:
    with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
        content = stream.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise DecodeError(f"{len(data)} bytes of gzip hold more than max_inflated_bytes={max_bytes}")
    return content


# -- values -----------------------------------------------------------------------------------------------------------


def _decode_image(form: ImageForm, data: bytes) -> Any:
    image = open_image(data)
    image.load()
    if form.mode is not None:
        image = image.convert(form.mode)
    if form.container == "pil":
        return image
    pixels = np.array(image)  # [h, w] or [h, w, c], writable
    if form.is_float:
        pixels = pixels.astype(np.float32) / 255  # [h, w] or [h, w, c]
    if form.container == "numpy":
        return pixels
    return torch.from_numpy(pixels if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _decode_text(data: bytes) -> str:
    return data.decode("utf-8")


def _decode_npy(data: bytes) -> Any:
    return np.lib.format.read_array(io.BytesIO(data))  # without pickle


def _decode_npz(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data)) as arrays:  # without pickle
        return dict(arrays)


def _decode_message_pack(data: bytes) -> Any:
    return require("msgpack", "shards", "to decode MessagePack").unpackb(data)


def _decode_cbor(data: bytes) -> Any:
    return require("cbor2", "shards", "to decode CBOR").loads(data)


def _decode_safetensors(data: bytes) -> Any:
    return require("safetensors.torch", "latent", "to read safetensors").load(data)


def _decode_torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)  # only with allow_pickle


_TENSOR_MAGIC = b"~TenBin~"
_TENSOR_TYPES = frozenset("f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8".split())


def _decode_tensors(data: bytes) -> list[np.ndarray[Any, Any]]:
    """Return the arrays of WebDataset's tenbin: chunks (magic, i64 length, bytes padded to 64), a header before each array.

    A header has the type (`f4` in 8 bytes), a name of 8 bytes, i64 number of dimensions, i64 of each.

    Raises:
        DecodeError: It is none, or cut off.
    """
    chunks, at = [], 0
    while at < len(data):
        magic, length = struct.unpack_from("<8sq", data, at)
        at += 16
        if magic != _TENSOR_MAGIC or not 0 <= length <= len(data) - at:
            raise DecodeError(f"{len(data)} bytes are no tenbin, or cut off: there is no whole chunk at {at - 16}")
        chunks.append(data[at : at + length])
        at += -(-length // 64) * 64
    if len(chunks) % 2:
        raise DecodeError("tenbin has a header without an array at its end")
    return [_decode_tensor(header, values) for header, values in zip(chunks[::2], chunks[1::2], strict=True)]


def _decode_tensor(header: bytes, values: bytes) -> np.ndarray[Any, Any]:
    written, _, num_dimensions = struct.unpack_from("<8s8sq", header)
    name = written.rstrip(b"\0").decode("ascii", "replace")
    if name not in _TENSOR_TYPES or len(header) != 24 + 8 * num_dimensions:
        raise DecodeError(f"tenbin has an array of type {name!r} and {num_dimensions} dimensions in a header of {len(header)}")
    shape = struct.unpack_from(f"<{num_dimensions}q", header, 24)
    if min(shape, default=0) < 0:
        raise DecodeError(f"tenbin has an array of shape {list(shape)}")
    return np.frombuffer(values, f"<{name}").reshape(shape).copy()  # writable


_PICKLES = frozenset("pkl pickle pyd pth".split())
_WIDS_PICKLES = frozenset("pkl pickle pth pt".split())
_NUMBERS = "cls cls2 index inx id".split()
_DECODERS: Mapping[str, Callable[[bytes], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("txt", "text", "transcript"), _decode_text),
        **dict.fromkeys(_NUMBERS, int),
        **dict.fromkeys(("json", "jsn"), json.loads),
        **dict.fromkeys(("ten", "tb"), _decode_tensors),
        **dict.fromkeys(("mp", "msg"), _decode_message_pack),
        "npy": _decode_npy,
        "npz": _decode_npz,
        "cbor": _decode_cbor,
        **dict.fromkeys(("pkl", "pickle", "pyd"), pickle.loads),
        "pth": _decode_torch,
    }
)
_WIDS_DECODERS: Mapping[str, Callable[[bytes], Any]] = MappingProxyType(
    {
        **dict.fromkeys(("txt", "text"), _decode_text),
        **dict.fromkeys(("cls", "cls2"), int),
        "json": json.loads,
        "npy": _decode_npy,
        "mp": _decode_message_pack,
        "safetensors": _decode_safetensors,
        **dict.fromkeys(("pkl", "pickle"), pickle.loads),
        **dict.fromkeys(("pth", "pt"), _decode_torch),
    }
)
