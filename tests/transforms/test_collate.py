"""The default collate."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sqlstream.errors import TransformError
from sqlstream.transforms.collate import collate


def test_tensors_are_stacked_numbers_become_tensors_and_the_rest_stays_lists() -> None:
    batch = collate(
        [
            {"x": torch.ones(2), "n": 1, "f": 1.5, "s": "a", "l": [1], "a": np.zeros(2), "d": {"y": 1, "t": "u"}, "o": None},
            {"x": torch.zeros(2), "n": 2, "f": 2.0, "s": "b", "l": [], "a": np.ones(2), "d": {"y": 2, "t": "v"}, "o": 3},
        ]
    )
    assert batch["x"].tolist() == [[1, 1], [0, 0]]
    assert (batch["n"].tolist(), batch["n"].dtype, batch["f"].tolist()) == ([1, 2], torch.int64, [1.5, 2.0])
    assert (batch["s"], batch["l"], batch["o"]) == (["a", "b"], [[1], []], [None, 3])
    assert isinstance(batch["a"], torch.Tensor)
    assert (batch["d"]["y"].tolist(), batch["d"]["t"]) == ([1, 2], ["u", "v"])


def test_dicts_with_different_keys_stay_a_list() -> None:
    assert collate([{"d": {"a": 1}}, {"d": {"b": 1}}]) == {"d": [{"a": 1}, {"b": 1}]}


def test_tensors_that_cannot_be_stacked_are_named_with_their_shapes() -> None:
    samples = [{"x": {"y": torch.ones(2)}}, {"x": {"y": torch.ones(3)}}]
    with pytest.raises(TransformError, match=r"field 'x.y' cannot be stacked: Tensor float32 \[2\]; Tensor float32 \[3\]"):
        collate(samples)
    assert len(collate(samples, ragged_fields=["x"])["x"]) == 2
    with pytest.raises(TransformError, match="int64"):
        collate([{"x": torch.ones(2)}, {"x": torch.ones(2, dtype=torch.int64)}])


def test_samples_with_different_fields_are_named() -> None:
    with pytest.raises(TransformError, match=r"samples 0 and 1 .*\['b'\]"):
        collate([{"a": 1}, {"a": 1, "b": 2}])
    with pytest.raises(TransformError, match="no samples"):
        collate([])
