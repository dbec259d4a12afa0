"""Batches of our samples are those of torch's `default_collate`, type for type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from sqlstream.stream.transport.packed_collate import batch_of

FIELDS: dict[str, list[Any]] = {
    "ints": [1, -(2**62)],
    "floats": [0.5, float("nan")],
    "texts": ["a", ""],
    "bytes": [b"", b"\0"],
    "bools": [True, False],
    "ints and a bool": [1, True],
    "an int and a float": [1, 0.5],
    "a float and an int": [0.5, 1],
    "numbers of numpy": [np.float32(1.5), np.float32(2)],
    "arrays": [np.zeros(2), np.ones(2)],
    "tensors": [torch.zeros(2), torch.ones(2)],
    "lists": [[1, "a"], [2, "b"]],
    "dicts": [{"x": 1}, {"x": 2}],
}


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_is_batched_as_torch_batches_it(name: str) -> None:
    samples = [{name: value} for value in FIELDS[name]]
    ours, torchs = batch_of(samples), default_collate(samples)
    assert describe(ours) == describe(torchs)


def test_samples_that_are_no_dicts_are_batched_as_torch_batches_them() -> None:
    assert describe(batch_of([(1, "a"), (2, "b")])) == describe(default_collate([(1, "a"), (2, "b")]))


@pytest.mark.parametrize("values", [[2**63, 1], [None, None], ["a", 1]])
def test_what_torch_refuses_is_refused_or_given_as_torch_does(values: list[Any]) -> None:
    samples = [{"x": value} for value in values]
    try:
        expected = describe(default_collate(samples))
    except (RuntimeError, TypeError, ValueError) as error:
        with pytest.raises(type(error)):
            batch_of(samples)
    else:
        assert describe(batch_of(samples)) == expected


def describe(batch: Any) -> Any:
    """Types and values, in a form that can be compared, NaN with NaN."""
    if isinstance(batch, torch.Tensor):
        return (batch.dtype, repr(batch.tolist()))
    if isinstance(batch, dict):
        return {name: describe(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return (type(batch), [describe(value) for value in batch])
    return (type(batch), batch)


@pytest.mark.parametrize(
    ("values", "note"),
    [
        ([1, None], "field 'x' of sample 1 of the batch ('k1') is None: fill it in"),
        ([None, "a"], "field 'x' of sample 0 of the batch ('k0') is None: fill it in"),
        ([torch.zeros(2), None], "field 'x' of sample 1 of the batch ('k1') is None: fill it in"),
        ([object(), object()], "field 'x' of the batch has values of the types object: make them alike"),
    ],
    ids=["number", "first", "tensor", "object"],
)
def test_an_error_names_field_sample_and_cure(values: list[Any], note: str) -> None:
    with pytest.raises((RuntimeError, TypeError)) as failed:  # as torch has it
        batch_of([{"__sample_key__": f"k{number}", "x": value} for number, value in enumerate(values)])
    assert failed.value.__notes__[0].startswith(note)


@pytest.mark.parametrize("value", [2**63, np.arange(3)[::-1], np.arange(3, dtype=">i4")], ids=["large", "turned", "swapped"])
def test_values_that_torch_does_not_take_are_named_with_their_field(value: object) -> None:
    with pytest.raises((RuntimeError, ValueError, OverflowError)) as failed:  # as torch has it
        batch_of([{"x": value}, {"x": value}])
    assert "field 'x' of the batch" in failed.value.__notes__[0]
    assert "by a transform, or give a collate_fn" in failed.value.__notes__[0]


def test_a_field_that_a_sample_lacks_is_named() -> None:
    with pytest.raises(KeyError) as failed:
        batch_of([{"x": 1, "__sample_key__": "a"}, {"__sample_key__": "b"}])
    assert failed.value.__notes__ == [
        "sample 1 of the batch ('b') has no field 'x', and sample 0 has: give it to all, or drop it, by a transform"
    ]
