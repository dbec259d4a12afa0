"""What a transform refers to is part of the key of its samples."""

from __future__ import annotations

import importlib.util
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import ConfigError
from sqlstream.transforms.cached import CacheTransform, chain_key

HELPER = """
SCALE = 2
def inner(x): return x + 1
"""
MINE = """
import functools
import logging
import enum
import mine_helper
from mine_helper import inner

SIZE = 224
COLORS = {"red": 1, "blue": [2]}
mode = "rgb"
logger = logging.getLogger("mine")
counts = {}
MODES = enum.Enum("MODES", {"A": 1})

def helper(x): return inner(x) * SIZE
def again(n): return n and again(n - 1)

def transform(sample, *, strength=1):
    counts["seen"] = counts.get("seen", 0) + 1
    logger.debug("hit")
    return {**sample, "n": helper(sample["n"]) + COLORS["red"] + again(2), "mode": mode, "scale": mine_helper.SCALE}

class Base:
    factor = 3
    def base(self, x): return helper(x)

class Thing(Base):
    @property
    def doubled(self): return self.factor * 2
    @functools.cached_property
    def kept(self): return 5
    @staticmethod
    def free(x): return x - SIZE
    def __call__(self, sample): return {**sample, "n": self.base(sample["n"]) + self.doubled + self.kept + self.free(1)}

def unused(): return 1
"""


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    yield
    for name in ("mine", "mine_helper"):
        sys.modules.pop(name, None)


def load(folder: Path, name: str, text: str) -> ModuleType:
    path = folder / f"{name}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def keys(folder: Path, mine: str = MINE, helper: str = HELPER) -> tuple[str, str]:
    load(folder, "mine_helper", helper)
    module = load(folder, "mine", mine)
    return chain_key(CacheTransform("c", [module.transform])), chain_key(CacheTransform("c", [module.Thing()]))


def test_the_same_modules_give_the_same_keys(tmp_path: Path) -> None:
    assert keys(tmp_path) == keys(tmp_path)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SIZE = 224", "SIZE = 256"),
        ('{"red": 1, "blue": [2]}', '{"red": 1, "blue": [3]}'),
        ('mode = "rgb"', 'mode = "bgr"'),
        ("inner(x) * SIZE", "inner(x) + SIZE"),
        ("strength=1", "strength=2"),
        ("again(n - 1)", "again(n - 2)"),
    ],
)
def test_an_edited_constant_or_called_function_is_another_key_of_a_function(before: str, after: str, tmp_path: Path) -> None:
    assert before in MINE
    assert keys(tmp_path)[0] != keys(tmp_path, MINE.replace(before, after))[0]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("SIZE = 224", "SIZE = 256"),
        ("inner(x) * SIZE", "inner(x) + SIZE"),
        ("factor = 3", "factor = 4"),
        ("self.factor * 2", "self.factor * 3"),
        ("return 5", "return 6"),
        ("return x - SIZE", "return x + SIZE"),
    ],
)
def test_an_edited_constant_or_called_function_is_another_key_of_a_class(before: str, after: str, tmp_path: Path) -> None:
    assert before in MINE
    assert keys(tmp_path)[1] != keys(tmp_path, MINE.replace(before, after))[1]


@pytest.mark.parametrize(("before", "after"), [("SCALE = 2", "SCALE = 3"), ("return x + 1", "return x + 2")])
def test_another_module_of_the_user_counts_as_well(before: str, after: str, tmp_path: Path) -> None:
    assert keys(tmp_path)[0] != keys(tmp_path, helper=HELPER.replace(before, after))[0]


def test_what_is_not_referred_to_and_what_changes_in_place_part_nothing(tmp_path: Path) -> None:
    before = keys(tmp_path)
    assert keys(tmp_path, MINE.replace("def unused(): return 1", "def unused(): return 2")) == before
    sys.modules["mine"].transform({"n": 1})
    assert chain_key(CacheTransform("c", [sys.modules["mine"].transform])) == before[0]


def test_a_script_has_one_key_in_the_trainer_and_in_a_spawned_worker(tmp_path: Path) -> None:
    module = load(tmp_path, "mine", "def transform(sample): return sample\nclass Thing:\n    def __call__(self, s): return s\n")
    found = set()
    for name in ("__main__", "__mp_main__"):  # what Python calls the script there and here
        module.transform.__module__ = module.Thing.__module__ = name
        found.add(chain_key(CacheTransform("c", [module.transform, module.Thing()])))
    assert len(found) == 1


class InSlots:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class Resize(InSlots):
    """Its base keeps in slots what it does, and it has a dict of its own."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


class Steps(dict[str, int]):
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "n": sum(self.values())}


class Product(dict[str, int]):
    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "n": 1}


class With:
    """A transform with a parameter."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return sample


