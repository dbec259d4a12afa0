"""Whether transforms can draw from the global generators of python, numpy and torch, as their bytecode says.

To seed these for each sample takes longer than to read a small file, so it is left out where it would change nothing. That is
never inferred from samples, for a transform may draw first at its thousandth: it is inferred from code. Code gets at nothing
but what its names lead to. So a function is draw-free if each global and closure variable that it loads is a plain value, a
dict, list or set of a few of these, a module or function of the lists of `harmless.py`, `rng`, a draw-free function, or an
object that it only calls, and whose `__call__` is draw-free, if each attribute that it asks for has a name of the list, and if
it takes from `self` nothing but such values and draw-free methods. Its argument is a sample, whose values are such values, or
were made of them by transforms of the same chain.

Everything else counts as drawing: a name that is not listed, an import, a generator function, `self` or a module passed on,
an attribute of `self` that runs code as it is asked for or stored (descriptors, `__getattr__`, `__setattr__`; properties are
gone through). Names may be bound anew while a run goes on: what the answer rests on is therefore compared before each sample.

Taken for granted: methods of the classes of the listed modules are these modules' own, and transforms of ours keep the
functions that they were given (`GivenCode`).

Rejected: to run the transforms first and to seed and repeat them where they have drawn (their own changes, such as a counter,
would come twice); types and data flow (one more list, of what each function returns).
"""

from __future__ import annotations

import builtins
import dis
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from sqlstream.transforms.bytecode import ATTRIBUTE_LOADS, is_called_at_once, is_called_later
from sqlstream.transforms.grounds import DrawFree, Grounds
from sqlstream.transforms.harmless import ATTRIBUTES, PLAIN, has_plain_items, is_listed, is_plain, listed_modules

