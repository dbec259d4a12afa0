"""Whether transforms can draw from the global generators of python, numpy and torch, as their bytecode says.

To seed these for each sample takes longer than to read a small file, so it is left out where it would change nothing. That is
never inferred from samples, for a transform may draw first at its thousandth: it is inferred from code. Code gets at nothing
but what its names lead to. So a function is draw-free if each global and closure variable that it loads is a plain value, a
module or function of the lists below or a draw-free function, if each attribute that it asks for has a name of the list, and
if it takes from `self` nothing but plain values and draw-free methods. Its argument is a sample, whose values are such values,
or were made of them by transforms of the same chain.

Everything else counts as drawing: a name that is not listed, an import, a generator function, `self` passed on. Names may be
bound anew while a run goes on: what the answer rests on is therefore compared before each sample.

Rejected: to run the transforms first and to seed and repeat them where they have drawn (their own changes, such as a counter,
would come twice); types and data flow (one more list, of what each function returns).
"""

from __future__ import annotations

import builtins
import dis
import enum
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import PosixPath, PurePosixPath, PureWindowsPath, WindowsPath
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

_MODULES = (
    *("base64", "builtins", "io", "json", "math", "os", "os.path", "pathlib", "struct", "zlib"),
    *("numpy", "PIL", "PIL.Image", "PIL.ImageOps", "torch", "torch.nn", "torch.nn.functional"),
)
"""Modules that code may name. Of each it gets at what has a name of the list below, and at modules of this one."""

_NAMES = frozenset(
    (
        # builtins
        "ArithmeticError AssertionError AttributeError Exception FileNotFoundError IndexError KeyError LookupError "
        "OSError RuntimeError StopIteration TypeError ValueError abs all any bool bytearray bytes chr complex dict "
        "divmod enumerate filter float frozenset hex int isinstance iter len list map max memoryview min next ord pow "
        "range repr reversed round set slice sorted str sum tuple zip "
        # files, paths and bytes
        "BytesIO Path PosixPath PurePath StringIO as_posix b64decode b64encode basename calcsize close compress "
        "decompress dirname exists from_bytes fspath getbuffer getsize getvalue is_file join joinpath name open pack "
        "parent path read read_bytes read_text readinto readline readlines seek splitext st_size stat stem suffix "
        "suffixes tell to_bytes unpack unpack_from with_name with_suffix "
        # texts and containers
        "append capitalize casefold clear copy count decode dumps encode endswith extend find format get index insert "
        "isalpha isdigit islower isspace isupper items keys loads lower lstrip partition pop remove removeprefix "
        "removesuffix replace reverse rfind rpartition rsplit rstrip setdefault sort split splitlines startswith "
        "strip swapcase title translate update upper values zfill "
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
"""What code may ask of modules of the list, and of any value: nothing that has one of these names draws, whatever has it."""

_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), torch.dtype, torch.device, torch.Size, torch.Tensor}
    | {PosixPath, PurePosixPath, WindowsPath, PureWindowsPath}
)
"""Types of values that have nothing but listed attributes that code could reach, and that call nothing."""

_REFUSED = ("IMPORT_", "LOAD_BUILD_CLASS", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "LOAD_LOCALS", "LOAD_NAME", "MATCH_CLASS")
"""Beginnings of the names of instructions that get at what is not looked into here."""
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")
"""Instructions, up to Python 3.14, that end with a local variable on the stack."""
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR")
_OWN, _SUPER = "self", "super"
_GENERATOR_FLAGS = 0x20 | 0x80 | 0x100 | 0x200
"""Those of `inspect`: generators, coroutines and asynchronous generators."""


class _MayDrawError(Exception):
    """Ends an analysis: something may draw."""


class DrawFree:
    """Says of transforms, each of which was shown to draw nothing, whether what that rests on still holds."""

    __slots__ = ("_of_plain_type", "_same")

    def __init__(
        self, same: Iterable[tuple[Callable[[Any], Any], Any, Any]], of_plain_type: Iterable[tuple[Callable[[Any], Any], Any]]
    ) -> None:
        self._same = tuple(same)
        """Functions, their argument, and what they must still return."""
        self._of_plain_type = tuple(of_plain_type)
        """Functions, their argument: what they return must still be a plain value."""

    def holds(self) -> bool:
        """Return whether the transforms still draw nothing."""
        for get, of, value in self._same:
            if get(of) is not value:
                return False
        return all([type(get(of)) in _PLAIN for get, of in self._of_plain_type])  # noqa: C419 - a generator costs more


