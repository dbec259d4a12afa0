"""`PackTokens` on packs of all kinds; batches of what it makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import SampleError
from sqlstream.transforms.packs import PackTokens, collate_packs


def part(row: int, tokens: Any, span: tuple[int, int] | None = None, **fields: Any) -> dict[str, Any]:
    start, stop = span or (0, len(tokens))
    return {"__row__": row, "__span__": (start, stop), "__length__": max(stop, len(tokens)), "input_ids": tokens, **fields}


def packed(*parts: dict[str, Any], capacity: int = 8, **options: Any) -> dict[str, Any]:
    pack = {"parts": list(parts), "__rows__": [one["__row__"] for one in parts], "capacity": capacity}
    return PackTokens(**options)(pack)


def lists(pack: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in pack.items()}


def test_lists_arrays_and_tensors_are_joined_and_padded() -> None:
    tokens = [[1, np.int64(2), 3], np.array([4, 5], np.int16), torch.tensor([6, 7])]  # [n]
    assert lists(packed(*(part(row, some) for row, some in enumerate(tokens)), pad_token_id=9)) == {
        "__rows__": [0, 1, 2],
        "input_ids": [1, 2, 3, 4, 5, 6, 7, 9],
        "labels": [-100, 2, 3, -100, 5, -100, 7, -100],
        "position_ids": [0, 1, 2, 0, 1, 0, 1, 0],
        "document_ids": [0, 0, 0, 1, 1, 2, 2, 3],
        "cu_seqlens": [0, 3, 5, 7, 8],
        "seq_lengths": [3, 2, 2, 1],
        "max_seqlen": 3,
    }


def test_labels_of_the_rows_other_sequences_and_values_that_are_none() -> None:
    one = part(0, [1, 2, 3], labels=list(np.array([7, 8, 9])), mask=[1.0, 0.0, 1.0], name="a", pair=[1, 2])
    two = part(1, [4, 5], labels=[5, 6], mask=[0.5, 0.5], name="b", pair=[3, 4])
    pack = lists(packed(one, two, capacity=6, ignore_index=-1))
    assert pack["labels"] == [-1, 8, 9, -1, 6, -1]
    assert pack["mask"] == [1.0, 0.0, 1.0, 0.5, 0.5, 0.0]
    assert pack["name"] == ["a", "b"]
    assert list(one["labels"]) == [7, 8, 9], "the samples of the rows stay as they are"


def test_parts_are_cut_and_rows_may_be_shorter_than_their_length() -> None:
    row = list(range(10, 20))
    pack = lists(packed(part(0, row, (8, 10)), part(1, [1, 2], (0, 4)), part(2, [5], (8, 9)), tokens="input_ids"))
    assert pack["input_ids"] == [18, 19, 1, 2, 0, 0, 0, 0]
    assert pack["seq_lengths"] == [2, 2, 4], "a part without values is none"
    empty = packed(part(2, [5], (8, 9)), is_padded=False)
    assert (empty["max_seqlen"], empty["cu_seqlens"].tolist(), empty["input_ids"].tolist()) == (0, [0], [])


def test_a_row_that_is_longer_than_its_length_or_no_sequence_is_refused() -> None:
    long = part(4, [1, 2, 3]) | {"__length__": 2}
    with pytest.raises(SampleError, match="row 4 has 3 values in 'input_ids', and its length in the index is 2"):
        PackTokens().check(long)
    for tokens in ("text", None, np.zeros((2, 2)), [[1], [2]]):
        with pytest.raises(SampleError, match=r"row 4 has no sequence in field 'input_ids' \(fields: input_ids\)"):
            PackTokens().check(part(4, []) | {"input_ids": tokens})


def test_a_batch_counts_through_its_packs() -> None:
    packs = [packed(part(0, [1, 2]), part(1, [3]), capacity=4), packed(part(2, [4, 5, 6, 7]), capacity=4)]
    batch = lists(collate_packs(packs))
    assert batch["input_ids"] == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert batch["cu_seqlens"] == [0, 2, 3, 4, 8]
    assert (batch["seq_lengths"], batch["max_seqlen"], batch["__rows__"]) == ([2, 1, 1, 4], 4, [[0, 1], [2]])
    ragged = lists(collate_packs([packed(part(0, [1, 2]), is_padded=False), packed(part(1, [3]), is_padded=False)]))
    assert ragged["input_ids"] == [[1, 2, 3]]
    assert ragged["cu_seqlens"] == [0, 2, 3]