_REFUSED = ("IMPORT_", "LOAD_BUILD_CLASS", "LOAD_CLASSDEREF", "LOAD_FROM_DICT", "LOAD_LOCALS", "LOAD_NAME", "MATCH_CLASS")
"""Beginnings of the names of instructions that get at what is not looked into here."""
_LOADS = ("LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "STORE_FAST_LOAD_FAST")
"""Instructions, up to Python 3.14, that end with a local variable on the stack."""
_STORES = ("STORE_ATTR", "DELETE_ATTR")
_OWN, _SUPER = "self", "super"
_GENERATOR_FLAGS = 0x20 | 0x80 | 0x100 | 0x200
"""Those of `inspect`: generators, coroutines and asynchronous generators."""


_CODE, _DEFAULTS, _KEYWORD_DEFAULTS = map(operator.attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
_NO_VALUES: dict[str, Any] = {}
_BASES, _OWN_VALUES, _BUILTINS = map(operator.attrgetter, ("__mro__", "__dict__", "__builtins__"))


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCode:
    """What a transform of ours calls of the user's (its `given_code`); without it the transform itself is gone through."""

    called: tuple[Callable[..., Any], ...] = ()
    """Functions, methods and objects that it holds, and calls."""
    asked: tuple[tuple[object, str], ...] = ()
    """Objects, and names of attributes that it asks for and calls each time, or gets a plain value by."""
    ours: frozenset[Any] = frozenset()
    """Functions of ours that these may call, and that draw nothing: all that they ask of `self` is in `asked`."""


class _MayDrawError(Exception):
    """Ends an analysis: something may draw."""


def draw_free(transforms: Iterable[Callable[..., Any] | GivenCode]) -> DrawFree | None:
    """Return what shows that none of the transforms draws from a global generator; None: one may."""
    analysis = _Analysis()
    try:
        for transform in transforms:
            if isinstance(transform, GivenCode):
                analysis.add_given(transform)
            else:
                analysis.add_callable(transform)
    except (_MayDrawError, RecursionError):  # functions that call one another may go deeper than this can follow
        return None
    return DrawFree(analysis.grounds)


class _Analysis:
    """Goes through all code that transforms may call."""

    def __init__(self) -> None:
        self.grounds = Grounds()
        self._known: set[tuple[int, int]] = set()
        """Ids of functions, and of what they are methods of: they may call each other."""
        self._found: dict[tuple[int, str], object] = {}
        """What classes, by id, have by a name."""
        self._owners: set[int] = set()
        self._class_values: dict[type, Mapping[str, Any]] = {}
        self._ours: set[Any] = set()
        """Functions that draw nothing."""

    def add_given(self, given: GivenCode) -> None:
        """Go through what a transform of ours calls: it passes no method on, so what a method is of is not asked for."""
        self._ours |= given.ours
        for owner, name in given.asked:
            self.add_attribute(owner, name, is_called=True)
        for called in given.called:
            if type(called) is MethodType:
                self.add_function(called.__func__, called.__self__)
            elif not is_listed(called):  # `int`, say
                self.add_callable(called)

    def add_callable(self, called: Any) -> None:
        """Go through what is called: a function, a method, a `functools.partial`, an object with `__call__`."""
        if type(called) is FunctionType:
            self.add_function(called, None)
        elif type(called) is MethodType:
            self._add_bound(called.__self__)
            self.add_function(called.__func__, called.__self__)
        elif type(called) is partial:
            if vars(called) or not all(map(is_plain, (*called.args, *called.keywords.values()))):
                raise _MayDrawError
            self.add_callable(called.func)
            self.grounds.same.append((len, vars(called), 0))
            self._add_keywords(called.keywords)
        else:
            self._add_found(called, self._of_class(called, "__call__"), is_called=True)

    def add_function(self, function: Any, owner: object) -> None:
        """Go through a function; as a method of `owner`, if that is not None."""
        if type(function) is FunctionType and function in self._ours:
            return
        if type(function) is not FunctionType or function.__code__.co_flags & _GENERATOR_FLAGS:
            raise _MayDrawError
        if (id(function), id(owner)) in self._known:
            return
        self._known.add((id(function), id(owner)))
        names, own, keyword_defaults = function.__globals__, function.__dict__, function.__kwdefaults__ or {}
        if (
            type(names) is not dict  # another dict may give values that it does not have
            or _BUILTINS(function) is not vars(builtins)
            or not own.keys().isdisjoint(ATTRIBUTES)
            or not all(map(is_plain, (*(function.__defaults__ or ()), *keyword_defaults.values())))
        ):
            raise _MayDrawError
        self.grounds.same += [
            (_CODE, function, function.__code__),
            (_DEFAULTS, function, function.__defaults__),
            (_KEYWORD_DEFAULTS, function, function.__kwdefaults__),
            (len, own, len(own)),
        ]
        self._add_keywords(keyword_defaults)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        _Code(self, names, owner).add(function.__code__, cells)

    def _add_keywords(self, values: dict[str, Any]) -> None:
        if values:
            self.grounds.same.append((len, values, len(values)))
        for name, value in values.items():
            self.add_value(values.__getitem__, name, value)

    def add_attribute(self, owner: object, name: str, *, is_called: bool) -> None:
        """Go through what `owner.name` is: a plain value, a function, a method or a property.

        Args:
            owner: The object.
            name: The attribute's name.
            is_called: Code calls it at once: a method does not get elsewhere.
        """
        found = self._of_class(owner, name)
        if type(found) is MemberDescriptorType:  # of `__slots__`
            self.add_value(partial(getattr, owner), name, getattr(owner, name, _MayDrawError), is_called=is_called)
        elif type(found) is property:
            self.add_function(found.fget, owner)
        elif type(found) not in (FunctionType, staticmethod) and not is_plain(found):  # other descriptors may run any code
            raise _MayDrawError
        elif name in (values := getattr(owner, "__dict__", _NO_VALUES)):
            self.add_value(values.__getitem__, name, values[name], is_called=is_called)
        elif found is None:
            raise _MayDrawError
        elif is_plain(found):  # `self.number += 1`, where the class has the first one
            self.grounds.of_plain_type.append((values.get, name))
        else:
            self.grounds.absent.append((values, name))
            self._add_found(owner, found, is_called=is_called)

    def add_inherited(self, owner: object, name: str, *, is_called: bool) -> None:
        """Go through all that `super().name` may be."""
        if self._of_class(owner, name) is None or name in vars(object):
            raise _MayDrawError
        for base in type(owner).__mro__[:-1]:
            if name in (values := self._values_of(base)):
                self._add_found(owner, values[name], is_called=is_called)
                self.grounds.same.append((values.get, name, values[name]))
            else:
                self.grounds.absent.append((values, name))

    def add_store(self, owner: object, name: str) -> None:
        """Look whether storing or deleting `owner.name` runs code."""
        for special in ("__setattr__", "__delattr__"):
            if self._of_class(owner, special) is not vars(object)[special]:
                raise _MayDrawError
        found = self._of_class(owner, name)
        if type(found) not in (FunctionType, MemberDescriptorType) and not is_plain(found):  # None: the classes have none
            raise _MayDrawError

    def add_value(self, get: Callable[[Any], Any], name: Any, value: Any, *, is_called: bool = False) -> None:
        """Go through the value that code gets by a name; `get(name)` returns it.

        Args:
            get: Returns it.
            name: The name.
            value: It.
            is_called: Code calls it at once: an object gets nowhere else.
        """
        if type(value) in PLAIN:
            self.grounds.of_plain_type.append((get, name))
            return
        if has_plain_items(value):
            self.grounds.containers.append(value)
        elif not (is_plain(value) or is_listed(value)):
            if not is_called and type(value) not in (FunctionType, MethodType, partial):
                raise _MayDrawError
            self.add_callable(value)
        self.grounds.same.append((get, name, value))

    def _of_class(self, owner: object, name: str) -> object:
        """Return what the classes of `owner` have by a name, as it lies there; None: nothing, or None."""
        kind = type(owner)
        if id(owner) not in self._owners:
            self._owners.add(id(owner))
            self.grounds.same.append((type, owner, kind))
            self.grounds.same.append((_BASES, kind, kind.__mro__))
            ways = self._of_class(owner, "__getattribute__"), self._of_class(owner, "__getattr__")
            if ways != (vars(object)["__getattribute__"], None) or issubclass(kind, type):
                raise _MayDrawError
            if hasattr(owner, "__dict__"):
                self.grounds.same.append((_OWN_VALUES, owner, owner.__dict__))
        if (id(kind), name) not in self._found:
            self._found[id(kind), name] = None
            for base in kind.__mro__:
                if name in vars(base):
                    self._found[id(kind), name] = found = vars(base)[name]
                    if type(found) in PLAIN:
                        self.grounds.of_plain_type.append((self._values_of(base).__getitem__, name))
                    elif base is not object:
                        self.grounds.same.append((self._values_of(base).get, name, found))
                    break
                if base is not object:
                    self.grounds.absent.append((self._values_of(base), name))
        return self._found[id(kind), name]

    def _values_of(self, kind: type) -> Mapping[str, Any]:
        """Return `vars(kind)`, the same one each time: methods of two are never equal, so checks would come twice."""
        return self._class_values.setdefault(kind, vars(kind))

    def _add_found(self, owner: object, found: object, *, is_called: bool) -> None:
        """Go through what a class has."""
        if type(found) is property:
            self.add_function(found.fget, owner)
        elif type(found) is staticmethod:
            self.add_function(found.__func__, None)
        else:
            if not is_called:
                self._add_bound(owner)
            self.add_function(found, owner)

    def _add_bound(self, owner: object) -> None:
        """Look whether a method of `owner` may be passed on: where it is shown, `owner` is."""
        if self._of_class(owner, "__repr__") is not vars(object)["__repr__"]:
            raise _MayDrawError


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
        if self._owner is not None:
            if not code.co_argcount or code.co_varnames[0] in code.co_cellvars:  # `self` is in `*args`, or in a closure
                raise _MayDrawError
            self._own_name = code.co_varnames[0]
        if not all(type(value) is CodeType or is_plain(value) for value in code.co_consts):
            raise _MayDrawError  # no compiler makes these
        instructions = [*dis.get_instructions(code)]
        for number, instruction in enumerate(instructions):
            if instruction.is_jump_target and self._top is not None:  # another value may be there
                raise _MayDrawError
            if instruction.opname in ("EXTENDED_ARG", "NOP", "PUSH_NULL"):
                continue
            top, self._top = self._top, None
            if isinstance(top, ModuleType) and instruction.opname not in ATTRIBUTE_LOADS:  # it is passed on
                raise _MayDrawError
            self._add_instruction(instructions, number, top, cells)

    def _add_instruction(
        self, instructions: Sequence[dis.Instruction], number: int, top: ModuleType | str | None, cells: Mapping[str, CellType]
    ) -> None:
        instruction = instructions[number]
        operation, name = instruction.opname, instruction.argval
        if operation.startswith(_REFUSED):
            raise _MayDrawError
        if operation in ATTRIBUTE_LOADS:
            self._add_attribute(top, name, is_called=is_called_at_once(instruction))
        elif operation in _STORES and top != _SUPER:
            self._add_store(name)
        elif "FAST" in operation and self._own_name in (names := name if isinstance(name, tuple) else (name,)):
            if not operation.startswith(_LOADS) or self._own_name in names[:-1]:
                raise _MayDrawError
            self._top = _SUPER if top == _SUPER else _OWN
        elif top == _SUPER and (operation in ("PRECALL", "CALL") or (operation == "LOAD_DEREF" and name == "__class__")):
            self._top = _SUPER
        elif top == _OWN and operation == "COPY" and instruction.arg == 1:  # `self.number += 1`
            self._top = _OWN
        elif top is not None:
            raise _MayDrawError
        elif operation == "LOAD_GLOBAL" and name == "super" and self._own_name is not None and name not in self._globals:
            self._top = self._add_super()
        elif operation == "LOAD_GLOBAL":
            self._top = self._module_or_value(self._globals, name, is_called=is_called_later(instructions[number:]))
        elif operation == "LOAD_DEREF" and name in cells:
            self._add_cell(cells[name], is_called=is_called_later(instructions[number:]))
        elif isinstance(name, CodeType):
            inner = {inner: cells[inner] for inner in name.co_freevars if inner in cells}
            _Code(self._analysis, self._globals, None).add(name, inner)

    def _add_attribute(self, top: ModuleType | str | None, name: str, *, is_called: bool) -> None:
        if top == _SUPER:
            self._analysis.add_inherited(self._owner, name, is_called=is_called)
        elif top == _OWN:
            self._analysis.add_attribute(self._owner, name, is_called=is_called)
        elif isinstance(top, ModuleType):
            self._top = self._module_or_value(vars(top), name, is_called=is_called)
        elif name not in ATTRIBUTES:
            raise _MayDrawError

    def _add_store(self, name: str) -> None:
        if self._owner is not None:  # it may be `self`, also where the last instruction has not loaded it
            self._analysis.add_store(self._owner, name)

    def _add_super(self) -> str:
        self._analysis.grounds.absent.append((self._globals, "super"))
        self._analysis.grounds.same.append((vars(builtins).get, "super", super))
        return _SUPER

    def _module_or_value(self, values: Mapping[str, Any], name: str, *, is_called: bool) -> ModuleType | None:
        """Go through a global, or what a module has; return it if it is a module, of which a value may be taken next."""
        if values is self._globals and name not in values:
            self._analysis.grounds.absent.append((values, name))
            values = vars(builtins)
        value = values.get(name, _MayDrawError)
        if type(value) is ModuleType and value in listed_modules():
            self._analysis.grounds.same.append((values.get, name, value))
            return value
        self._analysis.add_value(values.__getitem__, name, value, is_called=is_called)
        return None

    def _add_cell(self, cell: CellType, *, is_called: bool) -> None:
        try:
            value = cell.cell_contents
        except ValueError:  # empty still
            raise _MayDrawError from None
        self._analysis.add_value(partial(getattr, cell), "cell_contents", value, is_called=is_called)
