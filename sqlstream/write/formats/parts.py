"""Parts of samples of archives: the key, and for each extension the bytes, as WebDataset's writer makes them of values.

Differences: `bytes` are stored as they are under any name (there those of `x.gz` are compressed once more); what is compressed
has no time in it, so the same samples give the same bytes; nothing is pickled, unless it is allowed.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import pickle
import struct
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from sqlstream.config import flag_of
from sqlstream.errors import EncodeError, MissingDependencyError
from sqlstream.storage.members.names import split_name

KEY = "__key__"
"""The field of a sample that names it."""
_FIRST = frozenset("json jsn txt text cls cls2 index inx id".split())
"""Small parts that are stored first in a sample: they then come with the headers, when an archive is indexed."""


class SampleFiles(NamedTuple):
    """A sample as files."""

    key: str
    files: tuple[tuple[str, bytes], ...]
    """Extension, content; in stored order."""


class PartEncoder:
    """Encodes samples for archives.

    Args:
        allow_pickle: Encode values of `pkl`, `pickle` and `pyd`, which can run any code where they are read.

    Example:
        >>> PartEncoder().encode({"__key__": "a/1", "jpg": b"...", "cls": 7, "__url__": "x"})
        SampleFiles(key='a/1', files=(('cls', b'7'), ('jpg', b'...')))
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = flag_of("allow_pickle", allow_pickle)

    def encode(self, sample: Mapping[str, Any]) -> SampleFiles:
        """Return the files of a sample. Fields whose names begin with `_` are left out.

        Raises:
            EncodeError: It has no key, a name that no reader would find again, or a value that has no encoder.
        """
        key = sample.get(KEY)
        if not isinstance(key, str) or not key:
            raise EncodeError(f"a sample has the {KEY} {key!r}: give each sample a text that names it")
        files: list[tuple[str, bytes]] = []
        seen: set[str] = set()
        for name, value in sample.items():
            if not isinstance(name, str):
                raise EncodeError(f"sample {key!r} has a part called {name!r}, which is no text: name it by an extension")
            if name[:1] == "_":
                continue
            try:
                data = value if type(value) is bytes else self._encode(name, value)
            except MissingDependencyError:
                raise
            except Exception as error:
                text = str(error) if isinstance(error, EncodeError) else f"{type(error).__name__}: {error}"
                raise EncodeError(f"sample {key!r}: {name!r}, a value of type {type(value).__name__}: {text}") from error
            files.append((name, data))
            seen.add(name.lower())
        if not files:
            raise EncodeError(f"sample {key!r} has no part: give it values under the extensions of its files, such as 'jpg'")
        if len(seen) < len(files):
            raise EncodeError(f"sample {key!r} has an extension in two spellings, which readers take for one: {sorted(sample)}")
        files.sort(key=_order)
        if not _is_text("".join((key, *(name for name, _ in files)))):
            names = ", ".join(repr(name) for name, _ in files)
            raise EncodeError(f"sample {key!r} with {names}: a name has a zero byte, or is no Unicode text: rename it")
        for name, _ in files:
            if not name:
                raise EncodeError(f"sample {key!r} has a part without a name, which readers pass over: name it by an extension")
            if split_name(f"{key}.{name}") != (key, name.lower()):
                raise EncodeError(
                    f"sample {key!r} with {name!r}: readers split names at the first dot of their last part, and pass over "
                    "those that begin with a dot or '__': rename the key"
                )
        return SampleFiles(key, tuple(files))

    def _encode(self, name: str, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        kind = name.lower()
        is_packed = kind.endswith(".gz")
        kind = kind.removesuffix(".gz").rpartition(".")[2]
        if isinstance(value, str):
            data = value.encode()
        elif kind in _PICKLES and self._allow_pickle:
            data = pickle.dumps(value)
        else:
            data = _encoder(kind)(value)
        return gzip.compress(data, mtime=0) if is_packed else data


def _is_text(name: str) -> bool:
    """Return whether archives have names with these characters: Python's ZIP cuts a name at a zero byte."""
    if name.isascii():
        return "\0" not in name
    try:
        return b"\0" not in name.encode()
    except UnicodeEncodeError:
        return False


def _order(file: tuple[str, bytes]) -> tuple[bool, str]:
    return file[0].rpartition(".")[2].lower() not in _FIRST, file[0]


def _encoder(kind: str) -> Callable[[Any], bytes]:
    if kind in _PICKLES:
        raise EncodeError("pickles run any code where they are read: give bytes, npy or json, or say allow_pickle=True")
    if kind not in _ENCODERS:
        raise EncodeError(f"values of {kind!r} have no encoder: give bytes; there are encoders for {', '.join(_ENCODERS)}")
    return _ENCODERS[kind]


def _as_text(value: Any) -> bytes:
    if value is None:
        raise EncodeError("there is no value")
    return str(value).encode()


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _as_npy(value: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, _array(value), allow_pickle=False)
    return file.getvalue()


def _array(value: Any) -> Any:
    if isinstance(value, np.ma.MaskedArray):
        raise EncodeError("a masked array: the format has no place for its mask: give array.filled(…)")
    return np.asanyarray(value)


def _as_npz(value: Any) -> bytes:
    if not isinstance(value, Mapping):
        raise EncodeError("expected a dict of arrays")
    file = io.BytesIO()
    np.savez_compressed(file, **{str(name): _array(array) for name, array in value.items()})
    return file.getvalue()


def _as_tensors(value: Any) -> bytes:
    """Return an array, or a list of arrays, in WebDataset's tenbin, whose layout `transforms/decode_by_extension.py` has."""
    chunks: list[bytes] = []
    for array in map(_array, value if isinstance(value, list | tuple) else [value]):
        kind = array.dtype.newbyteorder("<").str[1:]
        if kind not in _TENSOR_KINDS:
            raise EncodeError(f"an array of type {array.dtype}: tenbin has integers, and floats of 16, 32 and 64 bits: cast it")
        head = struct.pack(f"<8s8sq{array.ndim}q", kind.encode(), b"", array.ndim, *array.shape)
        chunks += [head, array.astype(f"<{kind}").tobytes()]
    return b"".join(b"~TenBin~" + struct.pack("<q", len(chunk)) + chunk + bytes(-len(chunk) % 64) for chunk in chunks)


def _as_image(layout: str, value: Any) -> bytes:
    """Return an image file of an image of Pillow or of an array: [h, w] or [h, w, 3], bytes or floats from 0 to 1."""
    if isinstance(value, np.ndarray):
        value = _from_array(value)
    if not hasattr(value, "save"):
        raise EncodeError("expected an image of Pillow, an array, or bytes")
    file = io.BytesIO()
    value.save(file, format=layout, **({"quality": 100} if layout == "JPEG" else {}))
    return file.getvalue()


def _from_array(array: Any) -> Any:
    if array.dtype.kind == "f":
        if array.size and not -0.001 < float(array.min()) <= float(array.max()) < 1.001:
            raise EncodeError(f"values from {array.min()} to {array.max()}: those of an image of floats are 0 to 1")
        array = (np.clip(array, 0.0, 1.0) * 255.0).astype(np.uint8)
    try:
        from PIL import Image
    except ImportError as error:
        raise MissingDependencyError("Pillow is needed to encode images: pip install 'sqlstream-data[image]'") from error
    return Image.fromarray(array[..., 0] if array.ndim == 3 and array.shape[2] == 1 else array)


def _packed(package: str, function: str, value: Any) -> bytes:
    try:
        module = importlib.import_module(package)
    except ImportError as error:
        raise MissingDependencyError(f"{package} is needed to write records: pip install 'sqlstream-data[shards]'") from error
    data: bytes = getattr(module, function)(value)
    return data


_TENSOR_KINDS = frozenset("f2 f4 f8 i1 i2 i4 i8 u1 u2 u4 u8".split())
_PICKLES = frozenset("pkl pickle pyd".split())
_ENCODERS: Mapping[str, Callable[[Any], bytes]] = MappingProxyType(
    {
        **dict.fromkeys("cls cls2 class count index inx id".split(), _as_text),
        **dict.fromkeys("json jsn".split(), _as_json),
        "npy": _as_npy,
        "npz": _as_npz,
        **dict.fromkeys("ten tenbin tb".split(), _as_tensors),
        **dict.fromkeys("mp msgpack msg".split(), partial(_packed, "msgpack", "packb")),
        "cbor": partial(_packed, "cbor2", "dumps"),
        **dict.fromkeys("jpg jpeg img image".split(), partial(_as_image, "JPEG")),
        "png": partial(_as_image, "PNG"),
        **dict.fromkeys("pbm pgm ppm".split(), partial(_as_image, "PPM")),
        **dict.fromkeys("tif tiff".split(), partial(_as_image, "TIFF")),
    }
)
"""Encoders by extension, as in WebDataset."""
