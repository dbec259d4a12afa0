"""Encodes samples of MDS shards: the bytes that `storage.members.mds.decoder` decodes, and MosaicML Streaming writes.

    sample    u32 length of each column without a fixed size │ values of all columns, in stored order

As there, `bytes` are stored as they are under any encoding: a JPEG that is at hand is not encoded again. Differences: arrays
whose bytes are big endian are swapped (there they are stored as they are, and read wrong), integers of numpy are taken for
`int` and `str_int`, and bytes that do not fit a column of a fixed size are an error that names it.
"""

from __future__ import annotations

import json
import operator
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from io import BytesIO
from types import MappingProxyType
from typing import Any

import numpy as np

from sqlstream.config import flag_of
from sqlstream.errors import ConfigError, EncodeError
from sqlstream.storage.members.mds.coders import ADDED
from sqlstream.storage.members.mds.shards import MdsColumn

ValueEncoder = Callable[[Any], bytes]
"""From a value to its bytes; may raise anything."""
_JOINED_BYTES = 1 << 12
"""A sample up to this size is one piece: as many small objects cost more than the copy."""
_MAX_LENGTH = 2**32 - 1


class MdsEncoder:
    """Encodes samples.

    Args:
        columns: Encodings by name.
        allow_pickle: Take the encoding `pkl`, whose samples can run any code where they are read.

    Raises:
        ConfigError: An encoding is unknown, or `pkl` is not allowed.

    Example:
        >>> b"".join(MdsEncoder({"b": "str", "a": "int"}).encode({"a": -2, "b": "hé"})[0]).hex(" ", -4)
        '03000000 feffffff ffffffff 68c3a9'
    """

    def __init__(self, columns: Mapping[str, str], *, allow_pickle: bool = False) -> None:
        if not isinstance(columns, Mapping) or not columns:
            raise ConfigError(f"columns={columns!r}: give names and encodings, such as {{'image': 'jpeg', 'label': 'int'}}")
        for name, encoding in columns.items():
            if not isinstance(name, str) or not isinstance(encoding, str):
                raise ConfigError(f"columns has {name!r}: {encoding!r}: names and encodings are texts")
        if not flag_of("allow_pickle", allow_pickle) and (pickled := [name for name in columns if columns[name] == "pkl"]):
            raise ConfigError(
                f"column {pickled[0]!r} has the encoding pkl, which runs any code where it is read: take json, ndarray or "
                "bytes, or say allow_pickle=True"
            )
        made = {name: encoder_of(name, columns[name]) for name in sorted(columns)}
        self.columns = tuple(MdsColumn(name, columns[name], made[name][1]) for name in made)
        """Columns in stored order."""
        self._plan = [(name, encode, size) for name, (encode, size) in made.items()]
        self._head = struct.Struct(f"<{sum(size is None for _, _, size in self._plan)}I")

    def encode(self, sample: Mapping[str, Any]) -> tuple[list[bytes], int]:
        """Return the pieces of a sample, and their bytes in all.

        Args:
            sample: Values by column; others are left out.

        Raises:
            EncodeError: A column is missing, or a value does not fit its encoding.
        """
        lengths: list[int] = []
        pieces = [b""]
        name = ""
        try:
            for name, encode, size in self._plan:
                value = sample[name]
                data = value if type(value) is bytes else encode(value)
                if size is None:
                    lengths.append(len(data))
                elif len(data) != size:
                    raise EncodeError(f"it has {len(data)} bytes, and all values of the column have {size}")
                pieces.append(data)
            pieces[0] = self._head.pack(*lengths)
        except Exception as error:
            raise self._named(name, sample, error) from error
        num_bytes = sum(map(len, pieces))
        return ([b"".join(pieces)] if num_bytes <= _JOINED_BYTES else pieces), num_bytes

    def _named(self, name: str, sample: Mapping[str, Any], error: Exception) -> EncodeError:
        if name not in sample:
            there = ", ".join(map(str, sample)) or "nothing"
            return EncodeError(f"the sample lacks the column {name!r}; it has {there}", column=name)
        encoding = next(column.encoding for column in self.columns if column.name == name)
        if sample[name] is None:
            return EncodeError(
                f"column {name!r} of encoding {encoding!r} has None, which only 'json' and 'pkl' hold: fill it in (coalesce in "
                "SQL), or leave such samples out",
                column=name,
            )
        text = str(error) if isinstance(error, EncodeError) else f"{type(error).__name__}: {error}"
        value = type(sample[name]).__name__
        return EncodeError(f"column {name!r} of encoding {encoding!r}, a value of type {value}: {text}", column=name)


