"""Which transforms are shown to draw nothing from global generators, and which may draw whatever their samples have shown."""

from __future__ import annotations

import base64
import functools
import io
import json
import math
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from random import random as draw
from typing import Any

import numpy as np
import PIL
import pytest
import torch
import torch.nn.functional as F
from PIL import Image, ImageOps

from sqlstream.transforms.draw_free import draw_free
from sqlstream.transforms.harmless import ATTRIBUTES, NAMES
from sqlstream.transforms.rng import rng

Sample = dict[str, Any]
MEAN = torch.tensor([0.5, 0.5, 0.5])  # [c]
SIZE = (8, 8)
LABELS: dict[str, Any] = {"cat": 0}
MANY = dict.fromkeys(range(10_000), 0)
WORD = re.compile(r"\w+")
num_seen = 0


def read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def may_draw(sample: Sample) -> float:
    return random.random()


def read_path(sample: Sample) -> Sample:
    sample["image"] = Path(sample["image"]).read_bytes()
    return sample


def decode(sample: Sample) -> Sample:
    with Image.open(io.BytesIO(read(sample["image"]))) as image:
        pixels = np.asarray(ImageOps.fit(image.convert("RGB"), SIZE, Image.Resampling.BILINEAR))  # [h, w, c]
    tensor = torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous().float()  # [c, h, w]
    sample["image"] = (tensor.div(255) - MEAN[:, None, None]) / math.sqrt(2)
    return sample


def parse(sample: Sample) -> Sample:
    values = json.loads(base64.b64decode(sample["json"]))
    sample["name"] = os.path.basename(values["name"]).lower()
    sample["sizes"] = sorted((int(value) for value in values["sizes"]), key=lambda size: -size)
    return sample


def pad(sample: Sample) -> Sample:
    sample["x"] = F.pad(sample["x"], (0, 1)) + torch.nn.functional.normalize(sample["x"])
    return sample


def count(sample: Sample) -> Sample:
    global num_seen
    num_seen += 1
    return sample | {"number": num_seen}


def look_up(sample: Sample) -> Sample:
    return sample | {"label": LABELS[sample["x"]], "words": WORD.findall(re.sub("a+", "b", sample["x"]))}


def fail(sample: Sample) -> Sample:
    if not isinstance(sample["x"], str | os.PathLike):
        raise TypeError(f"{sample['x']!r} is no text")
    return sample


def draws_of_its_own(sample: Sample) -> Sample:
    generator = rng(sample)
    return sample | {"left": int(generator.integers(0, 8)), "is_flipped": rng(sample).random() < 0.5}


def with_default(sample: Sample, size: tuple[int, int] = SIZE, *, key: str = "x") -> Sample:
    return sample | {key: size}


class Reads:
    def __init__(self, key: str = "image") -> None:
        self.key, self.num_read = key, 0

    @property
    def field(self) -> str:
        return self.key.upper()

    @staticmethod
    def of(path: str) -> bytes:
        return read(path)

    def __call__(self, sample: Sample) -> Sample:
        self.num_read += 1
        sample[self.field] = self.of(sample[self.key])
        return self.wrap(sample)

    def wrap(self, sample: Sample) -> Sample:
        return sample


class Inherits(Reads):
    def __call__(self, sample: Sample) -> Sample:
        return super().__call__(sample)


class Slots:
    __slots__ = ("size",)

    def __init__(self) -> None:
        self.size = 4

    def __call__(self, sample: Sample) -> Sample:
        return sample | {"size": self.size}


