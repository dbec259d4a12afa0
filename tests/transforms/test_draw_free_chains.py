"""Which chains seed the global generators for their samples."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from sqlstream.transforms.base import Chain
from sqlstream.transforms.cached import CacheTransform
from sqlstream.transforms.decode_by_extension import DecodeByExtension
from sqlstream.transforms.fields import (
    AddConstantFieldTransform,
    AugmentNewFieldsTransform,
    GatherFieldsTransform,
    IdentityTransform,
)

Sample = dict[str, Any]
num_seen = 0


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def count(sample: Sample) -> Sample:
    global num_seen
    num_seen += 1
    return sample | {"number": num_seen}


class Slots:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 4

    def __call__(self, sample: Sample) -> Sample:
        return sample | {"size": self.size}


class AtItsThousandth:
    num = 0

    def __call__(self, sample: Sample) -> Sample:
        self.num += 1
        return sample | {"x": random.random()} if self.num > 1000 else sample


def closure(number: int) -> Callable[[Sample], Sample]:
    def inner(sample: Sample) -> Sample:
        return sample | {"number": number, "length": len(read(sample["image"]))}

    return inner


class Seedings:
    """Counts the samples that are seeded."""

    was_drawn_from = False

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, key: tuple[int, ...], *, watches: bool = False) -> Seedings:
        self.num += 1
        return self

    def run(self, make: Callable[[], Any], goes_on: Callable[[Any], bool]) -> Any:
        return make()


def seedings_of(sample: Sample, *chains: list[Callable[[Sample], Any]], is_plain: bool = True) -> int:
    """Return how often a sample is seeded that goes through chains in turn."""
    generators, previous = Seedings(), None
    for stage, transforms in enumerate(chains):
        previous = Chain(transforms, seed=1, stage=stage, generators=generators, previous=previous, is_plain=is_plain)
        made = previous.run(sample, (1, 0, 0))
        assert isinstance(made, dict)
        sample = made
    return generators.num


def gives_call(sample: Sample) -> Sample:
    return sample | {"call": random.random}


def calls(sample: Sample) -> Sample:
    return sample | {"x": sample["call"]()} if "call" in sample else sample


def test_a_chain_seeds_only_what_may_draw() -> None:
    assert seedings_of({"x": 1}, [count, Slots()]) == 0
    assert seedings_of({"x": 1}, [count], [count]) == 0
    assert seedings_of({"x": 1}, [count, calls, AtItsThousandth()]) == 1


def test_what_draws_may_come_from_an_earlier_chain_or_out_of_a_pickle() -> None:
    assert seedings_of({"x": 1}, [calls]) == 0
    assert seedings_of({"x": 1}, [gives_call], [calls]) == 2
    assert seedings_of({"x": 1}, [calls], is_plain=False) == 1
    assert seedings_of({"x": 1}, [DecodeByExtension("pil", allow_pickle=True), calls]) == 1
    assert seedings_of({"x": 1}, [DecodeByExtension("pil")], [calls]) == 0


class Noise:
    def random(self) -> float:
        return random.random()


def first_of(values: list[Any]) -> Any:
    return values[0]


def drawn(values: list[Any]) -> float:
    return float(random.choice(values))


def asks(sample: Sample) -> Sample:
    return sample | {"x": sample["given"].random()}


@pytest.mark.parametrize(
    "ours", [AddConstantFieldTransform("given", Noise()), AddConstantFieldTransform("given", {"a": [Noise()]})]
)
def test_a_constant_that_may_draw_is_looked_at(ours: Any) -> None:
    calm: list[Any] = [
        AddConstantFieldTransform("given", {"a": [1, ("b", None)]}),
        AugmentNewFieldsTransform({"other": torch.ones(2)}),
    ]
    assert seedings_of({"x": 1}, [*calm, count]) == 0
    assert seedings_of({"x": 1}, [ours]) == 1


def test_what_a_transform_of_ours_is_given_to_call_is_looked_at() -> None:
    assert seedings_of({"x": 1}, [AugmentNewFieldsTransform({"given": Noise()}), asks]) == 1
    assert seedings_of({"x": 1}, [CacheTransform("a", [AtItsThousandth()])]) == 1
    assert seedings_of({"x": 1}, [CacheTransform("a", [IdentityTransform("x")])]) == 0
    for kind in (dict, list, first_of, torch.tensor):
        assert seedings_of({"x": 1}, [GatherFieldsTransform(["x"], "y", kind)]) == 0
    assert seedings_of({"x": 1}, [GatherFieldsTransform(["x"], "y", drawn)]) == 1


def test_a_chain_seeds_again_from_the_sample_on_before_which_its_code_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    generators = Seedings()
    monkeypatch.setitem(globals(), "read", lambda path: b"")
    chain = Chain([closure(1)], seed=1, stage=0, generators=generators)
    for number in range(3):
        chain.run({"image": "x"}, (1, 0, number))
    assert generators.num == 0
    monkeypatch.setitem(globals(), "read", lambda path: [random.random()])
    for number in range(3):
        chain.run({"image": "x"}, (1, 0, number))
    assert generators.num == 3
