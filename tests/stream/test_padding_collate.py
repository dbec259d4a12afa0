"""Fields of several lengths in a batch: padded by name, or an error that names field, shapes and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import AspectBuckets, Buckets, Lengths, PaddingCollate, StreamingDataLoader
from sqlstream.errors import ConfigError, TransformError
from sqlstream.transforms.presets import PadToBucket
from tests.stream.bucket_runs import some_runs, write_lengths

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
BY_LENGTH = Buckets("length", Lengths((10, 30)), global_batch_size=8)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Any]:
    with some_runs(write_lengths(tmp_path)) as make:
        yield make


def ragged(sample: dict[str, Any]) -> dict[str, Any]:
    length = sample["length"] - sample["row"] % 3
    return {**sample, "ids": torch.full((length,), 7), "labels": np.full(length, 8)}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_pads_what_the_plan_leaves_ragged(num_workers: int, runs: Any) -> None:
    (dataset,) = runs(transforms=[ragged], batches=BY_LENGTH).datasets
    context = "fork" if num_workers else None
    for batch in StreamingDataLoader(dataset, num_workers=num_workers, multiprocessing_context=context):
        lengths = batch["length"] - batch["row"] % 3  # [b]
        assert batch["ids_lengths"].tolist() == lengths.tolist() == batch["labels_lengths"].tolist()
        assert batch["ids"].shape == (8, int(lengths.max()))
        is_own = torch.arange(int(lengths.max())) < lengths[:, None]  # [b, n]
        assert torch.equal(batch["ids"], torch.where(is_own, 7, 0))
        assert torch.equal(batch["labels"], torch.where(is_own, 8, -100)), "what a loss leaves out"


def test_values_and_multiples_are_given_by_name() -> None:
    samples = [{"ids": torch.ones(5, 2), "labels": torch.zeros(3), "same": torch.ones(4)}, {"ids": torch.ones(2, 2)}]
    samples[1] |= {"labels": torch.zeros(3), "same": torch.zeros(4)}
    batch = PaddingCollate({"ids": 0.5}, multiple_of=4)(samples)
    assert batch["ids"].shape == (2, 8, 2)
    assert batch["ids"][1, 2:].unique().tolist() == [0.5]
    assert batch["same"].shape == (2, 4)
    assert set(batch) == {"ids", "labels", "same", "ids_lengths"}
    with pytest.raises(ConfigError, match="multiple_of=0"):
        PaddingCollate(multiple_of=0)


def test_a_field_that_is_given_a_value_is_padded_where_its_lengths_are_the_same_by_chance() -> None:
    samples = [{"ids": torch.ones(5), "image": torch.ones(3, 2)} for _ in range(2)]  # [n], [c, n]
    batch = PaddingCollate({"ids": 7}, multiple_of=8)(samples)
    assert batch["ids"].tolist() == [[1] * 5 + [7] * 3] * 2
    assert batch["ids_lengths"].tolist() == [5, 5]
    assert batch["image"].shape == (2, 3, 2)
    assert set(PaddingCollate(multiple_of=8)(samples)) == {"ids", "image"}


def test_a_number_that_the_type_of_a_field_cannot_hold_is_an_error() -> None:
    """Labels of uint8 were padded with 156, which is a class."""
    for kind, values, pad in (
        (torch.uint8, None, "-100"),
        (torch.bool, {"labels": 2}, "2"),
        (torch.int64, {"labels": 0.5}, "0.5"),
    ):
        samples = [{"labels": torch.ones(length, dtype=kind)} for length in (1, 2)]  # [n]
        with pytest.raises(TransformError, match=rf"field 'labels' is padded with {pad}, which {kind} cannot hold"):
            PaddingCollate(values)(samples)


def test_lengths_that_samples_have_stay_theirs() -> None:
    samples = [{"ids": torch.ones(length), "ids_lengths": 10 * length} for length in (1, 2)]  # [n]
    batch = PaddingCollate()(samples)
    assert (batch["ids"].tolist(), batch["ids_lengths"].tolist()) == ([[1, 0], [1, 1]], [10, 20])


def test_tensors_that_differ_in_another_dimension_are_an_error() -> None:
    with pytest.raises(TransformError, match=r"field 'x' cannot be stacked: it has shape \(2, 3\) in sample 0"):
        PaddingCollate()([{"x": torch.ones(2, 3)}, {"x": torch.ones(3, 2)}])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_cannot_be_stacked_names_field_shapes_and_cures(num_workers: int, runs: Any) -> None:
    def rectangle(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "image": torch.ones(3, 4 + sample["row"] % 2)}

    pictures = Buckets("length, 10", AspectBuckets.of([(1, 1)]), global_batch_size=4)
    for options in ({"batches": None}, {"batches": pictures}):
        (dataset,) = runs(transforms=[rectangle], **options).datasets
        size: dict[str, Any] = {"batch_size": 4} if options["batches"] is None else {}
        context = "fork" if num_workers else None
        loader = StreamingDataLoader(dataset, num_workers=num_workers, multiprocessing_context=context, **size)
        problem = r"field 'image' cannot be stacked: it has shape \(3, [45]\).*and \(3, [45]\).*ResizeToBucket.*PaddingCollate"
        with pytest.raises(TransformError, match=problem):
            list(loader)


def test_a_sequence_is_padded_to_the_length_of_its_bucket() -> None:
    pad = PadToBucket("ids", value=9, mask_field="mask", side="left")
    sample = pad({"ids": [1, 2], "__bucket__": 4})
    assert sample["ids"].tolist() == [9, 9, 1, 2]
    assert sample["mask"].tolist() == [False, False, True, True]
    assert PadToBucket("x")({"x": torch.ones(2, 3), "__bucket__": 2})["x"].shape == (2, 3)
    with pytest.raises(TransformError, match=r"of shape \[3\] does not fit its bucket of length 2"):
        PadToBucket("x")({"x": torch.ones(3), "__bucket__": 2})
    with pytest.raises(TransformError, match="which is no length"):
        PadToBucket("x")({"x": torch.ones(3), "__bucket__": (2, 2)})
    with pytest.raises(ConfigError, match="side='middle'"):
        PadToBucket("x", side="middle")
