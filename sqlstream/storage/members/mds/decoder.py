"""Decodes samples of MDS shards, to the types that MosaicML Streaming gives.

    sample    u32 length of each column without a fixed size │ values of all columns, in stored order

Differences from its reader: a value must fill its bytes exactly (there what is left over is ignored), `jpeg_array` of no image
is an empty list (there an error), and pickles are refused unless they are allowed.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import cache, partial
from io import BytesIO
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sqlstream.errors import DecodeError, MissingDependencyError
from sqlstream.storage.members.mds.coders import ADDED
from sqlstream.storage.members.mds.shards import MdsColumn
from sqlstream.storage.members.places import SlicedBytes

if TYPE_CHECKING:
    from PIL.Image import Image

Buffer = bytes | memoryview
ValueDecoder = Callable[[Buffer], Any]
"""From the bytes of a value to the value; may raise anything."""


class MdsDecoder:
    """Decodes samples of shards that have the same columns.

    A column that cannot be decoded (an unknown encoding; `pkl`, unless `allow_pickle`) is an error when it is asked for; the
    others stay readable.

    Args:
        columns: Columns of the shards.
        allow_pickle: Decode the encoding `pkl` too, which runs whatever code the sample names.

    Example:
        >>> decoder = MdsDecoder([MdsColumn("a", "int", 8), MdsColumn("b", "str", None)])
        >>> decoder.decode(bytes.fromhex("03000000 feffffffffffffff 68c3a9"))
        {'a': -2, 'b': 'hé'}
    """

    def __init__(self, columns: Sequence[MdsColumn], *, allow_pickle: bool = False) -> None:
        self.columns = tuple(columns)
        """Columns in stored order."""
        self.names = frozenset(column.name for column in columns)
        self._allow_pickle = allow_pickle
        self.refused = () if allow_pickle else tuple(column.name for column in columns if column.encoding == "pkl")
        """Names of the columns of pickles that are not decoded."""
        self._head = struct.Struct(f"<{sum(column.size is None for column in columns)}I")
        self._least = self._head.size + sum(column.size or 0 for column in columns)
        self._plan = [(column.name, column.size, decoder_of(column.encoding, allow_pickle)) for column in columns]
        self._decoders = {name: decoder for name, _, decoder in self._plan}
        if any(column.encoding in _IMAGES for column in columns):
            with contextlib.suppress(MissingDependencyError):
                _pillow()  # as the shards are opened: forked workers would import it, each in each epoch

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle what it is made of: a Struct does not pickle."""
        return partial(MdsDecoder, allow_pickle=self._allow_pickle), (self.columns,)

    @property
    def head_bytes(self) -> int:
        """First bytes of a sample that say how long its values are."""
        return self._head.size

    def spans(self, head: Buffer, length: int | None = None) -> dict[str, tuple[int, int]]:
        """Return where in a sample the value of each column is: [start, stop).

        Args:
            head: The sample, or its first `head_bytes`.
            length: Bytes of the sample; None: `head` is all of it.

        Raises:
            DecodeError: The sizes do not add up to the sample's.
        """
        lengths = iter(self._lengths(head, len(head) if length is None else length))
        found, start = {}, self._head.size
        for column in self.columns:
            stop = start + (column.size or next(lengths))
            found[column.name] = (start, stop)
            start = stop
        return found

    def decode(self, data: Buffer | SlicedBytes, wanted: Sequence[str] | None = None) -> dict[str, Any]:
        """Return the values of a sample by column, in stored order.

        Args:
            data: The sample, of which only slices are taken.
            wanted: Columns to decode; None: all.

        Raises:
            DecodeError: The sample or a value is damaged; or a column is refused, or not there.
            MissingDependencyError: The column holds images, and Pillow is not installed.
        """
        lengths = iter(self._lengths(data[: self._head.size], len(data)))
        sample, start = {}, self._head.size
        for name, size, decode in self._plan:
            stop = start + (size or next(lengths))
            if wanted is None or name in wanted:
                value = data[start:stop]
                try:
                    sample[name] = decode(value)
                except Exception as error:
                    raise self._named(name, error) from error
            start = stop
        if wanted is not None and len(sample) < len(wanted):
            for name in wanted:
                self._check_there(name)
        return sample

    def decode_value(self, name: str, data: Buffer) -> Any:
        """Return the value of a column.

        Args:
            name: The column.
            data: The value's bytes, `spans` of a sample.

        Raises:
            DecodeError: As of `decode`.
            MissingDependencyError: As of `decode`.
        """
        self._check_there(name)
        try:
            return self._decoders[name](data)
        except Exception as error:
            raise self._named(name, error) from error

    def _check_there(self, name: str) -> None:
        if name not in self._decoders:
            raise DecodeError(f"there is no column {name!r}: the shard has {', '.join(self._decoders)}")

    def _lengths(self, head: Buffer, length: int) -> tuple[int, ...]:
        """Return the bytes of each value whose column has no fixed size."""
        if len(head) < self._head.size:
            raise DecodeError(f"the sample has {length} bytes, fewer than its columns: the shard, or its index, is damaged")
        lengths = self._head.unpack_from(head)
        if self._least + sum(lengths) != length:
            raise DecodeError(
                f"the sample has {length} bytes, its columns {self._least + sum(lengths)}: the shard, or its index, is damaged"
            )
        return lengths

    def _named(self, name: str, error: Exception) -> Exception:
        if isinstance(error, MissingDependencyError):
            return error
        encoding = next(column.encoding for column in self.columns if column.name == name)
        text = str(error) if isinstance(error, DecodeError) else f"{type(error).__name__}: {error}"
        return DecodeError(f"column {name!r} of encoding {encoding!r}: {text}", column=name)