def draw_free(transforms: Iterable[Callable[..., Any]]) -> DrawFree | None:
    """Return what shows that none of the transforms draws from a global generator; None: one may."""
    analysis = _Analysis()
    try:
        for transform in transforms:
            analysis.add_callable(transform)
    except _MayDrawError:
        return None
    return DrawFree(analysis.same, analysis.of_plain_type)


class _Analysis:
    """Goes through all code that transforms may call."""

    def __init__(self) -> None:
        self.same: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.of_plain_type: list[tuple[Callable[[Any], Any], Any]] = []
        self._known: set[tuple[int, int]] = set()
        """Ids of functions, and of what they are methods of: they may call each other."""

    def add_callable(self, called: Any) -> None:
        """Go through what is called: a function, a method, a `functools.partial`, an object with `__call__`."""
        if isinstance(called, FunctionType):
            self.add_function(called, None)
        elif type(called) is MethodType:
            self.add_function(called.__func__, called.__self__)
        elif type(called) is partial:
            self.add_callable(called.func)
            if not all(map(_is_plain, (*called.args, *called.keywords.values()))):
                raise _MayDrawError
        else:
            self.add_attribute(called, "__call__", of_class=True)

    def add_function(self, function: Any, owner: object) -> None:
        """Go through a function; as a method of `owner`, if that is not None."""
        if not isinstance(function, FunctionType) or function.__code__.co_flags & _GENERATOR_FLAGS:
            raise _MayDrawError
        if (id(function), id(owner)) in self._known:
            return
        self._known.add((id(function), id(owner)))
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        if not all(map(_is_plain, defaults)):
            raise _MayDrawError
        self.same.append((function.__getattribute__, "__code__", function.__code__))
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        _Code(self, function.__globals__, owner).add(function.__code__, cells)

    def add_attribute(self, owner: object, name: str, *, of_class: bool = False) -> None:
        """Go through what `owner.name` is: a plain value, a method or a property."""
        kind = type(owner)
        if isinstance(owner, type) or any(
            "__getattr__" in vars(base) or "__getattribute__" in vars(base) for base in kind.__mro__[:-1]
        ):
            raise _MayDrawError
        self.same.append((type, owner, kind))
        base = next((base for base in kind.__mro__ if name in vars(base)), None)
        found = None if base is None else vars(base)[name]
        values: Mapping[str, Any] = getattr(owner, "__dict__", {})
        if base is not None and isinstance(found, FunctionType | staticmethod | property) and (of_class or name not in values):
            self._add_found(owner, found)
            self.same.append((vars(base).get, name, found))
            before = kind.__mro__[: kind.__mro__.index(base)]
            self.same.extend((vars(other).get, name, None) for other in before)
            if hasattr(owner, "__dict__") and not of_class:
                self.same.append((values.get, name, None))
        else:
            self.add_value(partial(getattr, owner), name, getattr(owner, name, _MayDrawError))

    def add_inherited(self, owner: object, name: str) -> None:
        """Go through all that `super().name` may be."""
        found = [(vars(base).get, vars(base)[name]) for base in type(owner).__mro__[:-1] if name in vars(base)]
        if not found:
            raise _MayDrawError
        for get, value in found:
            self._add_found(owner, value)
            self.same.append((get, name, value))

    def _add_found(self, owner: object, found: object) -> None:
        if isinstance(found, property):
            self.add_function(found.fget, owner)
        elif isinstance(found, staticmethod):
            self.add_function(found.__func__, None)
        else:
            self.add_function(found, owner)

    def add_value(self, get: Callable[[Any], Any], name: Any, value: Any) -> None:
        """Go through the value that code gets by a name; `get(name)` returns it."""
        if type(value) in _PLAIN:
            self.of_plain_type.append((get, name))
            return
        if not (_is_plain(value) or _is_listed(value)):
            if not isinstance(value, FunctionType | MethodType | partial):
                raise _MayDrawError
            self.add_callable(value)
        self.same.append((get, name, value))


