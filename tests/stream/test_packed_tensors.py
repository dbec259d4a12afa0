"""Tensors of a batch in memory shared with their worker: the same values, the trainer's own, free when it lets go of them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from sqlstream.stream.transport.arena import SLOT_BYTES
from sqlstream.stream.transport.packing import NUM_SPARE_SLOTS, BatchPacker, PackedBytes
from sqlstream.transforms.base import Sample
from tests.stream.packing import Samples

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
    packing = BatchPacker(2, PREFETCH, BATCH)
    options: dict[str, Any] = {"num_workers": 2, "multiprocessing_context": context, "collate_fn": packing}
    return DataLoader(Samples(sample_of, num_samples, packing), batch_size=BATCH, **options)


def sent(batch: Any) -> Any:
    """Return a batch as the trainer gets it."""
    return ForkingPickler.loads(bytes(ForkingPickler.dumps(batch)))


def frames(packing: BatchPacker, number: int) -> torch.Tensor:  # [b, c, h, w]
    batch = sent(packing(list(packing.gather({"frame": frame(n)} for n in range(number, number + BATCH)))))
    return batch["frame"]  # type: ignore[no-any-return]


def is_taken(packing: BatchPacker) -> list[bool]:
    gc.collect()
    return [bool(flag) for flag in packing._arena.memory[: packing._arena.num_slots]]


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
    packing = BatchPacker(1, PREFETCH, BATCH)
    message = bytes(ForkingPickler.dumps(packing(list(packing.gather({"frame": frame(n)} for n in range(BATCH))))))
    assert len(message) < 1000
    assert b"rebuild_storage" not in message, "torch opens a file and a socket for each tensor that it shares"
    assert torch.equal(ForkingPickler.loads(message)["frame"], torch.stack([frame(n) for n in range(BATCH)]))


@pytest.mark.parametrize(
    "values",
    [
        [frame(1), frame(2)[:, 1:]],
        [torch.eye(100).to_sparse()] * 2,
        [frame(1), "a path"],
        [None, frame(1)],
    ],
    ids=["shapes", "sparse", "not a tensor", "None"],
)
def test_what_cannot_be_stacked_is_refused_as_torch_does(values: list[Any]) -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    with pytest.raises(Exception, match=r".") as theirs:
        default_collate(values)
    with pytest.raises(type(theirs.value)) as ours:
        packing(list(packing.gather({"frame": value} for value in values)))
    assert str(ours.value) == str(theirs.value)
    assert torch.equal(frames(packing, 5)[0], frame(5)), "the next batch is none the worse"


class Marked(torch.Tensor):
    """A tensor that knows more than numbers."""


def test_tensors_that_are_more_than_numbers_go_as_torch_sends_them() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    for special in (frame(1).as_subclass(Marked), torch.ones(SHAPE, requires_grad=True)):
        batch = packing(list(packing.gather({"frame": special} for _ in range(BATCH))))
        expected = default_collate([special] * BATCH)
        assert type(batch["frame"]) is type(expected)
        assert batch["frame"].requires_grad == expected.requires_grad
        assert torch.equal(batch["frame"], expected)
    assert not any(is_taken(packing))


@pytest.mark.parametrize("chosen", [slice(1, None), slice(None, None, -1), slice(0, None, 2)], ids=["rest", "turned", "some"])
def test_a_batch_of_other_samples_than_were_gathered_has_their_values(chosen: slice) -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    for start in range(0, 3 * NUM_SLOTS * BATCH, BATCH):
        samples = list(packing.gather({"frame": frame(n)} for n in range(start, start + BATCH)))[chosen]
        expected = torch.stack([frame(n) for n in range(start, start + BATCH)[chosen]])  # [b, c, h, w]
        assert torch.equal(sent(packing(samples))["frame"], expected)


def test_more_samples_than_a_batch_has_as_a_rule_are_stacked_all_the_same() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    batch = sent(packing(list(packing.gather({"frame": frame(n)} for n in range(BATCH + 1)))))
    assert torch.equal(batch["frame"], torch.stack([frame(n) for n in range(BATCH + 1)]))


def test_a_field_of_tensors_and_bytes_is_a_list_of_its_own() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    values = [frame(1), b"x" * 5000]
    kept = packing(list(packing.gather({"field": value} for value in values)))["field"]
    for number in range(2 * NUM_SLOTS):
        frames(packing, number)
    assert torch.equal(kept[0], frame(1))
    assert kept[1] == values[1]


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
    packing = BatchPacker(1, PREFETCH, BATCH)
    kept = view_of(frames(packing, 0))
    before = np.asarray(kept).copy()
    for number in range(1, 3 * NUM_SLOTS):
        assert not is_shared(frames(packing, number))
        assert np.array_equal(np.asarray(kept), before)
    assert sum(is_taken(packing)) == 1
    del kept
    assert not any(is_taken(packing))


def test_the_memory_of_a_tensor_is_free_before_its_batch_is_full() -> None:
    alive: list[int] = []

    def samples() -> Iterator[Sample]:
        made: list[weakref.ref[torch.Tensor]] = []  # [c, h, w] each
        for number in range(BATCH):
            tensor = frame(number)  # [c, h, w]
            made.append(weakref.ref(tensor))
            sample = {"frame": tensor}
            del tensor
            yield sample
            del sample
            alive.append(sum(ref() is not None for ref in made))

    packing = BatchPacker(1, PREFETCH, BATCH)
    batch = packing(list(packing.gather(samples())))
    assert alive == [1] * BATCH, "each but for the one that the loop has at hand"
    assert torch.equal(sent(batch)["frame"], torch.stack([frame(n) for n in range(BATCH)]))


def test_tensors_and_bytes_of_a_batch_share_its_slot() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH, gives_views=True)
    batch = sent(packing(list(packing.gather({"frame": frame(n), "odd": b"y" * 5000} for n in range(BATCH)))))
    assert type(batch["odd"]) is PackedBytes
    tensor = batch["frame"]  # [b, c, h, w]
    assert sum(is_taken(packing)) == 1
    del batch
    assert sum(is_taken(packing)) == 1
    del tensor
    assert not any(is_taken(packing))


def test_what_the_trainer_writes_into_a_batch_is_not_in_the_next_ones() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    for number in range(2 * NUM_SLOTS):
        batch = frames(packing, number)  # [b, c, h, w]
        assert torch.equal(batch, torch.stack([frame(n) for n in range(number, number + BATCH)]))
        batch.mul_(2).add_(1)
        with pytest.raises(RuntimeError, match="resiz"):
            batch.resize_(1000, *SHAPE)  # nor can a tensor that torch shares


def test_a_tensor_that_a_graph_needs_is_kept_until_backward() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
    weight = torch.ones(SHAPE, requires_grad=True)  # [c, h, w]
    batch = sent(packing(list(packing.gather({"frame": frame(n, torch.float32)} for n in range(BATCH)))))
    loss = (batch["frame"] * weight).sum()  # []
    del batch
    for number in range(10, 10 + 2 * NUM_SLOTS):
        frames(packing, number)
    loss.backward()
    del loss
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full(SHAPE, float(sum(range(BATCH)))))
    assert not any(is_taken(packing))


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
    packing = BatchPacker(1, PREFETCH, BATCH)
    large = torch.zeros(SLOT_BYTES // 2 + 1, dtype=torch.uint8)  # [n]
    batch = packing(list(packing.gather({"large": large, "frame": frame(n)} for n in range(2))))
    assert type(batch["large"]) is torch.Tensor
    assert type(batch["frame"]) is not torch.Tensor


# -- children of the trainer ------------------------------------------------------------------------------------------


def test_a_slot_is_not_used_again_while_a_child_has_its_batch() -> None:
    packing = BatchPacker(1, PREFETCH, BATCH)
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
    assert is_taken(packing) == [True] + [False] * (NUM_SLOTS - 1)
    os.close(tell)
    assert os.waitpid(pid, 0)[1] == 0
    frames(packing, 0)
    assert not any(is_taken(packing))
