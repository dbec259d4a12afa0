"""Reads files of latents and embeddings: npy, npz, pt, safetensors, each also gzipped, and pickle.

The format is told by the bytes, not by the name. Pickle runs code from the file: only with `allow_pickle=True`.
"""

from __future__ import annotations

import gzip
import io
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from sqlstream.errors import DecodeError, MissingDependencyError
from sqlstream.transforms.field import summary
from sqlstream.transforms.optional import require

_HDF5 = b"\x89HDF\r\n\x1a\n"


def load_tensors(data: bytes, *, allow_pickle: bool = False) -> Any:
    """Return what a file of tensors holds, its arrays as tensors.

    Args:
        data: The file.
        allow_pickle: Unpickle, which runs whatever code the file names. Only for files that you wrote yourself.

    Returns:
        A tensor (npy), or a dict of them (npz, safetensors), or what was saved (pt, pickle). Arrays of one number become
        numbers.

    Raises:
        DecodeError: Unknown format, damaged, or pickle without `allow_pickle`.
    """
    try:
        return to_tensors(_load(data, allow_pickle))
    except (DecodeError, MissingDependencyError):
        raise
    except Exception as error:
        raise DecodeError(f"{len(data)} bytes do not decode as tensors: {type(error).__name__}: {error}") from error


def _load(data: bytes, allow_pickle: bool) -> Any:
    if data.startswith(b"\x1f\x8b"):
        try:
            return _load(gzip.decompress(data), allow_pickle)
        except (OSError, EOFError, zlib.error) as error:
            raise DecodeError(f"{len(data)} bytes do not decode as gzip: {error}") from error
    if data.startswith(b"\x93NUMPY"):
        return _load_numpy(data, allow_pickle)
    if data.startswith(b"PK"):
        return _load_zip(data, allow_pickle)
    if data.startswith(_HDF5):
        raise DecodeError("HDF5 is not read: convert it to safetensors or npz, or load it in a transform of your own")
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") <= len(data):
        return require("safetensors.torch", "latent", "to read safetensors").load(data)
    if data[:1] == b"\x80":
        return _load_pickle(data, allow_pickle)
    raise DecodeError(f"{len(data)} bytes are no npy, npz, pt, safetensors or pickle (they start with {data[:8]!r})")


def _load_numpy(data: bytes, allow_pickle: bool) -> Any:
    try:
        array = np.load(io.BytesIO(data), allow_pickle=allow_pickle)  # [...]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise _pickle_refused("the array holds Python objects") from None
        raise
    if isinstance(array, np.ndarray):
        return array.item() if array.dtype == object and array.ndim == 0 else array
    with array:
        return {name: array[name] for name in array.files}


def _load_zip(data: bytes, allow_pickle: bool) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        is_torch = any(name.rpartition("/")[2] == "data.pkl" for name in archive.namelist())
    return _load_torch(data, allow_pickle) if is_torch else _load_numpy(data, allow_pickle)


def _load_torch(data: bytes, allow_pickle: bool) -> Any:
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle or "weights_only" not in str(error).lower():
            raise
        raise _pickle_refused("the checkpoint holds more than tensors, numbers and dicts of them") from error


def _load_pickle(data: bytes, allow_pickle: bool) -> Any:
    """Load a bare pickle, or the form that torch.save had before version 1.6, which begins like one."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception:
        if not allow_pickle:
            raise _pickle_refused("the file is a pickle") from None
    try:
        return pickle.loads(data)
    except RuntimeError:
        raise
    except pickle.UnpicklingError:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _pickle_refused(what: str) -> DecodeError:
    return DecodeError(
        f"{what}, and unpickling runs whatever code the file names: say allow_pickle=True if you trust who wrote it, "
        "or save it as safetensors, npz or pt of tensors"
    )


def to_tensors(value: Any) -> Any:
    """Return `value` with its arrays as tensors, in dicts and lists too; arrays of one number become numbers, texts lists."""
    if isinstance(value, np.ndarray):
        if value.ndim == 0 or value.dtype.kind not in "biufc":
            return value.tolist()
        native = value.dtype.newbyteorder("=")
        return torch.from_numpy(np.array(value, dtype=native, order="C"))  # a copy: torch needs a writable buffer
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {name: to_tensors(item) for name, item in value.items()}
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return type(value)(to_tensors(item) for item in value)
    return value


def mapping_of(value: Any, what: str) -> Mapping[str, Any]:
    """Return `value`, which must be a mapping.

    Raises:
        DecodeError: It is something else.
    """
    if not isinstance(value, Mapping):
        raise DecodeError(f"expected {what} in a mapping, got {summary(value)}")
    return value


def tensor_in(mapping: Mapping[str, Any], name: str) -> torch.Tensor:
    """Return a tensor of a mapping. # [...].

    Raises:
        DecodeError: It is not there, or no tensor.
    """
    if name not in mapping:
        raise DecodeError(f"there is no {name!r}: the mapping has {', '.join(map(repr, mapping)) or 'nothing'}")
    value = to_tensors(mapping[name])
    if not isinstance(value, torch.Tensor):
        raise DecodeError(f"{name!r} is no tensor but {summary(value)}")
    return value