def key_of(transform: Any) -> str:
    return chain_key(CacheTransform("c", [transform]))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Resize(1), Resize(2)),
        (Steps(a=1), Product(a=1)),
        (With({"resize": 1, "crop": 2}), With({"crop": 2, "resize": 1})),
        (With(InSlots(1)), With(InSlots(2))),
        (With(re.compile("a")), With(re.compile("a", re.IGNORECASE))),
        (With(range(3)), With(range(4))),
        (With(1j), With(2j)),
        (With(torch.tensor([1.0], dtype=torch.bfloat16)), With(torch.tensor([2.0], dtype=torch.bfloat16))),
        (With(np.ma.masked_equal([1, 2], 1)), With(np.ma.masked_equal([1, 2], 2))),
        (With(np.array(["a", None], object)), With(np.array(["b", None], object))),
    ],
    ids=lambda transform: type(getattr(transform, "value", transform)).__name__,
)
def test_what_a_transform_is_made_of_parts_keys(one: Any, other: Any) -> None:
    assert key_of(one) != key_of(other)


def test_the_same_words_in_an_array_of_objects_are_one_key() -> None:
    first, second = (np.array(["".join(("sp", "eck", str(number))) for number in range(3)], object) for _ in range(2))
    assert key_of(With(first)) == key_of(With(second))


def test_attributes_have_no_order() -> None:
    one, other = With(1), With(1)
    one.__dict__.update(a=1, b=2)
    other.__dict__.update(b=2, a=1)
    assert key_of(one) == key_of(other)


@pytest.mark.parametrize("value", [random.Random(1), torch.eye(2).to_sparse()], ids=["generator", "sparse"])
def test_what_no_key_can_name_is_refused_unless_there_is_a_version(value: object) -> None:
    with pytest.raises(ConfigError, match="give version="):
        key_of(With(value))
    assert chain_key(CacheTransform("c", [With(value)], version="1")) != chain_key(
        CacheTransform("c", [With(value)], version="2")
    )


PARAMETERS = """
import re

WORDS = re.compile("a+")

class Model:
    def run(self, x): return x + 1

class Uses:
    def __init__(self, model): self.model = model
    def __call__(self, sample): return {**sample, "n": self.model().run(1)}

def transform(sample): return {**sample, "n": len(WORDS.findall(sample["text"]))}
"""


@pytest.mark.parametrize(("before", "after", "made"), [("x + 1", "x + 2", "Uses(Model)"), ('"a+"', '"b+"', "transform")])
def test_classes_that_are_parameters_and_patterns_of_a_module_count(before: str, after: str, made: str, tmp_path: Path) -> None:
    texts = (PARAMETERS, PARAMETERS.replace(before, after))
    first, second, again = (key_of(eval(made, vars(load(tmp_path, "mine", text)))) for text in (*texts, PARAMETERS))
    assert first == again
    assert first != second


GUARDED = """
def g(s): return s
def h(s): return s
def low(a, b): return a - b
def total(*values): return len(values)

def transform(sample):
    try:
        g(sample)
        h(sample)
    except ValueError:
        sample["n"] = 0
    return {**sample, "d": low(a=3, b=1), "t": total(sample)}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            '        h(sample)\n    except ValueError:\n        sample["n"] = 0\n',
            '    except ValueError:\n        sample["n"] = 0\n    else:\n        h(sample)\n',
        ),
        ("low(a, b): return a - b", "low(b, a): return b - a"),
        ("total(*values)", "total(values)"),
    ],
)
def test_what_the_instructions_of_code_do_not_say_counts(before: str, after: str, tmp_path: Path) -> None:
    assert before in GUARDED
    keys = {
        chain_key(CacheTransform("a", [load(tmp_path, "mine", text).transform]))
        for text in (GUARDED, GUARDED.replace(before, after))
    }
    assert len(keys) == 2


HELD = """
import enum
import functools

class Mode(enum.Enum):
    FAST = 2

@functools.cache
def table(n): return n * 4

class Scaled:
    def __init__(self): self.mode = Mode.FAST
    def __call__(self, sample): return {**sample, "n": sample["n"] * self.mode.value}

def transform(sample): return {**sample, "n": Mode.FAST.value}
def cached(sample): return {**sample, "n": table(3)}
"""


@pytest.mark.parametrize(
    ("before", "after", "made"),
    [("FAST = 2", "FAST = 3", "Scaled()"), ("FAST = 2", "FAST = 3", "transform"), ("n * 4", "n * 5", "cached")],
)
def test_members_of_an_enum_and_functions_with_a_cache_count(before: str, after: str, made: str, tmp_path: Path) -> None:
    texts = (HELD, HELD.replace(before, after), HELD)
    first, second, again = (key_of(eval(made, vars(load(tmp_path, "mine", text)))) for text in texts)
    assert first == again
    assert first != second