def encoder_of(column: str, encoding: str) -> tuple[ValueEncoder, int | None]:
    """Return what encodes values of an encoding, and the bytes of each, if they are fixed.

    Raises:
        ConfigError: The encoding is unknown.
    """
    name, colon, config = encoding.partition(":")
    try:
        if name == "ndarray":
            return _array_encoder(config) if colon else (_encode_array, None)
        if encoding in _SCALARS:
            return partial(_encode_scalar, _SCALARS[encoding]), _SCALARS[encoding].itemsize
        if encoding not in _ENCODERS and (added := ADDED.coder_of(encoding)) is not None:
            return added.encode, added.size
        return _ENCODERS[encoding], 8 if encoding == "int" else None
    except (KeyError, ValueError):
        known = ", ".join((*_ENCODERS, *_SCALARS, "ndarray", "ndarray:int16", "ndarray:int16:2,3", *ADDED.names()))
        raise ConfigError(f"column {column!r}: encoding {encoding!r} is unknown: give one of {known}") from None


# -- numbers, texts, arrays -------------------------------------------------------------------------------------------

_CODES: Mapping[str, int] = MappingProxyType(
    dict(
        zip(
            "uint8 int8 uint16 int16 float16 uint32 int32 float32 uint64 int64 float64".split(),
            (8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66),
            strict=True,
        )
    )
)
"""Codes of types in arrays."""
_SCALARS: Mapping[str, np.dtype[Any]] = MappingProxyType({name: np.dtype(name).newbyteorder("<") for name in _CODES})


def _check_type(value: object, *types: type) -> None:
    if not isinstance(value, types):
        raise EncodeError(f"expected {' or '.join(kind.__name__ for kind in types)}")


def _encode_bytes(value: Any) -> bytes:
    _check_type(value, bytes, bytearray, memoryview)
    return bytes(value)


def _encode_text(value: Any) -> bytes:
    _check_type(value, str)
    return bytes(value, "utf-8")


def _encode_int(value: Any) -> bytes:
    number = operator.index(value)
    try:
        return struct.pack("<q", number)
    except struct.error:
        raise EncodeError(f"{number} is beyond 64 bits with a sign: give the column 'uint64' or 'str_int'") from None


def _whole_number(value: Any) -> int:
    """Return the whole number that a value is exactly, of what the peer casts: floats, numpy's bools, arrays of one value."""
    if isinstance(value, np.ndarray) and value.size == 1 and not isinstance(value, np.ma.MaskedArray):
        value = value.item()
    if isinstance(value, np.bool_) or (isinstance(value, float | np.floating) and float(value).is_integer()):
        return int(value)
    return operator.index(value)


def _encode_scalar(dtype: np.dtype[Any], value: Any) -> bytes:
    if dtype.kind != "f":
        return bytes(np.array(_whole_number(value), dtype).tobytes())  # a number out of range raises
    with np.errstate(over="ignore"):  # float16(1e9) is infinite, as there
        return bytes(np.float64(value).astype(dtype).tobytes())


def _encode_digits(value: Any) -> bytes:
    return b"%d" % operator.index(value)


def _encode_float_text(value: Any) -> bytes:
    _check_type(value, float)
    return str(float(value)).encode()


def _encode_decimal(value: Any) -> bytes:
    _check_type(value, Decimal)
    return str(value).encode()


def _encode_json(value: Any) -> bytes:
    return json.dumps(value.tolist() if isinstance(value, np.ndarray) else value).encode()


def _array_encoder(config: str) -> tuple[ValueEncoder, int | None]:
    """Return what encodes arrays of a fixed type, `int16`, or of a fixed type and shape, `int16:2,3`."""
    name, _, dimensions = config.partition(":")
    dtype = _SCALARS[name]
    if not dimensions:
        return partial(_encode_typed, name), None
    shape = tuple(map(int, dimensions.split(",")))
    if min(shape) < 1:
        raise ValueError(shape)
    return partial(_encode_shaped, name, shape), int(np.prod(shape)) * dtype.itemsize


def _checked_array(name: str | None, value: Any) -> Any:
    _check_type(value, np.ndarray)
    if isinstance(value, np.ma.MaskedArray):
        raise EncodeError("a masked array: the format has no place for its mask: give array.filled(…)")
    if value.dtype.name not in _CODES or name not in (None, value.dtype.name):
        raise EncodeError(f"an array of {value.dtype.name}: expected {name or ', '.join(_CODES)}")
    if not value.size:
        raise EncodeError("an array without elements cannot be written")
    return value


def _values(value: Any) -> bytes:
    data: bytes = value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes()
    return data


