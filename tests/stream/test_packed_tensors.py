"""Tensors of a batch in memory shared with their worker: the same values, the trainer's own, free when it lets go of them."""

from __future__ import annotations

import os
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from sqlstream.errors import TransformError
from sqlstream.stream.transport.arena import SLOT_BYTES
from sqlstream.stream.transport.packed_collate import NUM_SPARE_SLOTS, PackedCollate
from sqlstream.stream.transport.packing import PackedBytes
from sqlstream.transforms.base import Sample
from tests.stream.packing import Packing, Samples, sent

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

BATCH, PREFETCH = 4, 2
NUM_SLOTS = PREFETCH + NUM_SPARE_SLOTS
SHAPE = (3, 100, 100)
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
)


def frame(number: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:  # [c, h, w]
    return torch.full(SHAPE, number % 200, dtype=dtype)


def sample_of(number: int) -> Sample:
    tensors = {str(dtype): frame(number, dtype) for dtype in DTYPES}
    rows = torch.arange(number, number + 30_000).view(100, 300)  # [h, w]
    return {
        **tensors,
        "number": number,
        "odd": b"x" * (5000 + number),  # tensors behind it do not begin at an address of their own accord
        "turned": rows.T,
        "every_second": rows[::2],
        "array": np.arange(number, number + 30_000, dtype=np.float32),
        "scalar": torch.tensor(number),
        "empty": torch.zeros(0, 7),
        "nested": {"inner": frame(number)},
        "several": [frame(number), frame(number + 1)],
    }


def loader_of(context: str, num_samples: int) -> DataLoader[Sample]:
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context}
    collate_fn = PackedCollate(prefetch_factor=PREFETCH)
    return DataLoader(Samples(sample_of, num_samples), batch_size=BATCH, collate_fn=collate_fn, **options)


def frames(packing: Packing, number: int) -> torch.Tensor:  # [b, c, h, w]
    batch = sent(packing({"frame": frame(n)} for n in range(number, number + BATCH)))
    return batch["frame"]  # type: ignore[no-any-return]


def is_shared(tensor: torch.Tensor) -> bool:  # [...]
    """Return whether it went as torch sends tensors."""
    return bool(tensor.untyped_storage().is_shared())


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, torch.Tensor):
        return type(second) is torch.Tensor and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, list):
        return len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_batch_has_the_values_that_it_has_without(context: str) -> None:
    starts = [first + 2 * BATCH * number for number in range(2) for first in (0, 1)]
    batches = list(loader_of(context, 4 * BATCH))
    assert len(batches) == len(starts)
    for start, batch in zip(starts, batches, strict=True):
        expected = default_collate([sample_of(number) for number in range(start, start + 2 * BATCH, 2)])
        for name, value in expected.items():
            assert equal(value, list(batch[name]) if name == "odd" else batch[name]), (name, value, batch[name])
        packed = [*map(str, DTYPES), "turned", "every_second", "array"]
        assert not any(map(is_shared, (batch[name] for name in packed)))
        assert all(batch[name].is_contiguous() and batch[name].data_ptr() % 64 == 0 for name in packed)


def test_long_tensors_weigh_nothing_in_the_message() -> None:
    packing = Packing(PREFETCH)
    message = bytes(ForkingPickler.dumps(packing({"frame": frame(n)} for n in range(BATCH))))
    assert len(message) < 1000
    assert b"rebuild_storage" not in message, "torch opens a file and a socket for each tensor that it shares"
    assert torch.equal(ForkingPickler.loads(message)["frame"], torch.stack([frame(n) for n in range(BATCH)]))


def test_an_error_of_shapes_that_differ_names_field_and_both_shapes_where_torch_names_none() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        default_collate([frame(1), frame(2)[:, 1:]])
    problem = r"'frame' cannot be stacked: it has shape \(3, 100, 100\) in sample 0 .* \(3, 99, 100\)"
    with pytest.raises(TransformError, match=problem):
        Packing(PREFETCH)({"frame": value} for value in (frame(1), frame(2)[:, 1:]))


@pytest.mark.parametrize(
    "values",
    [
        [torch.eye(100).to_sparse()] * 2,
        [frame(1), "a path"],
        [frame(1), b"x" * 5000],
        [None, frame(1)],
    ],
    ids=["sparse", "not a tensor", "bytes", "None"],
)
def test_what_cannot_be_stacked_is_refused_as_torch_does(values: list[Any]) -> None:
    packing = Packing(PREFETCH)
    with pytest.raises(Exception, match=r".") as theirs:
        default_collate(values)
    with pytest.raises(type(theirs.value)) as ours:
        packing({"frame": value} for value in values)
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(frames(packing, 5)[0], frame(5)), "the next batch is none the worse"


class Marked(torch.Tensor):
    """A tensor that knows more than numbers."""


def test_tensors_that_are_more_than_numbers_go_as_torch_sends_them() -> None:
    packing = Packing(PREFETCH)
    marked = frame(1).as_subclass(Marked)  # [c, h, w]
    batch = sent(packing({"frame": marked} for _ in range(BATCH)))
    assert type(batch["frame"]) is type(default_collate([marked] * BATCH))
    assert torch.equal(batch["frame"], default_collate([marked] * BATCH))
    leaf = torch.ones(SHAPE, requires_grad=True)  # [c, h, w]
    got = packing.send({"leaf": leaf})["leaf"]
    assert got.requires_grad
    assert torch.equal(got, leaf)
    with pytest.raises(RuntimeError, match="Cowardly refusing to serialize non-leaf tensor"):
        packing({"frame": leaf} for _ in range(BATCH))
    assert not any(packing.is_taken())