@cache  # the shards of a dataset have few
def decoder_of(encoding: str, allow_pickle: bool) -> ValueDecoder:
    """Return what decodes values of an encoding; where nothing does, what raises that."""
    name, colon, config = encoding.partition(":")
    if name == "ndarray":
        return _array_decoder(config) if colon else _decode_array
    if encoding == "pkl":
        return pickle.loads if allow_pickle else _refuse_pickle
    if encoding in _SCALARS:
        return partial(_decode_scalar, _SCALARS[encoding])
    return _DECODERS.get(encoding) or partial(_decode_added, encoding)


def _refuse_pickle(data: Buffer) -> Any:  # noqa: ARG001
    raise DecodeError(
        "unpickling runs whatever code the sample names: leave the column out, or say allow_pickle=True if you trust its writer"
    )


def _decode_added(encoding: str, data: Buffer) -> Any:
    """Return a value of an encoding that is not MosaicML's: the user may add it at any time, so it is looked up each time."""
    coder = ADDED.coder_of(encoding)
    if coder is None:
        known = ", ".join(sorted(ENCODINGS))
        raise DecodeError(
            f"{encoding!r} is not decoded: leave the column out, write it in one of {known}, or add it in each process that "
            "reads it, as docs/from-mosaicml.md says"
        )
    return coder.decode(bytes(data))


# -- numbers, texts, arrays -------------------------------------------------------------------------------------------

_SCALARS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        name: np.dtype(name).newbyteorder("<")
        for name in "uint8 int8 uint16 int16 float16 uint32 int32 float32 uint64 int64 float64".split()
    }
)
_DTYPES: Mapping[int, np.dtype[Any]] = MappingProxyType(
    dict(zip((8, 9, 16, 17, 18, 32, 33, 34, 64, 65, 66), _SCALARS.values(), strict=True))
)
"""Types of values by their code in arrays."""
_DIMENSIONS = "BHIQ"
"""Types of dimensions by their code, for `struct`."""


def _decode_int(data: Buffer) -> int:
    if len(data) != 8:
        raise DecodeError(f"expected 8 bytes, got {len(data)}")
    return int.from_bytes(data, "little", signed=True)


def _decode_scalar(dtype: np.dtype[Any], data: Buffer) -> np.generic:
    if len(data) != dtype.itemsize:
        raise DecodeError(f"expected {dtype.itemsize} bytes, got {len(data)}")
    value: np.generic = np.frombuffer(data, dtype)[0]
    return value


def _decode_text(data: Buffer) -> str:
    return str(data, "utf-8")


def _array_decoder(config: str) -> ValueDecoder:
    """Return what decodes arrays of a fixed type, `int16`, or of a fixed type and shape, `int16:2,3`."""
    name, _, dimensions = config.partition(":")
    if name not in _SCALARS:
        return partial(_decode_added, f"ndarray:{config}")
    if not dimensions:
        return partial(_decode_shaped, _SCALARS[name], 0)
    try:
        shape = tuple(map(int, dimensions.split(",")))
    except ValueError:
        return partial(_decode_added, f"ndarray:{config}")
    return partial(_decode_values, _SCALARS[name], shape, 0)