class Holds:
    """Has something of its own."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, sample: Sample) -> Any:
        return self.held


def closure(number: int) -> Callable[[Sample], Sample]:
    def inner(sample: Sample) -> Sample:
        return sample | {"number": number, "length": len(read(sample["image"]))}

    return inner


@pytest.mark.parametrize(
    "transform",
    [
        *(
            read_path,
            decode,
            parse,
            pad,
            count,
            look_up,
            fail,
            draws_of_its_own,
            with_default,
            Reads(),
            Inherits(),
            Slots(),
            Reads().wrap,
            *(Holds([0, "a"]), Holds({"cat", "dog"}), Holds({"cat": None})),
            closure(3),
        ),
        functools.partial(with_default, size=(4, 4)),
        lambda sample: sample,
    ],
)
def test_code_that_reads_decodes_and_counts_draws_nothing(transform: Callable[[Sample], Sample]) -> None:
    proof = draw_free([transform])
    assert proof is not None
    assert proof.holds()


class AtItsThousandth:
    num = 0

    def __call__(self, sample: Sample) -> Sample:
        self.num += 1
        return sample | {"x": random.random()} if self.num > 1000 else sample


class Asks:
    """Gives any attribute."""

    def __getattr__(self, name: str) -> Any:
        return random.random

    def __call__(self, sample: Sample) -> Any:
        return self.size()


class Draws:
    def size(self) -> float:
        return random.random()

    def __call__(self, sample: Sample) -> Any:
        return self.size()


class InheritsDraws(Draws):
    def __call__(self, sample: Sample) -> Any:
        return super().__call__(sample)


class PassesItself(Reads):
    def __call__(self, sample: Sample) -> Any:
        return sample["call"](self)


class ChoosesItself(Draws):
    def __call__(self, sample: Sample) -> Any:
        return (self if sample else sample).size()  # type: ignore[union-attr]  # a test


class OverwritesItself(Reads):
    def __call__(self, sample: Sample) -> Any:
        self = sample["other"]  # noqa: PLW0642 - what is tested
        return self.wrap(sample)


class HidesSuper(Reads):
    def __call__(self, sample: Sample) -> Any:
        kept = super
        sample["x"].uniform_()
        return kept


class OfClass(Draws):
    @classmethod
    def read(cls, sample: Sample) -> Any:
        return cls.size(cls)  # type: ignore[arg-type]  # a test

    def __call__(self, sample: Sample) -> Any:
        return self.read(sample)


class InComprehension(Draws):
    def __call__(self, sample: Sample) -> Any:
        return [self.size() for _ in range(2)]


def imports(sample: Sample) -> Any:
    import random as hidden

    return hidden.random()


def makes_class(sample: Sample) -> Any:
    class Inner:
        x = random.random()

    return Inner.x


def yields(sample: Sample) -> Any:
    yield sample


def asks_by_name(sample: Sample) -> Any:
    return getattr(np, "ran" + "dom").rand()


def evaluates(sample: Sample) -> Any:
    return eval("random.random()")


class Labels(dict[str, Any]):
    def __missing__(self, key: str) -> float:
        return random.random()


def of_default(sample: Sample, call: Callable[[], float] = random.random) -> Any:
    return call()


def closed_over(call: Callable[[], float]) -> Callable[[Sample], Any]:
    return lambda sample: call()


@pytest.mark.parametrize(
    "transform",
    [
        *(may_draw, imports, makes_class, yields, asks_by_name, evaluates, of_default, closed_over(random.random)),
        *(
            Asks(),
            Holds(random.random),
            Holds([random]),
            Holds({0: random.random}),
            Holds({random.random: 0}),
            Holds(random),
            Draws(),
            InheritsDraws(),
            AtItsThousandth(),
            OfClass(),
        ),
        *(PassesItself(), ChoosesItself(), OverwritesItself(), HidesSuper(), InComprehension(), torch.nn.Dropout(), draw),
        *(functools.partial(with_default, size=draw), functools.partial(may_draw), Draws().size),  # type: ignore[arg-type]  # a test
        *(
            lambda sample: [draw()],
            lambda sample: np.random.rand(),
            lambda sample: MANY[sample["x"]],
            lambda sample: Labels()["x"],
            lambda sample: re.sub("a", lambda _: str(random.random()), sample["x"]),
            lambda sample: torch.rand(1),
            lambda sample: [may_draw(sample)],
        ),
        *(lambda sample: sample["x"].uniform_(), lambda sample: F.dropout(sample["x"]), lambda sample: os.system("true")),
        *(lambda sample: PIL.Image.effect_noise((2, 2), 1.0), lambda sample: [random.random() for _ in sample]),
        *(lambda sample: (np if sample else random).random(), lambda sample: sorted(sample, key=lambda _: random.random())),
        *(lambda sample: type("X", (), {"x": property(may_draw)})().x, lambda sample: [not_bound]),  # type: ignore[name-defined]  # noqa: F821
    ],
)
def test_code_that_may_draw_or_is_not_understood_counts_as_drawing(transform: Callable[[Sample], Any]) -> None:
    assert draw_free([read_path, transform]) is None


def drawing_operators() -> set[str]:
    """Names of torch's operators that draw, as torch marks them."""
    names = {
        name.split("::")[1].partition(".")[0] for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")
    }
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    overloads = [(packet, getattr(packet, overload)) for packet in packets for overload in packet.overloads()]
    return {packet.__name__ for packet, each in overloads if torch.Tag.nondeterministic_seeded in each.tags}


def test_no_listed_name_is_one_of_what_draws() -> None:
    drawing = {name for name in dir(np.random.RandomState) if not name.startswith("_")}
    drawing |= {name for name in vars(random) if getattr(vars(random)[name], "__self__", None) is random._inst}
    operators = drawing_operators()
    assert {"uniform_", "rand", "dropout", "bernoulli", "normal"} <= operators
    assert NAMES & (drawing | operators) == {"bytes"}  # of a RandomState, at which no listed name gets


def test_methods_of_a_samples_generator_are_no_attributes_of_other_values() -> None:
    methods = ATTRIBUTES - NAMES
    assert methods <= set(dir(np.random.Generator))
    others = [
        np.ndarray,
        np.float64,
        torch.Tensor,
        Image.Image,
        io.BytesIO,
        Path,
        str,
        bytes,
        int,
        float,
        dict,
        list,
        set,
        tuple,
    ]
    assert not methods & {name for other in others for name in dir(other)}