@pytest.mark.parametrize("chosen", [slice(1, None), slice(None, None, -1), slice(0, None, 2)], ids=["rest", "turned", "some"])
def test_a_batch_of_some_samples_in_another_order_has_their_values(chosen: slice) -> None:
    packing = Packing(PREFETCH)
    for start in range(0, 3 * NUM_SLOTS * BATCH, BATCH):
        samples = [{"frame": frame(n)} for n in range(start, start + BATCH)][chosen]
        expected = torch.stack([frame(n) for n in range(start, start + BATCH)[chosen]])  # [b, c, h, w]
        assert torch.equal(sent(packing(samples))["frame"], expected)


def test_more_samples_than_a_batch_has_as_a_rule_are_stacked_all_the_same() -> None:
    packing = Packing(PREFETCH)
    batch = sent(packing({"frame": frame(n)} for n in range(BATCH + 1)))
    assert torch.equal(batch["frame"], torch.stack([frame(n) for n in range(BATCH + 1)]))


# -- lifetime ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "view_of",
    [
        lambda batch: batch[1][0][None].view(-1)[5:].view(torch.int8),
        lambda batch: batch[1].numpy()[0],
        lambda batch: np.from_dlpack(batch)[1],
        lambda batch: (batch.to(torch.uint8) * 1).set_(batch.untyped_storage()),
        lambda batch: memoryview(batch.numpy()),
    ],
    ids=["views", "numpy", "dlpack", "storage", "memoryview"],
)
def test_a_view_of_a_view_keeps_the_slot(view_of: Any) -> None:
    packing = Packing(PREFETCH)
    kept = view_of(frames(packing, 0))
    before = np.asarray(kept).copy()
    for number in range(1, 3 * NUM_SLOTS):
        assert not is_shared(frames(packing, number))
        assert np.array_equal(np.asarray(kept), before)
    assert sum(packing.is_taken()) == 1
    del kept
    assert not any(packing.is_taken())


def test_tensors_and_bytes_of_a_batch_share_its_slot() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    batch = sent(packing({"frame": frame(n), "odd": b"y" * 5000} for n in range(BATCH)))
    assert type(batch["odd"]) is PackedBytes
    tensor = batch["frame"]  # [b, c, h, w]
    assert sum(packing.is_taken()) == 1
    del batch
    assert sum(packing.is_taken()) == 1
    del tensor
    assert not any(packing.is_taken())


def test_what_the_trainer_writes_into_a_batch_is_not_in_the_next_ones() -> None:
    packing = Packing(PREFETCH)
    for number in range(2 * NUM_SLOTS):
        batch = frames(packing, number)  # [b, c, h, w]
        assert torch.equal(batch, torch.stack([frame(n) for n in range(number, number + BATCH)]))
        batch.mul_(2).add_(1)
        with pytest.raises(RuntimeError, match="resiz"):
            batch.resize_(1000, *SHAPE)  # nor can a tensor that torch shares


def test_a_tensor_that_a_graph_needs_is_kept_until_backward() -> None:
    packing = Packing(PREFETCH)
    weight = torch.ones(SHAPE, requires_grad=True)  # [c, h, w]
    batch = sent(packing({"frame": frame(n, torch.float32)} for n in range(BATCH)))
    loss = (batch["frame"] * weight).sum()  # []
    del batch
    for number in range(10, 10 + 2 * NUM_SLOTS):
        frames(packing, number)
    loss.backward()
    del loss
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full(SHAPE, float(sum(range(BATCH)))))
    assert not any(packing.is_taken())


def test_batches_that_are_kept_for_ever_do_not_stop_a_loader() -> None:
    num_batches = 2 * (NUM_SLOTS + 2)
    kept = list(loader_of("fork", num_batches * BATCH))
    assert len(kept) == num_batches
    assert sum(not is_shared(batch["torch.uint8"]) for batch in kept) == 2 * NUM_SLOTS
    for number, batch in enumerate(kept):
        numbers = [number // 2 * 2 * BATCH + number % 2 + 2 * n for n in range(BATCH)]
        assert batch["number"].tolist() == numbers
        assert torch.equal(batch["torch.uint8"], torch.stack([frame(n) for n in numbers]))


def test_a_batch_that_is_larger_than_a_slot_goes_as_torch_sends_it() -> None:
    packing = Packing(PREFETCH)
    large = torch.zeros(SLOT_BYTES // 2 + 1, dtype=torch.uint8)  # [n]
    batch = sent(packing({"large": large, "frame": frame(n)} for n in range(2)))
    assert is_shared(batch["large"])
    assert not is_shared(batch["frame"])


# -- children of the trainer ------------------------------------------------------------------------------------------


def test_a_slot_is_not_used_again_while_a_child_has_its_batch() -> None:
    packing = Packing(PREFETCH)
    batch = frames(packing, 0)  # [b, c, h, w]
    expected = batch.clone().numpy().tobytes()
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(tell)
        os.read(told, 1)  # until the trainer has let go of the batch, and taken others
        os._exit(0 if batch.numpy().tobytes() == expected else 1)  # torch's threads are not there after a fork
    os.close(told)
    del batch
    for number in range(1, 2 * NUM_SLOTS):
        frames(packing, number)
    assert packing.is_taken() == [True] + [False] * (NUM_SLOTS - 1)
    os.close(tell)
    assert os.waitpid(pid, 0)[1] == 0
    frames(packing, 0)
    assert not any(packing.is_taken())
