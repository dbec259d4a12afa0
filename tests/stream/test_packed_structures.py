"""What any `collate_fn` returns crosses to the trainer: the same structure, types and values, with long values in the slot."""

from __future__ import annotations

import array
import collections
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torch.utils.data._utils.pin_memory import pin_memory

from sqlstream.stream.transport.arena import MAX_SLOTS, SLOT_BYTES, Arena, OpenArena, leased_memory
from sqlstream.stream.transport.packed_collate import NUM_SPARE_SLOTS, PackedCollate
from sqlstream.stream.transport.packing import MAX_MESSAGE_BYTES, MIN_PACKED_BYTES, PackedBytes
from sqlstream.transforms.base import Sample
from tests.stream.packing import Packing, Samples, sent

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

PREFETCH, BATCH = 2, 4
NUM_SLOTS = PREFETCH + NUM_SPARE_SLOTS
LONG = bytes(range(256)) * 40
ROWS = torch.arange(40_000, dtype=torch.float32).view(100, 400)  # [h, w]
ARRAY = np.arange(60_000, dtype=np.int32).reshape(200, 300)  # [h, w]


class Named(NamedTuple):
    image: Any
    note: Any


@dataclass
class Made:
    image: Any
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Frozen:
    image: Any


class Text(str):
    """A subclass, which stays one."""

    __slots__ = ()


def equal(first: Any, second: Any) -> bool:
    """Return whether two values are the same by type, structure and value."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return first.dtype == second.dtype and first.stride() == second.stride() and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        same = first.dtype == second.dtype and first.flags.writeable == second.flags.writeable
        return same and np.array_equal(first, second)
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(equal, first, second))
    if isinstance(first, Made):
        return equal([first.image, first.more], [second.image, second.more])
    return bool(first == second)


STRUCTURES: dict[str, Any] = {
    "a list of bytes": [LONG, b"short", b"", LONG[1:]],
    "bytes alone": LONG,
    "a bytearray": bytearray(LONG),
    "texts": ["ä" * 5000, "short", "\ud800" * 2000, Text("x" * 5000)],
    "a set": {LONG, "x" * 5000, 3},
    "nested": {"a": {"b": [(LONG, {"c": ROWS})]}, 3: None, ("k", 1): [[LONG], [LONG + b"x"]]},
    "a named tuple": Named(LONG, ROWS),
    "a dataclass": Made(LONG, {"array": ARRAY}),
    "a frozen dataclass": Frozen(LONG),
    "an ordered dict": collections.OrderedDict(b=LONG, a=ROWS),
    "a default dict": collections.defaultdict(list, a=[LONG]),
    "numbers": (1, 2.5, 1 << 100, True, None, ..., 3j),
    "tensors": [ROWS, torch.tensor(3), torch.zeros(0, 7), torch.ones(3, dtype=torch.bfloat16)],
    "a turned tensor": ROWS.T,
    "a tensor of channels last": torch.arange(120_000.0).view(1, 3, 200, 200).to(memory_format=torch.channels_last),
    "empty tensors that numpy has no type for": [
        torch.zeros(0, dtype=torch.bfloat16),
        torch.zeros(2, 0, 3).to(torch.complex64).mT,
    ],
    "conjugated numbers": [torch.randn(n, dtype=torch.complex64).conj() for n in (10, 20_000)],
    "negated numbers": [torch._neg_view(torch.randn(n)) for n in (10, 40_000)],
    "long complex numbers": torch.arange(20_000).to(torch.complex64),
    "an array": ARRAY,
    "a short array": ARRAY[:3, :4].copy(),
    "an array in columns": np.asfortranarray(ARRAY),
    "an array of one's own names": np.zeros(9000, [("a", "<i4"), ("b", "S9")]),
    "an array of objects": np.array([LONG, "x" * 3000, None], dtype=object),
    "an array of python": array.array("d", range(20_000)),
    "an Arrow table": pa.table({"a": list(range(30_000)), "b": ["x"] * 30_000}),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_batch_comes_out_with_the_types_that_it_went_in_with(name: str) -> None:
    packing = Packing(PREFETCH)
    for _ in range(2 * NUM_SLOTS):
        assert equal(packing.send(STRUCTURES[name]), STRUCTURES[name])
    assert not any(packing.is_taken())


def test_an_image_of_pillow_comes_out_with_its_pixels() -> None:
    image = Image.fromarray(ARRAY.astype(np.uint8))
    assert Packing(PREFETCH).send({"image": image})["image"].tobytes() == image.tobytes()


def test_an_array_that_may_not_be_written_comes_out_so() -> None:
    locked = ARRAY.copy()
    locked.flags.writeable = False
    got = Packing(PREFETCH).send([locked, ARRAY])
    assert [value.flags.writeable for value in got] == [False, True]
    got[1] += 1  # the trainer's own


@pytest.mark.parametrize("value", [LONG, "x" * 5000, ROWS, ARRAY, bytearray(LONG)], ids=lambda value: type(value).__name__)
def test_a_value_that_a_batch_has_twice_is_one_object_in_the_trainer(value: Any) -> None:
    packing = Packing(PREFETCH)
    packing.packer.begin()
    message = bytes(ForkingPickler.dumps(packing.packer.pack({"a": value, "b": [value, value]})))
    assert len(message) < MIN_PACKED_BYTES
    got = ForkingPickler.loads(message)
    assert got["a"] is got["b"][0] is got["b"][1]


def test_objects_that_are_made_while_a_batch_is_pickled_are_not_mistaken_for_each_other() -> None:
    batch = [Fleeting(number) for number in range(50)]
    assert [value.data for value in Packing(PREFETCH).send(batch)] == [value.data for value in batch]


class Fleeting:
    """Makes its state as it is pickled, in memory that the next one uses again."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.data = bytes([number]) * 5000

    def __getstate__(self) -> dict[str, Any]:
        return {"number": self.number, "data": bytes([self.number]) * 5000}