class _Code:
    """Goes through the instructions of a function, and of the functions inside of it.

    Args:
        analysis: Takes what the answer rests on.
        names: The function's globals.
        owner: What the function is a method of; None: of nothing.
    """

    def __init__(self, analysis: _Analysis, names: dict[str, Any], owner: object) -> None:
        self._analysis = analysis
        self._globals = names
        self._owner = owner
        self._own_name: str | None = None
        """Name of the argument that is the owner."""
        self._top: ModuleType | str | None = None
        """What is known of the value that the last instruction has put on the stack: a module, `_OWN` or `_SUPER`."""

    def add(self, code: CodeType, cells: Mapping[str, CellType]) -> None:
        """Go through `code`, whose closure variables are `cells`, as far as these are of outside of the whole function."""
        if self._owner is not None and code.co_argcount:
            self._own_name = code.co_varnames[0]
            if self._own_name in code.co_cellvars:
                raise _MayDrawError
        for instruction in dis.get_instructions(code):
            if instruction.opname in ("EXTENDED_ARG", "NOP", "PUSH_NULL"):
                continue
            top, self._top = self._top, None
            if instruction.is_jump_target:  # another value may be there
                if top in (_OWN, _SUPER):
                    raise _MayDrawError
                top = None
            self._add_instruction(instruction, top, cells)

    def _add_instruction(
        self, instruction: dis.Instruction, top: ModuleType | str | None, cells: Mapping[str, CellType]
    ) -> None:
        operation, name = instruction.opname, instruction.argval
        if operation.startswith(_REFUSED):
            raise _MayDrawError
        if operation in _ATTRIBUTES:
            self._add_attribute(top, name)
        elif "FAST" in operation and self._own_name in (names := name if isinstance(name, tuple) else (name,)):
            if not operation.startswith(_LOADS) or self._own_name in names[:-1]:
                raise _MayDrawError
            self._top = _SUPER if top == _SUPER else _OWN
        elif top == _SUPER and (operation in ("PRECALL", "CALL") or (operation == "LOAD_DEREF" and name == "__class__")):
            self._top = _SUPER
        elif top == _OWN and operation == "COPY" and instruction.arg == 1:  # `self.number += 1`
            self._top = _OWN
        elif top == _SUPER or (top == _OWN and operation not in ("STORE_ATTR", "DELETE_ATTR")):
            raise _MayDrawError
        elif operation == "LOAD_GLOBAL":
            is_super = name == "super" and self._own_name is not None and name not in self._globals
            self._top = _SUPER if is_super else self._module_or_value(self._globals, name)
        elif operation == "LOAD_DEREF" and name in cells:
            self._add_cell(cells[name])
        elif isinstance(name, CodeType):
            inner = {inner: cells[inner] for inner in name.co_freevars if inner in cells}
            _Code(self._analysis, self._globals, None).add(name, inner)

    def _add_attribute(self, top: ModuleType | str | None, name: str) -> None:
        if top == _SUPER:
            self._analysis.add_inherited(self._owner, name)
        elif top == _OWN:
            self._analysis.add_attribute(self._owner, name)
        elif isinstance(top, ModuleType):
            self._top = self._module_or_value(vars(top), name)
        elif name not in _NAMES:
            raise _MayDrawError

    def _module_or_value(self, values: Mapping[str, Any], name: str) -> ModuleType | None:
        """Go through a global, or what a module has; return it if it is a module, of which a value may be taken next."""
        if values is self._globals and name not in values:
            self._analysis.same.append((values.get, name, None))
            values = vars(builtins)
        value = values.get(name, _MayDrawError)
        if isinstance(value, ModuleType) and value.__name__ in _real_names():
            self._analysis.same.append((values.get, name, value))
            return value
        self._analysis.add_value(values.get, name, value)
        return None

    def _add_cell(self, cell: CellType) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # empty still
            raise _MayDrawError from None
        self._analysis.add_value(partial(getattr, cell), "cell_contents", value)


def _real_names() -> frozenset[str]:
    """Return how modules of the list call themselves (`os.path` is posixpath)."""
    return frozenset(sys.modules[name].__name__ for name in _MODULES if name in sys.modules)


def _is_plain(value: object) -> bool:
    """Return whether it is a plain value, a tuple of such, or an array without objects."""
    if type(value) is tuple:
        return all(map(_is_plain, value))
    return type(value) in _PLAIN or isinstance(value, np.dtype) or (type(value) is np.ndarray and not value.dtype.hasobject)


def _is_listed(value: Any) -> bool:
    """Return whether a module of the list has it under a name of the other list, and it is that module's own."""
    if isinstance(value, enum.Enum):
        return _is_listed(type(value))
    name = getattr(value, "__name__", None)
    if not isinstance(name, str) or name not in _NAMES:
        return False
    for module_name in _MODULES:
        module = sys.modules.get(module_name)
        if module is not None and vars(module).get(name) is value:
            return (
                not isinstance(value, FunctionType) or value.__module__.partition(".")[0] == module.__name__.partition(".")[0]
            )
    return False
