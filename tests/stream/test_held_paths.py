"""Whether a sample still names a file of the cache."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, deque, namedtuple
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.stream.engine.sample_maker import MAX_LOOKED_AT, holds_path

DIRECTORY = "/cache/data/"
FILE = f"{DIRECTORY}ab/abc.jpg"


class Text(str):
    """A text of another type."""


@dataclass
class Record:
    number: int
    path: Any


class Slotted:
    __slots__ = ("__hidden", "path")

    def __init__(self, path: Any, hidden: Any = None) -> None:
        self.path = path
        self.__hidden = hidden


class Tensor(torch.Tensor):
    """As torchvision's tensors with metadata."""


Pair = namedtuple("Pair", "number path")
TENSOR = torch.zeros(2).as_subclass(Tensor)  # [2]
TENSOR.source = FILE  # type: ignore[attr-defined]  # metadata
RING: list[Any] = [1]
RING.append(RING)

FOUND = {
    "text": FILE,
    "other-text": Text(FILE),
    "path": Path(FILE),
    "list": [1, FILE],
    "tuple": (FILE,),
    "nested": {"x": {"y": FILE}},
    "key": {"x": {FILE: 1}},
    "late": [*range(1000), FILE],
    "late-text": ["a"] * 1000 + [FILE],
    "set": {FILE, 1},
    "frozenset": frozenset((FILE,)),
    "deque": deque([Path(FILE)]),
    "dataclass": Record(1, [Path(FILE)]),
    "namespace": SimpleNamespace(a=SimpleNamespace(b=FILE)),
    "slots": Slotted(FILE),
    "hidden-slot": Slotted(1, FILE),
    "named-tuple": Pair(1, FILE),
    "ordered": OrderedDict(a=FILE),
    "user-dict": UserDict(a=[FILE]),
    "array-of-text": np.array(["a", FILE]),
    "array-of-objects": np.array([None, Path(FILE)], dtype=object),
    "tensor-with-metadata": TENSOR,
    "ring": [RING, [RING, FILE]],
}
NOT_FOUND = {
    "empty": "",
    "elsewhere": "/other/abc.jpg",
    "other-text": Text("a"),
    "path": Path("/other"),
    "bytes": b"/cache/data/",
    "none": None,
    "number": 1,
    "list": [],
    "nested": {"x": (1,)},
    "records": [{"box": [1.0, 2.0], "label": "a"} for _ in range(500)],
    "array": np.zeros((3, 3)),
    "texts": np.array(["a", "b"]),
    "scalar": np.float32(1),
    "time": datetime(2026, 1, 1),
    "enum": Enum("Colour", "RED").RED,  # type: ignore[attr-defined]  # made by its name
    "class": Path,
    "function": holds_path,
    "module": sys,
    "model": torch.nn.Linear(2, 2),
    "ring": RING,
}


@pytest.mark.parametrize("value", FOUND.values(), ids=FOUND.keys())
def test_a_path_in_a_sample_is_found_however_it_is_wrapped(value: Any) -> None:
    assert holds_path({"row": 1, "data": b"", "found": value, "text": "a"}, (DIRECTORY,))
    assert holds_path(value, (DIRECTORY,))


@pytest.mark.parametrize("value", NOT_FOUND.values(), ids=NOT_FOUND.keys())
def test_what_names_no_file_of_the_cache_keeps_none(value: Any) -> None:
    assert not holds_path({"row": 1, "data": b"", "found": value, "text": "a"}, (DIRECTORY,))
    assert not holds_path(value, (DIRECTORY,))


def test_a_sample_that_is_too_large_to_look_through_keeps_its_files() -> None:
    assert holds_path({"graph": [[["x", 1]] for _ in range(MAX_LOOKED_AT)]}, (DIRECTORY,))


def test_a_usual_sample_is_looked_through_in_one_call() -> None:
    usual = {
        "jpg": b"x" * 9000, "caption": "a", "score": 0.5, "image": torch.zeros(3, 4), "label": 3, "tokens": list(range(4096)),
        "box": (1, 2, 3, 4), "pixels": np.zeros((3, 4)), "none": None,
    }  # fmt: skip
    calls: list[str] = []
    sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_name) if event == "call" else None)
    try:
        holds_path(usual, (DIRECTORY,))
    finally:
        sys.setprofile(None)
    assert calls == ["holds_path"]