def test_a_label_that_the_trainer_keeps_keeps_no_slot() -> None:
    packing = Packing(PREFETCH)
    kept = [packing.send({"label": torch.tensor([n]), "array": np.arange(3), "image": LONG}) for n in range(2 * NUM_SLOTS)]
    assert not any(packing.is_taken())
    assert [batch["label"].item() for batch in kept] == list(range(2 * NUM_SLOTS))


@pytest.mark.parametrize("value", [ROWS, ARRAY], ids=["tensor", "array"])
def test_what_the_trainer_keeps_is_not_written_over(value: Any) -> None:
    packing = Packing(PREFETCH)
    kept = packing.send({"value": value})["value"]
    for number in range(3 * NUM_SLOTS):
        packing.send({"value": value * 0 + number})
    assert equal(kept, value)
    assert sum(packing.is_taken()) == 1


def test_while_the_trainer_keeps_all_slots_values_come_without() -> None:
    packing = Packing(PREFETCH)
    batch = {"array": ARRAY, "rows": ROWS, "image": [LONG], "text": "x" * 5000}
    kept = [packing.send(batch) for _ in range(NUM_SLOTS + 2)]
    assert all(packing.is_taken())
    assert all(equal(got, batch) for got in kept)


def test_what_does_not_fit_into_a_slot_comes_beside_it() -> None:
    packing = Packing(PREFETCH)
    large = {"bytes": bytes(SLOT_BYTES + 1), "array": np.zeros(SLOT_BYTES + 1, np.uint8), "image": LONG}
    assert equal(packing.send(large), large)
    viewing = Packing(PREFETCH, gives_views=True)
    got = viewing.send([[LONG], [bytes(SLOT_BYTES)], [LONG, LONG]])
    assert [type(values) for values in got] == [PackedBytes, list, PackedBytes]
    assert [list(values) for values in got] == [[LONG], [bytes(SLOT_BYTES)], [LONG, LONG]]


def test_an_expanded_tensor_is_sent_with_the_memory_that_it_has() -> None:
    expanded = torch.arange(4.0).expand(100_000, 4)  # [n, 4]
    packing = Packing(PREFETCH)
    packing.packer.begin()
    assert torch.equal(sent(packing.packer.pack(expanded)), expanded)
    assert not any(packing.arena.memory[: packing.arena.num_slots])


def test_a_tensor_that_torch_has_no_operations_for_is_sent_as_torch_does() -> None:
    four_bits: torch.dtype = vars(torch)["uint4"]  # which its types do not name
    got = Packing(PREFETCH).send([torch.empty(5, dtype=four_bits), ROWS])
    assert got[0].dtype == four_bits
    assert equal(got[1], ROWS)


def test_conjugated_numbers_that_find_no_room_are_sent_resolved() -> None:
    packing = Packing(PREFETCH)
    kept = [packing.send(ROWS) for _ in range(NUM_SLOTS)]
    assert all(packing.is_taken())
    numbers = torch.randn(20_000, dtype=torch.complex64).conj()  # [n]
    assert torch.equal(packing.send(numbers), numbers)
    assert len(kept) == NUM_SLOTS


def test_bytes_in_an_array_of_objects_are_no_list_that_views_are_given_of() -> None:
    objects = np.array([[LONG, LONG + b"x"], [b"", LONG]], dtype=object)
    got = Packing(PREFETCH, gives_views=True).send({"objects": objects, "image": [LONG]})
    assert equal(got["objects"], objects)
    assert type(got["image"]) is PackedBytes