def _decode_array(data: Buffer) -> npt.NDArray[Any]:
    """Return an array whose type and shape come first."""
    dtype = _DTYPES.get(data[0])
    if dtype is None:
        raise DecodeError(f"{data[0]} is no type of an array")
    return _decode_shaped(dtype, 1, data)


def _decode_shaped(dtype: np.dtype[Any], at: int, data: Buffer) -> npt.NDArray[Any]:
    """Return an array whose shape is at a place, before its values."""
    num_dimensions, at = data[at] >> 2, at + 1
    code = data[at - 1] & 3
    stop = at + (num_dimensions << code)
    if code == 0:
        return _decode_values(dtype, tuple(data[at:stop]), stop, data)
    return _decode_values(dtype, struct.unpack(f"<{num_dimensions}{_DIMENSIONS[code]}", data[at:stop]), stop, data)


def _decode_values(dtype: np.dtype[Any], shape: tuple[int, ...], at: int, data: Buffer) -> npt.NDArray[Any]:
    """Return an array whose values are behind a place: read-only, and of these bytes alone; numpy compares the sizes."""
    values = np.frombuffer(data if isinstance(data, bytes) else bytes(data), dtype, -1, at)
    return values if values.shape == shape else values.reshape(shape)


# -- images -----------------------------------------------------------------------------------------------------------


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("Pillow is needed to decode images: pip install 'sqlstream-data[image]'") from error
    return Image


def _decode_image(data: Buffer) -> Image:
    """Return an image whose pixels are decoded when they are asked for."""
    image: Image = _pillow().open(BytesIO(data))
    if image.format == "EPS":
        raise DecodeError("PostScript is not decoded: Pillow would run Ghostscript on it")
    return image


def _decode_pixels(data: Buffer) -> Image:
    """Return an image from u32 width, height, length of the mode; mode; pixels."""
    width, height, length = struct.unpack_from("<3I", data)
    mode, pixels = str(data[12 : 12 + length], "utf-8"), data[12 + length :]
    if width * height > 8 * len(pixels):  # mode "1" packs the most; Pillow takes the memory before it compares
        raise DecodeError(f"an image of {width}x{height} does not have {len(pixels)} bytes")
    image: Image = _pillow().frombytes(mode, (width, height), bytes(pixels))
    return image


def _decode_list(decode: ValueDecoder, at: int, data: Buffer) -> list[Any]:
    """Return a list of values from u32 number, at a place; u32 length of each; values."""
    (number,) = struct.unpack_from("<I", data, at)
    if at + 4 + 4 * number > len(data):
        raise DecodeError(f"{number} values do not fit into {len(data)} bytes")
    bounds = list(accumulate(struct.unpack_from(f"<{number}I", data, at + 4), initial=at + 4 + 4 * number))
    if bounds[-1] != len(data):
        raise DecodeError(f"the {number} values of the list end at {bounds[-1]}, its {len(data)} bytes do not")
    return [decode(data[start:stop]) for start, stop in pairwise(bounds)]


_IMAGES: Mapping[str, ValueDecoder] = MappingProxyType(
    {
        "pil": _decode_pixels,
        "jpeg": _decode_image,
        "png": _decode_image,
        "jpeg_array": partial(_decode_list, _decode_image, 0),
        "jpegarray": partial(_decode_list, _decode_image, 0),
        "list[pil]": partial(_decode_list, _decode_pixels, 4),
        "list[jpeg]": partial(_decode_list, _decode_image, 4),
        "list[png]": partial(_decode_list, _decode_image, 4),
    }
)
_DECODERS: Mapping[str, ValueDecoder] = MappingProxyType(
    {
        "bytes": bytes,
        "str": _decode_text,
        "int": _decode_int,
        "str_int": lambda data: int(str(data, "utf-8")),
        "str_float": lambda data: float(str(data, "utf-8")),
        "str_decimal": lambda data: Decimal(str(data, "utf-8")),
        "json": lambda data: json.loads(str(data, "utf-8")),
        **_IMAGES,
    }
)
ENCODINGS = frozenset((*_DECODERS, *_SCALARS, "ndarray", "pkl"))
"""Those of MosaicML Streaming, without what follows a colon."""
