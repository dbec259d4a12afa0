"""What ends the answer that transforms draw nothing: each name and attribute that it rests on may be bound anew."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
from PIL import Image

from sqlstream.transforms.draw_free import draw_free

Sample = dict[str, Any]
limit = 3


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def may_draw(sample: Any) -> float:
    return random.random()


def may_draw_too(path: Any) -> float:
    return random.random()


def opens(sample: Sample) -> Any:
    return Image.open(sample["image"])


class Draws:
    def __call__(self, sample: Sample) -> Any:
        return random.random()


class Changes:
    size = 4

    def __init__(self) -> None:
        self.key = "x"

    def named(self) -> str:
        return self.key

    def __call__(self, sample: Sample) -> Any:
        return self.size, self.named(), read(sample["image"])


def changed_function(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "read", lambda path: random.random())


def changed_code(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "__code__", (lambda path: random.random()).__code__)


def changed_builtin(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.open", may_draw)


def shadowed_builtin(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "open", may_draw)


def changed_attribute(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    transform.key = random.random  # type: ignore[assignment]  # a test


def shadowed_method(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    transform.named = random.random  # type: ignore[assignment, method-assign]  # a test


def changed_method(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "named", may_draw)


def changed_call(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "__call__", may_draw)


def changed_class_attribute(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Changes, "size", Draws())


def changed_class(transform: Changes, monkeypatch: pytest.MonkeyPatch) -> None:
    transform.__class__ = type("Other", (Changes,), {"__call__": may_draw})


@pytest.mark.parametrize(
    "change",
    [
        *(changed_function, changed_code, changed_builtin, shadowed_builtin, changed_attribute, shadowed_method),
        *(changed_method, changed_call, changed_class_attribute, changed_class),
    ],
)
def test_what_is_bound_anew_ends_what_was_shown(
    change: Callable[[Changes, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = Changes()
    proof = draw_free([transform])
    assert proof is not None
    transform.key = "y"  # another plain value changes nothing
    assert proof.holds()
    change(transform, monkeypatch)
    assert not proof.holds()


class Parent:
    def size_of(self) -> int:
        return 1


class Between(Parent):
    pass


class Lower(Between):
    key = 4

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, sample: Sample, *, text: str = "x") -> Any:
        self.num += 1
        return sample | {text: (self.key, super().size_of(), limit)}


def drawing_property(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower, "key", property(may_draw))


def drawing_property_over_an_attribute(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower, "num", property(may_draw), raising=False)


def drawing_setter(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower, "__setattr__", lambda *_: random.random())


def drawing_getattribute(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower, "__getattribute__", may_draw)


def method_between(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Between, "size_of", may_draw, raising=False)


def another_dict(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    transform.__dict__ = {"num": 0, "key": random.random}


def without_attribute(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    del transform.num


def without_global(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(globals(), "limit")


def shadowed_super(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "super", Draws)


def keyword_default(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Lower.__call__.__kwdefaults__, "text", random.random)  # type: ignore[arg-type]  # a test


def keyword_defaults(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lower.__call__, "__kwdefaults__", {"text": random.random})


def attribute_of_function(transform: Lower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Parent.size_of, "open", random.random, raising=False)


@pytest.mark.parametrize(
    "change",
    [
        *(drawing_property, drawing_property_over_an_attribute, drawing_setter, drawing_getattribute),
        *(method_between, another_dict, without_attribute, without_global, shadowed_super, keyword_default),
        *(keyword_defaults, attribute_of_function),
    ],
)
def test_what_comes_before_a_name_that_was_looked_up_ends_what_was_shown(
    change: Callable[[Lower, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    transform = Lower()
    proof = draw_free([transform])
    assert proof is not None
    transform({})
    assert proof.holds()
    change(transform, monkeypatch)
    assert not proof.holds()


def test_other_bases_of_a_class_end_what_was_shown() -> None:
    class Base:
        def __call__(self, sample: Sample) -> Any:
            return sample

    class Derived(Base):
        pass

    class Other(Draws, Base):
        pass

    proof = draw_free([Derived()])
    assert proof is not None
    Derived.__bases__ = (Other,)
    assert not proof.holds()


def test_an_argument_that_a_partial_gets_later_ends_what_was_shown() -> None:
    transform = functools.partial(lambda sample, size: sample, size=1)
    proof = draw_free([transform])
    assert proof is not None
    transform.keywords["size"] = random.random
    assert not proof.holds()


@pytest.mark.parametrize(
    ("table", "change"),
    [
        ({"a": 0}, lambda table: table.update(a=random.random)),
        ({"a": 0}, lambda table: table.update({Draws(): 0})),
        ({"a": 0}, lambda table: table.update(dict.fromkeys(range(1000), 0))),
        ([0, "a"], lambda table: table.append(Draws())),
        ({"a", "b"}, lambda table: table.add(may_draw)),
    ],
    ids=["value", "key", "too-many", "list", "set"],
)
def test_what_is_put_into_a_table_ends_what_was_shown(table: Any, change: Callable[[Any], None]) -> None:
    proof = draw_free([lambda sample: table])
    assert proof is not None
    assert proof.holds()
    change(table)
    assert not proof.holds()


def test_a_closure_variable_that_is_deleted_ends_what_was_shown() -> None:
    number: Any = 3

    def transform(sample: Sample) -> Sample:
        return sample | {"x": number}  # noqa: F821 - what is tested

    proof = draw_free([transform])
    assert proof is not None
    del number
    assert not proof.holds()


def wrapped_open(path: Any) -> Any:
    return random.random()


@pytest.mark.parametrize(
    "patch",
    [
        may_draw,
        functools.wraps(Image.open)(may_draw_too),
        functools.lru_cache(functools.wraps(Image.open)(wrapped_open)),
        type("open", (), {"__module__": "other"}),
    ],
)
def test_what_was_put_into_a_listed_module_is_not_taken_for_its_own(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert draw_free([opens]) is not None
    monkeypatch.setattr(Image, "open", patch)
    assert draw_free([opens]) is None