def test_views_are_given_of_lists_of_bytes_wherever_they_are() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    got = packing.send(Named([LONG, b"x"], {"more": [LONG], "mixed": [LONG, 3], "short": [b"x"], "none": []}))
    kinds = [type(got.image), *(type(value) for value in got.note.values())]
    assert kinds == [PackedBytes, PackedBytes, list, list, list]
    assert got.note["mixed"] == [LONG, 3]


def test_torch_pins_a_batch_that_came_by_shared_memory_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []  # [...] each

    def note(tensor: torch.Tensor, *_: object) -> torch.Tensor:  # [...]
        pinned.append(tensor)
        return tensor

    monkeypatch.setattr(torch.Tensor, "pin_memory", note)  # there is no GPU
    packing = Packing(PREFETCH)
    batch = {"rows": ROWS, "images": [LONG, LONG], "more": Named(ROWS + 1, "x" * 5000)}
    got = pin_memory(packing.send(batch))  # type: ignore[no-untyped-call]  # torch has no types for it
    assert equal(got, batch)
    assert len(pinned) == 2


class Unsendable:
    """What cannot be pickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("this stays here")


def test_what_cannot_be_sent_is_an_error_and_the_next_batch_is_none_the_worse() -> None:
    packing = Packing(PREFETCH)
    with pytest.raises(TypeError, match="this stays here"):
        packing.send([LONG, ROWS, Unsendable()])
    assert not any(packing.is_taken())
    assert equal(packing.send([LONG, ROWS]), [LONG, ROWS])


# -- torch's DataLoader -----------------------------------------------------------------------------------------------


def sample_of(number: int) -> Sample:
    return {"image": number.to_bytes(4, "big") * 2000, "number": number}


def as_made(samples: list[Sample]) -> Made:
    """A `collate_fn` of one's own."""
    pixels = np.stack([np.full(MAX_MESSAGE_BYTES, sample["number"] % 200, np.uint8) for sample in samples])
    return Made([sample["image"] for sample in samples], {"pixels": pixels, "keys": tuple(s["number"] for s in samples)})


def raising(samples: list[Sample]) -> Any:
    if samples[0]["number"] == 0:
        return [Unsendable()]
    return samples


def own_loader(collate_fn: Callable[[list[Sample]], Any], **options: Any) -> DataLoader[Any]:
    """Of forked workers; test_packed.py has some that are spawned."""
    options = {"batch_size": BATCH, "num_workers": 2, "multiprocessing_context": "fork", **options}
    return DataLoader(Samples(sample_of, 6 * BATCH), collate_fn=PackedCollate(collate_fn), **options)


def test_a_plain_loader_sends_what_ones_own_collate_makes() -> None:
    loader = own_loader(as_made, persistent_workers=True)
    for _ in range(2):
        seen: list[int] = []
        for batch in loader:
            seen += batch.more["keys"]
            assert equal(batch, as_made([sample_of(number) for number in batch.more["keys"]]))
        assert sorted(seen) == list(range(6 * BATCH))


def test_two_iterations_of_a_plain_loader_at_a_time_have_memory_each() -> None:
    loader = own_loader(as_made)
    first, second = iter(loader), iter(loader)
    taken = [(next(first), next(second)) for _ in range(6)]
    for pair in taken:
        for batch in pair:
            assert equal(batch, as_made([sample_of(number) for number in batch.more["keys"]]))


def test_an_error_of_the_transport_reaches_the_trainer() -> None:
    batches = iter(own_loader(raising))
    with pytest.raises(TypeError, match="this stays here"):
        next(batches)


def test_batches_without_workers_are_as_collate_makes_them() -> None:
    collate = PackedCollate(as_made)
    samples = [sample_of(number) for number in range(BATCH)]
    assert equal(collate(samples), as_made(samples))
    assert pickle.loads(pickle.dumps(collate))(samples).more["keys"] == tuple(range(BATCH))


def test_no_flag_of_a_slot_lies_in_a_slot_however_many_batches_wait() -> None:
    arena = Arena(3 * MAX_SLOTS)
    arena.write(0, 0, b"x" * 100)
    for _ in range(MAX_SLOTS):
        slot = arena.find_free()
        assert slot is not None
        arena.seal(slot)
    assert arena.find_free() is None
    assert bytes(leased_memory("", arena.name, 0)[:100]) == b"x" * 100


def test_memory_of_a_worker_that_is_gone_is_one_clear_error() -> None:
    packing = Packing(PREFETCH)
    name = packing.arena.name
    os.fstat(name.fd)
    with pytest.raises(ValueError, match=r"a batch lies in memory of the DataLoader worker \d+ that cannot be opened"):
        OpenArena(name._replace(fd=1 << 20))
    with pytest.raises(ValueError, match=r"the worker has ended.*pack_bytes=False"):
        OpenArena(name._replace(inode=name.inode + 1))