def _shape_head(shape: tuple[int, ...]) -> bytes:
    if not 0 < len(shape) < 64:
        raise EncodeError(f"an array of {len(shape)} dimensions: expected 1 to 63; a number has an encoding of its own")
    code = next(code for code in range(4) if max(shape) < 1 << (8 << code))
    return struct.pack(f"<B{len(shape)}{'BHIQ'[code]}", len(shape) << 2 | code, *shape)


def _encode_array(value: Any) -> bytes:
    array = _checked_array(None, value)
    return bytes([_CODES[array.dtype.name]]) + _shape_head(array.shape) + _values(array)


def _encode_typed(name: str, value: Any) -> bytes:
    array = _checked_array(name, value)
    return _shape_head(array.shape) + _values(array)


def _encode_shaped(name: str, shape: tuple[int, ...], value: Any) -> bytes:
    array = _checked_array(name, value)
    if array.shape != shape:
        raise EncodeError(f"an array of the shape {array.shape}: expected {shape}")
    return _values(array)


# -- images -----------------------------------------------------------------------------------------------------------


def _check_image(value: Any) -> None:
    if not (hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "save")):
        raise EncodeError("expected an image of Pillow, or bytes")


def _encode_pixels(value: Any) -> bytes:
    _check_image(value)
    pixels: bytes = value.tobytes()
    if value.mode in ("P", "PA") and value.convert("RGBA").tobytes() != _without_palette(value, pixels):
        raise EncodeError(f"an image of mode {value.mode}: the format has no place for its palette: give image.convert('RGB')")
    mode = value.mode.encode()
    return struct.pack("<3I", *value.size, len(mode)) + bytes(mode) + pixels


def _without_palette(value: Any, pixels: bytes) -> bytes:
    """Return the colours that a reader would see."""
    from PIL import Image

    colours: bytes = Image.frombytes(value.mode, value.size, pixels).convert("RGBA").tobytes()
    return colours


def _encode_jpeg(value: Any) -> bytes:
    """Return a JPEG: of an image that is as its file has it, the file, which loses nothing."""
    _check_image(value)
    return _file_of(value) or _saved("JPEG", value)


def _file_of(value: Any) -> bytes | None:
    """Return the JPEG file that an image was opened from; None: there is none, or the image is another one by now.

    Methods such as `thumbnail` and `paste` change an image in place, which then has its name and format still; and another file
    may have taken its name. An image that was not read yet, nor asked for at another size (`draft`), cannot have changed.
    """
    if value.format != "JPEG" or not getattr(value, "filename", ""):
        return None
    from PIL import Image

    file = getattr(value, "fp", None)
    if value.tile and not value.decoderconfig and file is not None:
        place = file.tell()
        file.seek(0)
        data: bytes = file.read()
        file.seek(place)
        return data
    try:
        with open(value.filename, "rb") as named:
            data = named.read()
        with Image.open(BytesIO(data)) as image:
            is_same = (image.mode, image.size) == (value.mode, value.size) and image.tobytes() == value.tobytes()
    except OSError:  # it is gone, or is none: its pixels are here
        return None
    return data if is_same else None


def _encode_png(value: Any) -> bytes:
    _check_image(value)
    return _saved("PNG", value)


def _saved(layout: str, value: Any) -> bytes:
    file = BytesIO()
    value.save(file, format=layout)
    return file.getvalue()


def _encode_list(encode: ValueEncoder, head: bytes, value: Any) -> bytes:
    """Return u32 number; u32 length of each; values, behind a head."""
    _check_type(value, list, tuple)
    items = [item if isinstance(item, bytes) else encode(item) for item in value]
    return head + struct.pack(f"<{1 + len(items)}I", len(items), *map(len, items)) + b"".join(items)


_ENCODERS: Mapping[str, ValueEncoder] = MappingProxyType(
    {
        "bytes": _encode_bytes,
        "str": _encode_text,
        "int": _encode_int,
        "str_int": _encode_digits,
        "str_float": _encode_float_text,
        "str_decimal": _encode_decimal,
        "json": _encode_json,
        "pkl": pickle.dumps,
        "pil": _encode_pixels,
        "jpeg": _encode_jpeg,
        "png": _encode_png,
        "jpeg_array": partial(_encode_list, _encode_bytes, b""),
        "jpegarray": partial(_encode_list, _encode_bytes, b""),
        "list[pil]": partial(_encode_list, _encode_pixels, bytes(4)),
        "list[jpeg]": partial(_encode_list, _encode_jpeg, bytes(4)),
        "list[png]": partial(_encode_list, _encode_png, bytes(4)),
    }
)


def column_lists(columns: Sequence[MdsColumn]) -> dict[str, Any]:
    """Return columns as an index has them."""
    return {
        "column_names": [column.name for column in columns],
        "column_encodings": [column.encoding for column in columns],
        "column_sizes": [column.size for column in columns],
    }
