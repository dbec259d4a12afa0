"""Objects that code holds and calls: draw-free as far as their `__call__` is, and as they get nowhere else."""

from __future__ import annotations

import dis
import random
from collections.abc import Callable
from typing import Any, cast

import pytest

from sqlstream.transforms.bytecode import is_called_later
from sqlstream.transforms.draw_free import draw_free

Sample = dict[str, Any]


class Scale:
    def __init__(self, factor: int = 2) -> None:
        self.factor = factor

    def __call__(self, sample: Sample, more: int = 0) -> Sample:
        return sample | {"x": sample["x"] * self.factor + more}

    def __getitem__(self, key: int) -> float:
        return random.random()

    def __add__(self, other: object) -> float:
        return random.random()

    def load(self) -> float:
        return random.random()


class Draws:
    def __call__(self, sample: Sample) -> Sample:
        return sample | {"x": random.random()}


class Holds:
    def __init__(self, inner: Callable[..., Sample]) -> None:
        self.inner = inner

    def __call__(self, sample: Sample) -> Sample:
        return self.inner({"x": sample["x"]}, more=len(sample))


class Shows(Holds):
    def __call__(self, sample: Sample) -> Sample:
        return sample | {"text": str(self.inner)}


class InSlots:
    __slots__ = ("inner",)

    def __init__(self, inner: Callable[..., Sample]) -> None:
        self.inner = inner

    def __call__(self, sample: Sample) -> Sample:
        return self.inner(sample)


def closed(inner: Callable[..., Sample]) -> Callable[[Sample], Sample]:
    return lambda sample: inner({"x": sample["x"]}, more=max(1, int(sample["x"][0])))


SCALE: Any = Scale()


def of_global(sample: Sample) -> Any:
    return SCALE(SCALE(sample), 1)


@pytest.mark.parametrize(
    "transform", [Holds(Scale()), Holds(Holds(Scale())), InSlots(Scale()), closed(Scale()), closed(Holds(Scale())), of_global]
)
def test_a_held_object_that_is_only_called_is_gone_through(transform: Callable[[Sample], Sample]) -> None:
    proof = draw_free([transform])
    assert proof is not None
    assert proof.holds()


def given_on(held: Any) -> list[Callable[[Sample], Any]]:
    """Transforms that do something else with an object that they hold than to call it."""
    return [
        lambda sample: held[0](sample, 1),
        lambda sample: (held + 1)(sample, 1),
        lambda sample: held.load(sample, 1),
        lambda sample: len(held),
        lambda sample: max(held, sample)(sample),
        lambda sample: held(held),
        lambda sample: sample.get("x", held)(sample),
        lambda sample: [(held if sample else len)(sample), sample],  # longer than what compilers copy into both branches
        lambda sample: held(1 if sample else 2),
        lambda sample: held(*sample),
        lambda sample: [held][0](sample, 1),
        lambda sample: [value(sample) for value in (held,)],
    ]


@pytest.mark.parametrize("transform", given_on(Scale()))
def test_an_object_that_gets_elsewhere_counts_as_drawing(transform: Callable[[Sample], Any]) -> None:
    assert draw_free([transform]) is None


@pytest.mark.parametrize(
    "transform", [Holds(Draws()), Holds(Holds(Draws())), closed(Draws()), Shows(Scale()), Holds(cast(Any, random.Random))]
)
def test_what_a_held_object_draws_counts(transform: Callable[[Sample], Sample]) -> None:
    assert draw_free([transform]) is None


def test_another_object_in_its_place_ends_what_was_shown() -> None:
    transform = Holds(Holds(Scale()))
    proof = draw_free([transform])
    assert proof is not None
    transform.inner.inner.factor = 3  # type: ignore[attr-defined]  # a plain value
    assert proof.holds()
    transform.inner.inner = Scale()  # type: ignore[attr-defined]
    assert not proof.holds()


def test_another_call_of_its_class_ends_what_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    proof = draw_free([closed(Scale())])
    assert proof is not None
    monkeypatch.setattr(Scale, "__call__", Draws.__call__)
    assert not proof.holds()


def test_a_call_is_told_from_calls_among_its_arguments() -> None:
    def code(function: Callable[..., Any], name: str) -> bool:
        instructions = [*dis.get_instructions(function)]
        (at,) = [number for number, found in enumerate(instructions) if found.argval == name]
        return is_called_later(instructions[at:])

    assert code(lambda sample: SCALE(sample, 1), "SCALE")
    assert code(lambda sample: SCALE(len(sample), key=(sample, [1])), "SCALE")
    assert code(lambda sample: max(1, SCALE(sample["a"].copy(2))), "SCALE")
    assert not code(lambda sample: max(SCALE, len(sample)), "SCALE")
    assert not code(lambda sample: max(1, SCALE)(sample, 1), "SCALE")
    assert not code(lambda sample: SCALE.factor(sample, 1), "SCALE")
    assert not code(lambda sample: sample(SCALE), "SCALE")
    assert not code(lambda sample: SCALE, "SCALE")
