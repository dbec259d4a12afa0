"""Lets torchvision's usual wheel be imported beside a CPU build of torch: only its Python part is needed here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

_OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept: list[Any] = []


def declare() -> None:
    """Declare the operators that `import torchvision` looks for, if its compiled part cannot be loaded with this torch."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    import torch

    try:
        for library in Path(found.origin).parent.glob("_C*.so"):
            torch.ops.load_library(str(library))
            return
    except OSError:
        pass
    declared = torch.library.Library("torchvision", "DEF")
    for operator in _OPERATORS:
        declared.define(operator)
    _kept.append(declared)
