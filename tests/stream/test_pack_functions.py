"""Functions of one's own that make the sample of a pack: they go with all packs, and what they do wrong is said."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import MixedDataset, Packs, StreamingDataset
from sqlstream.errors import TransformError
from sqlstream.transforms import rng
from tests.stream.pack_runs import CAPACITY, LENGTHS, NUM_ROWS, tokenize, tokens_of, write_table


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Any]:
    table, made = write_table(tmp_path / "rows.parquet"), []

    def make(packs: Packs, **options: Any) -> StreamingDataset:
        given: dict[str, Any] = {"shuffle_seed": 5, "show_progress": False, "transforms": [tokenize], "on_error": "raise"}
        made.append(StreamingDataset(table, tmp_path / "cache", batches=packs, **(given | options)))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def length_of(sample: dict[str, Any]) -> int:
    return int(sample["n"])


def together(pack: dict[str, Any]) -> dict[str, Any]:
    """The tokens of the rows, without padding, and a number that is drawn for the pack."""
    parts = [part["input_ids"][slice(*part["__span__"])] for part in pack["parts"]]
    bounds = np.cumsum([0, *map(len, parts)])  # [P + 1]
    return {
        "__rows__": pack["__rows__"],
        "input_ids": np.concatenate(parts),
        "cu_seqlens": bounds,
        "drawn": int(rng(pack).integers(1 << 40)),
    }


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "planned": ("n", {}),
    "measured": (length_of, {"lookahead": 11}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"weights": "n"}, {"num_canonical_nodes": 2}, {"epoch_size": 40}, {"shuffle_seed": None}], ids=str
)
def test_a_function_is_given_each_row_whatever_decides_their_order(kind: str, options: dict[str, Any], opened: Any) -> None:
    length, own = KINDS[kind]
    for capacity, on_long in ((CAPACITY, "raise"), (8, "split")):
        packs = list(opened(Packs(length, capacity, on_long=on_long, pack_fn=together, **own), **options))
        again = opened(Packs(length, capacity, on_long=on_long, pack_fn=together, **own), **options)
        assert [pack["drawn"] for pack in again] == [pack["drawn"] for pack in packs]
        assert len({pack["drawn"] for pack in packs}) == len(packs)
        tokens = Counter(token for pack in packs for token in pack["input_ids"].tolist())
        if not options.keys() & {"weights", "epoch_size"}:
            assert tokens == Counter(token for row, length in enumerate(LENGTHS) for token in tokens_of(row, length))


def with_call(sample: dict[str, Any]) -> dict[str, Any]:
    return {**tokenize(sample), "call": random.random}


def calls_only(pack: dict[str, Any]) -> dict[str, Any]:
    """Names nothing that draws: what it calls comes in the samples."""
    part = pack["parts"][0]
    return {"__rows__": pack["__rows__"], "input_ids": part["input_ids"], "drawn": part["call"]()}


def test_what_a_function_calls_may_come_in_the_samples_of_a_transform_that_names_it(opened: Any) -> None:
    packs = Packs("n", max(LENGTHS), max_rows=1, pack_fn=calls_only)
    one, other = ([pack["drawn"] for pack in opened(packs, transforms=[with_call])] for _ in range(2))
    assert one == other


def test_what_a_function_makes_of_a_stream_names_it(opened: Any) -> None:
    with MixedDataset({"one": opened(Packs("n", CAPACITY, pack_fn=together))}, epoch_size=8) as dataset:
        assert {pack["__stream__"] for pack in dataset} == {"one"}


def without_one(pack: dict[str, Any]) -> dict[str, Any]:
    return together({**pack, "parts": pack["parts"][1:], "__rows__": pack["__rows__"][1:]})


def with_one_twice(pack: dict[str, Any]) -> dict[str, Any]:
    return {"__rows__": [*pack["__rows__"], pack["__rows__"][0]]}


def with_an_end(pack: dict[str, Any]) -> dict[str, Any]:
    """Adds a token to each row, which its length does not count."""
    return {"labels": [token for part in pack["parts"] for token in [*part["input_ids"].tolist(), 0]]}


def with_wrong_bounds(pack: dict[str, Any]) -> dict[str, Any]:
    made = together(pack)
    return {**made, "cu_seqlens": made["cu_seqlens"][1:]}


def with_bounds_of_other_values(pack: dict[str, Any]) -> dict[str, Any]:
    made = together(pack)
    return {**made, "input_ids": made["input_ids"][:-1]}


WRONG = [
    (without_one, r"gave __rows__ that leaves out \[\d+\] for pack of rows \d+, .*let it keep each of the rows"),
    (with_one_twice, r"gave __rows__ that has \[\d+\] too often for pack of rows"),
    (with_an_end, r"gave 3\d values in 'labels' for pack of rows .*, and a pack has at most 32: let length= count"),
    (with_wrong_bounds, r"gave cu_seqlens=array.*begin with 0, never fall, and end with the number of values, \d+"),
    (with_bounds_of_other_values, r"gave cu_seqlens=array\(\[ *0, .*end with the number of values, \d+"),
    (lambda pack: {"cu_seqlens": [[0], [1, 2]], "labels": "text"}, r"gave cu_seqlens=\[\[0\], \[1, 2\]\].*at most 32"),
    (lambda pack: [pack, pack], "gave several samples for pack of rows"),
    (lambda pack: None, "returned NoneType for sample 'pack of rows"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("pack_fn", "problem"), WRONG, ids=[problem[:30] for _, problem in WRONG])
def test_what_a_function_does_wrong_is_an_error_that_names_the_pack(kind: str, pack_fn: Any, problem: str, opened: Any) -> None:
    length, own = KINDS[kind]
    with pytest.raises(TransformError, match=problem):
        list(opened(Packs(length, CAPACITY, pack_fn=pack_fn, **own)))
    left = list(opened(Packs(length, CAPACITY, pack_fn=pack_fn, **own), on_error="skip", max_failure_ratio=1.0))
    assert len(left) < NUM_ROWS / 3, "such packs are left out"


def only_tokens(sample: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": np.array(tokens_of(sample["row"], sample["n"]))}  # [n]


@pytest.mark.parametrize("packs", [Packs("n", CAPACITY), Packs(None, CAPACITY, lookahead=11)], ids=["planned", "measured"])
def test_rows_keep_their_numbers_where_transforms_give_new_dicts(packs: Packs, opened: Any) -> None:
    made = list(opened(packs, transforms=[only_tokens]))
    assert sorted(row for pack in made for row in pack["__rows__"]) == list(range(NUM_ROWS))
    for pack in made:
        assert [int(number) // 1000 for number in pack["input_ids"][pack["cu_seqlens"][: len(pack["__rows__"])]]] == pack[
            "__rows__"
        ]
