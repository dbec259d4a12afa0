"""Values that draw nothing whatever is done with them: what code may name, and ask of any value (`draw_free.py`)."""

from __future__ import annotations

import enum
import re
import sys
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch

from sqlstream.transforms.rng import rng

MODULES = (
    *("base64", "builtins", "io", "json", "math", "os", "os.path", "pathlib", "re", "struct", "zlib"),
    *("numpy", "PIL", "PIL.Image", "PIL.ImageOps", "torch", "torch.nn", "torch.nn.functional"),
)
"""Modules that code may name. Of each it gets at what has a name of the list below, and at modules of this one."""

NAMES = frozenset(
    (
        # builtins
        "ArithmeticError AssertionError AttributeError Exception FileNotFoundError IndexError KeyError LookupError "
        "OSError RuntimeError StopIteration TypeError ValueError abs all any bool bytearray bytes chr complex dict "
        "divmod enumerate filter float frozenset hex int isinstance iter len list map max memoryview min next ord pow "
        "range repr reversed round set slice sorted str sum tuple zip "
        # files, paths and bytes
        "BytesIO Path PathLike PosixPath PurePath StringIO as_posix b64decode b64encode basename calcsize close compress "
        "decompress dirname exists from_bytes fspath getbuffer getsize getvalue is_file join joinpath name open pack "
        "parent path read read_bytes read_text readinto readline readlines seek splitext st_size stat stem suffix "
        "suffixes tell to_bytes unpack unpack_from with_name with_suffix "
        # texts and containers
        "append capitalize casefold clear copy count decode dumps encode endswith extend find get index insert "
        "isalpha isdigit islower isspace isupper items keys loads lower lstrip partition pop remove removeprefix "
        "removesuffix replace reverse rfind rpartition rsplit rstrip setdefault sort split splitlines startswith "
        "strip swapcase title translate update upper values zfill "
        "finditer findall fullmatch group groupdict groups match search "
        # numbers
        "acos asin atan atan2 ceil cos exp floor fsum hypot inf isfinite isinf isnan log log10 log2 nan pi prod sin "
        "sqrt tan tanh trunc "
        # pictures
        "BICUBIC BILINEAR BOX FLIP_LEFT_RIGHT FLIP_TOP_BOTTOM HAMMING Image LANCZOS NEAREST ROTATE_180 ROTATE_270 "
        "ROTATE_90 Resampling Transpose convert crop exif_transpose fit fromarray frombytes getbands height info mode "
        "new paste resize rotate size thumbnail tobytes transpose width "
        # arrays and tensors
        "T Tensor arange argmax argmin array as_tensor asarray ascontiguousarray astype bfloat16 cat chunk clamp clip "
        "clone concatenate contiguous cpu detach device diff div dtype expand expand_dims eye flatten flip float16 "
        "float32 float64 from_numpy frombuffer full functional half int16 int32 int64 int8 interpolate item long mean "
        "moveaxis mul ndarray ndim nn normalize numel numpy one_hot ones ones_like pad permute ravel relu repeat "
        "reshape roll shape squeeze stack std sub subtract swapaxes tensor tile to tolist uint16 uint8 unsqueeze var "
        "view where zeros zeros_like "
    ).split()
)
"""What code may ask of modules of the list, and of any value: nothing that has one of these names draws, whatever has it.

Not `format`: a text that is formatted asks for attributes of any name."""

ATTRIBUTES = NAMES | frozenset(
    "beta choice exponential integers normal permutation permuted random shuffle standard_normal triangular uniform".split()
)
"""What code may ask of any value: with methods of the generator that `rng(sample)` gives, which no other value has."""

PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), slice, torch.dtype, torch.device, torch.Size}
    | {re.Pattern, PosixPath, PurePosixPath, WindowsPath, PureWindowsPath}
)
"""Types of values that have nothing but listed attributes that code could reach, and that call nothing."""


MAX_ITEMS = 128
"""Items of a dict, list or set that are looked at before each sample: 9 µs at most, half of what it may save."""


def listed_modules() -> list[ModuleType]:
    """Return the modules of the list that are imported."""
    return [sys.modules[name] for name in MODULES if name in sys.modules]


def is_plain(value: object) -> bool:
    """Return whether it is a plain value, a tuple or frozenset of such, or an array or tensor without objects."""
    kind = type(value)
    if kind in (tuple, frozenset) and isinstance(value, tuple | frozenset):
        return all(map(is_plain, value))
    if kind is torch.Tensor:
        return vars(value).keys().isdisjoint(ATTRIBUTES)
    if kind is np.ndarray and isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return kind in PLAIN or issubclass(kind, np.dtype)


def has_plain_items(value: object) -> bool:
    """Return whether it is a dict, list or set, such as a table of classes, that has few items and nothing but plain ones."""
    if type(value) is dict:
        return len(value) <= MAX_ITEMS and PLAIN.issuperset(map(type, value)) and PLAIN.issuperset(map(type, value.values()))
    return type(value) in (list, set) and len(value) <= MAX_ITEMS and PLAIN.issuperset(map(type, value))  # type: ignore[arg-type, call-overload]


def is_data(value: object) -> bool:
    """Return whether it is a plain value, or a dict, list, set or tuple of such at any depth."""
    if type(value) is dict:
        return all(map(is_data, (*value, *value.values())))
    return all(map(is_data, value)) if type(value) in (list, set, tuple) else is_plain(value)  # type: ignore[call-overload]


def is_listed(value: Any) -> bool:
    """Return whether it is `rng`, or a module of the list has it under a listed name, and it is that module's own."""
    if value is rng:
        return True
    if issubclass(type(value), enum.Enum):
        value = type(value)
    if not issubclass(type(value), type | FunctionType | BuiltinFunctionType | np.ufunc | type(np.sum)):
        return False
    name = value.__name__
    return name in NAMES and any(vars(module).get(name) is value and _is_own(value, module) for module in listed_modules())


def _is_own(value: Any, module: ModuleType) -> bool:
    """Return whether what a module has was not put there by others, as far as that shows."""
    if type(value) is BuiltinFunctionType:
        return value.__self__ is None or isinstance(value.__self__, ModuleType)
    if type(value) is np.ufunc:
        return True
    # not `__module__` of a function, which a decorator may have copied
    origin = value.__globals__.get("__name__") if type(value) is FunctionType else value.__module__
    return str(origin).partition(".")[0].lstrip("_") == module.__name__.partition(".")[0]
