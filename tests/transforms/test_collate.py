"""The default collate."""

from __future__ import annotations

import warnings

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


def test_integers_of_64_bits_without_a_sign_stay_integers_and_larger_ones_are_named() -> None:
    batch = collate([{"x": 2**63 + 5}, {"x": 1}])
    assert (batch["x"].dtype, batch["x"].tolist()) == (torch.uint64, [2**63 + 5, 1])
    for wrong in (2**64, -1):
        with pytest.raises(TransformError, match=r"field 'x' has integers of .* for which torch has no type"):
            collate([{"x": 2**63 + 5}, {"x": wrong}])
    assert collate([{"x": 2**64}, {"x": 1}], ragged_fields=["x"]) == {"x": [2**64, 1]}


def test_arrays_of_another_order_and_times_are_batched() -> None:
    turned, swapped = np.arange(6).reshape(2, 3)[:, ::-1], np.arange(6, dtype=">i8").reshape(2, 3)
    batch = collate([{"x": turned}, {"x": swapped}])
    assert batch["x"].tolist() == [[[2, 1, 0], [5, 4, 3]], [[0, 1, 2], [3, 4, 5]]]
    moments = [np.datetime64("2020-01-01T00:00:00.000000001"), np.datetime64("2020-01-02")]
    assert collate([{"x": moment} for moment in moments]) == {"x": moments}


def test_numbers_of_numpy_with_and_without_a_sign_are_integers_and_what_torch_does_not_have_is_named() -> None:
    batch = collate([{"x": np.uint64(5), "y": True}, {"x": -1, "y": np.uint64(2**63)}])
    assert (batch["x"].tolist(), batch["x"].dtype) == ([5, -1], torch.int64)
    assert (batch["y"].tolist(), batch["y"].dtype) == ([1, 2**63], torch.uint64)
    for value in (np.longdouble(1), np.ones(2, np.longdouble)):
        with pytest.raises(TransformError, match=r"field 'x' has values of float128|longdouble"):
            collate([{"x": value}] * 2)


def test_arrays_that_may_only_be_read_are_stacked_without_a_warning() -> None:
    array = np.frombuffer(b"ab", np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert collate([{"x": array}] * 2)["x"].tolist() == [[97, 98]] * 2
