"""A sample as bytes and back: one safetensors file, tensors as tensors, the rest as JSON in its metadata; no pickle.

Any safetensors tool can read a stored sample. A decoded sample equals the encoded one, types included: tuples, bytes, arrays,
Pillow images, dicts with keys that are no texts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch

from sqlstream.errors import DecodeError, TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.field import holds, summary
from sqlstream.transforms.optional import require
from sqlstream.transforms.rng import PRIVATE_FIELDS

_MARK = "__sqlstream__"
"""Key of a JSON object that stands for something that JSON does not have."""
_ARRAY_MODES = frozenset(("1", "L", "LA", "RGB", "RGBA", "I", "F", "I;16"))
"""Modes of Pillow that an array of its pixels tells; of others it says neither which colours they are, nor the palette."""
_INFO = ("transparency", "exif", "icc_profile")
"""What an image says beside its pixels that changes them when it is converted, turned or shown."""
_COMPLEX = " as pairs"
"""End of the names of tensors that are pairs of a real and an imaginary part."""
_STORED = frozenset(
    {torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64}
    | {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64}
    | {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
)
"""Types that safetensors reads: others of 8 bits or less it writes and does not read, or torch cannot copy them."""
_HEADER = 8
"""Bytes of a safetensors file that hold the length of its header."""


def encode_sample(sample: Sample) -> bytes:
    """Return a sample as bytes, its generator left out.

    Raises:
        TransformError: A field holds something that is neither JSON nor a tensor; it names the field.
        MissingDependencyError: safetensors is not installed.
    """
    save = require("safetensors.torch", "latent", "to store samples").save
    tensors: dict[str, torch.Tensor] = {}  # [...] each
    document = {}
    for field, value in sample.items():
        if field in PRIVATE_FIELDS:
            continue
        try:
            if not isinstance(field, str):
                raise TypeError(f"its name is {type(field).__name__}, and no text")
            document[str(field)] = _encode(value, tensors)
        except TypeError as error:
            raise TransformError(
                f"CacheTransform: field {field!r} cannot be stored: {error}; drop it before, or make it a tensor; "
                f"{holds(sample)}"
            ) from error
    try:
        data: bytes = save(tensors, metadata={_MARK: json.dumps(document)})
    except KeyError as error:  # an older safetensors has fewer types
        raise TransformError(
            f"CacheTransform: a tensor of type {error.args[0]} cannot be stored, safetensors has no such type; "
            f"drop it before, or make it another type; {holds(sample)}"
        ) from error
    return data


def decode_sample(data: bytes) -> Sample:
    """Return the sample that `encode_sample` made bytes of.

    Raises:
        DecodeError: The bytes are damaged, or something else.
    """
    load = require("safetensors.torch", "latent", "to read stored samples").load
    try:
        length = int.from_bytes(data[:_HEADER], "little")
        metadata = json.loads(data[_HEADER : _HEADER + length])["__metadata__"]
        tensors = load(data)
        return {field: _decode(value, tensors) for field, value in json.loads(metadata[_MARK]).items()}
    except Exception as error:
        raise DecodeError(f"{len(data)} bytes are no stored sample: {type(error).__name__}: {error}") from error


def _encode(value: Any, tensors: dict[str, torch.Tensor]) -> Any:  # [...] each
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_encode(item, tensors) for item in value]
    if type(value) is dict and all(type(key) is str for key in value) and _MARK not in value:
        return {key: _encode(item, tensors) for key, item in value.items()}
    return _encode_marked(value, tensors)


def _encode_marked(  # noqa: PLR0911 - one line for each kind of value
    value: Any,
    tensors: dict[str, torch.Tensor],  # [...] each
) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {_MARK: "tensor", "of": _keep(value, tensors)}
    if (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc" and not hasattr(value, "mask")
    ):  # it would be lost
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        native = np.array(value, dtype=value.dtype.newbyteorder("="), order="C")  # [...]
        return {_MARK: kind, "of": _keep(torch.from_numpy(native), tensors)}
    if isinstance(value, bytes | bytearray):
        return {
            _MARK: "bytes",
            "of": _keep(torch.frombuffer(bytearray(value or b"\0"), dtype=torch.uint8)[: len(value)], tensors),
        }
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_MARK: "tuple", "of": [_encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {_MARK: "dict", "of": [[_encode(key, tensors), _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, PurePath):
        return {_MARK: "path", "of": str(value)}
    if isinstance(value, str):
        return {_MARK: "str", "of": str(value)}
    if hasattr(value, "getbands") and hasattr(value, "tobytes"):
        return _encode_image(value, tensors)
    raise TypeError(f"{summary(value)} is neither JSON nor a tensor")


def _encode_image(image: Any, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:  # [...] each
    info = {name: _encode(image.info[name], tensors) for name in _INFO if name in image.info}
    known = {"mode": image.mode, **({"info": info} if info else {})}
    if image.mode in _ARRAY_MODES:
        return {_MARK: "image", **known, "of": _keep(torch.from_numpy(np.array(image)), tensors)}
    palette = None if image.palette is None else (image.palette.mode, bytes(image.getpalette(image.palette.mode)))
    return {
        _MARK: "pixels",
        **known,
        "size": image.size,
        "palette": _encode(palette, tensors),
        "of": _encode(image.tobytes(), tensors),
    }


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:  # [...]
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise TypeError(f"a tensor that is {'quantized' if tensor.is_quantized else 'sparse'} is neither JSON nor dense")
    name = str(len(tensors))
    if tensor.dtype in (torch.complex32, torch.complex128):  # which safetensors does not have
        tensor, name = torch.view_as_real(tensor.resolve_conj()), f"{name}{_COMPLEX}"  # [..., 2]
    if tensor.dtype not in _STORED:
        raise TypeError(f"safetensors has no tensors of {tensor.dtype}, whose bytes x.view(torch.uint8) has")
    tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)  # safetensors refuses shared memory
    return name


def _decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:  # [...] each
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _MARK not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    return _DECODERS[value[_MARK]](value, tensors)


def _decode_image(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:  # [...] each
    image = require("PIL.Image", "image", "to read a stored image").fromarray(tensors[value["of"]].numpy())
    if image.mode != value["mode"]:
        raise ValueError(f"an image of mode {value['mode']} that an earlier version stored, without what its pixels stand for")
    image.info.update(_decode(value.get("info", {}), tensors))
    return image


def _decode_pixels(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:  # [...] each
    pillow = require("PIL.Image", "image", "to read a stored image")
    image = pillow.frombytes(value["mode"], tuple(value["size"]), _decode(value["of"], tensors))
    if value["palette"] is not None:
        mode, palette = _decode(value["palette"], tensors)
        image.putpalette(palette, mode)
    image.info.update(_decode(value.get("info", {}), tensors))
    return image


def _tensor(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:  # [...] each
    name = value["of"]
    return torch.view_as_complex(tensors[name]) if name.endswith(_COMPLEX) else tensors[name]  # [...]


_DECODERS: Mapping[str, Any] = {
    "tensor": _tensor,
    "array": lambda value, tensors: _tensor(value, tensors).numpy(),
    "scalar": lambda value, tensors: _tensor(value, tensors).numpy()[()],
    "bytes": lambda value, tensors: tensors[value["of"]].numpy().tobytes(),
    "tuple": lambda value, tensors: tuple(_decode(value["of"], tensors)),
    "dict": lambda value, tensors: {_decode(key, tensors): _decode(item, tensors) for key, item in value["of"]},
    "path": lambda value, tensors: Path(value["of"]),  # noqa: ARG005
    "str": lambda value, tensors: value["of"],  # noqa: ARG005
    "image": _decode_image,
    "pixels": _decode_pixels,
}
