"""Ways by which objects and functions run code that the instructions of a transform do not show: all count as drawing."""

from __future__ import annotations

import builtins
import functools
import random
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from sqlstream.transforms.draw_free import draw_free

Sample = dict[str, Any]
TEMPLATE = "{0.__self__.size}"


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **options: Any) -> Any:
        return function(*args, **options)

    return wrapper


class Drawing:
    """Has attributes that draw under names that are listed."""

    def __init__(self) -> None:
        vars(self)["size"] = 3

    def crop(self) -> float:
        return random.random()

    @property
    def size(self) -> float:
        return random.random()

    @size.setter
    def size(self, value: float) -> None:
        random.random()

    @functools.cached_property
    def mode(self) -> float:
        return random.random()

    def __repr__(self) -> str:
        return str(random.random())

    def named(self) -> str:
        return "x"


class Decorated(Drawing):
    @logged
    def __call__(self, sample: Sample) -> Any:
        return self.crop()


class TakesAll(Drawing):
    def __call__(*args: Any) -> Any:
        return args[0].crop()


class Stores(Drawing):
    def __call__(self, sample: Sample) -> Any:
        self.size = 3
        return sample


class Adds(Drawing):
    def __call__(self, sample: Sample) -> Any:
        self.size += 3
        return sample


class Reads(Drawing):
    def __call__(self, sample: Sample) -> Any:
        return self.size


class ReadsCached(Drawing):
    def __call__(self, sample: Sample) -> Any:
        return self.mode


class ShowsItself(Drawing):
    def __call__(self, sample: Sample) -> Any:
        return f"{self.named}"


class FormatsItself:
    size = property(lambda self: random.random())

    def named(self) -> str:
        return "x"

    def __call__(self, sample: Sample) -> Any:
        return TEMPLATE.format(self.named)


class WatchesStores:
    def __setattr__(self, name: str, value: Any) -> None:
        random.random()

    def __call__(self, sample: Sample) -> Any:
        self.key = 3
        return sample


class WatchesDeletions:
    def __delattr__(self, name: str) -> None:
        random.random()

    def __call__(self, sample: Sample) -> Any:
        del self.key  # type: ignore[attr-defined]  # a test
        return sample


def three() -> int:
    return 3


def may_draw(of: object) -> float:
    return random.random()


class Descriptor:
    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return random.random()


class DrawingProperty(property):
    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return random.random()


class DrawingStatic(staticmethod):  # type: ignore[type-arg]  # a test
    def __get__(self, owner: object, kind: type | None = None) -> Any:
        return random.random


class WithDescriptor:
    key = Descriptor()

    def __call__(self, sample: Sample) -> Any:
        return self.key


class WithProperty(WithDescriptor):
    key = DrawingProperty(may_draw)


class WithStatic:
    key = DrawingStatic(three)

    def __call__(self, sample: Sample) -> Any:
        return self.key()


class Meta(type):
    def read(cls) -> int:
        return 3


class OfMeta(Drawing):
    @classmethod
    def read(cls) -> Any:
        return random.random()


class Inherits(OfMeta, metaclass=Meta):
    @classmethod
    def call(cls, sample: Sample) -> Any:
        return super().read()


MANY = "def call(self, sample):\n" + "".join(f"  sample.size = sample['{i}'] = v{i}\n" for i in range(300))
scope: dict[str, Any] = {f"v{number}": number for number in range(300)}
exec(MANY + "  return (sample['x'] if sample else self).uniform_()\n", scope)


class ManyNames:
    """The jump that joins the two values leads to the extension of the argument of the instruction that gets the attribute."""

    uniform_ = staticmethod(three)
    __call__: Callable[..., Any] = scope["call"]


class Proxy:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not bound")


class DictWithMore(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return random.random


def with_attribute(sample: Sample) -> Any:
    return sample


with_attribute.open = random.random  # type: ignore[attr-defined]  # a test
TENSOR = torch.zeros(2)  # [2]
TENSOR.size = random.random  # type: ignore[assignment]  # a test
PROXY = Proxy()
io = kept = ModuleType("io")
vars(io)["open"] = random.random


def keeps_module(sample: Sample) -> Any:
    module = io
    return module.open("x")


def chooses_module(sample: Sample) -> Any:
    return (io if sample else kept).open("x")


def of_constant(sample: Sample) -> Any:
    return sorted(sample, key="replaced")  # type: ignore[call-overload]  # a test


of_constant.__code__ = of_constant.__code__.replace(
    co_consts=tuple((lambda _: random.random()) if value == "replaced" else value for value in of_constant.__code__.co_consts)
)


def makes(sample: Sample) -> Any:
    return len(sample)


def deep(number: int) -> Callable[[Sample], Any]:
    """Return a function that calls one that calls one …"""
    inner: Callable[[Sample], Any] = makes
    for _ in range(number):
        inner = calling(inner)
    return inner


def calling(inner: Callable[[Sample], Any]) -> Callable[[Sample], Any]:
    return lambda sample: [inner(sample)]


@pytest.mark.parametrize(
    "transform",
    [
        *(Decorated(), TakesAll(), Stores(), Adds(), Reads(), ReadsCached(), ShowsItself(), FormatsItself(), WatchesStores()),
        *(WatchesDeletions(), WithDescriptor(), WithProperty(), WithStatic(), Inherits.call, ManyNames()),
        *(keeps_module, chooses_module, of_constant, deep(500), Drawing().named),
        *(lambda sample: with_attribute.open(), lambda sample: TENSOR.size(), lambda sample: PROXY),  # type: ignore[attr-defined]  # a test
        FunctionType(makes.__code__, DictWithMore(__builtins__=builtins)),
        FunctionType(makes.__code__, {"__builtins__": {"len": random.random}}),
    ],
)
def test_what_runs_code_unseen_counts_as_drawing(transform: Callable[[Sample], Any]) -> None:
    assert draw_free([transform]) is None


@dataclass
class Crop:
    size: int = 4

    def bounds(self, sample: Sample) -> tuple[int, int]:
        return self.size, self.size

    def __call__(self, sample: Sample) -> Sample:
        return sample | {"bounds": self.bounds(sample)}


@dataclass(frozen=True, slots=True)
class Frozen:
    size: int = 4

    def __call__(self, sample: Sample) -> Sample:
        return sample | {"size": self.size}


class Maps:
    num = 0

    def of(self, value: int) -> int:
        return value + self.num

    def __call__(self, sample: Sample) -> Sample:
        self.num += 1
        return sample | {"mapped": list(map(self.of, sample["x"]))}


@logged
def plain(sample: Sample) -> Sample:
    return sample


@pytest.mark.parametrize("transform", [Crop(), Frozen(), Maps(), plain])
def test_dataclasses_counters_and_decorated_functions_draw_nothing(transform: Callable[[Sample], Sample]) -> None:
    proof = draw_free([transform])
    assert proof is not None
    transform({"x": [1]})
    assert proof.holds()
