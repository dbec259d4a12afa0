"""Batches that lie in memory shared with their worker: the same values, no copy in the pipe, nothing left behind."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.transport.arena import SLOT_BYTES
from sqlstream.stream.transport.packed_collate import NUM_SPARE_SLOTS, PackedCollate
from sqlstream.stream.transport.packing import MIN_PACKED_BYTES, PackedBytes
from sqlstream.transforms.base import Sample
from tests.stream.packing import Packing, Samples, sent
from tests.stream.sources import Photos
from tests.stream.tables import make_table

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

BATCH, PREFETCH = 4, 2
LONG = MIN_PACKED_BYTES * 5


def long_bytes(number: int, size: int = LONG) -> bytes:
    return (number.to_bytes(4, "big") * (size // 4 + 1))[:size]


def sample_of(number: int) -> Sample:
    return {
        "image": long_bytes(number),
        "note": b"x" * (MIN_PACKED_BYTES - 2 + number % 4),  # some are short, some are long
        "tag": b"short",
        "key": f"sample {number}",
        "number": number,
        "score": number / 7,
        "is_even": number % 2 == 0,
        "pixels": torch.full((3, 5), number, dtype=torch.uint8),
        "frames": torch.full((3, 200, 200), number % 250, dtype=torch.uint8),
        "half": torch.full((2,), number, dtype=torch.bfloat16),
        "more": {"inner": long_bytes(number), "n": number},
    }


def loader_of(context: str, num_samples: int = 24, **options: Any) -> DataLoader[Sample]:
    return DataLoader(
        Samples(sample_of, num_samples),
        batch_size=BATCH,
        num_workers=2,
        collate_fn=PackedCollate(gives_views=True, prefetch_factor=PREFETCH),
        multiprocessing_context=context,
        **options,
    )


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, dict):
        return list(first) == list(second) and all(equal(first[name], second[name]) for name in first)
    if isinstance(first, torch.Tensor):
        return type(second) is torch.Tensor and first.dtype == second.dtype and torch.equal(first, second)
    return bool(first == second)


def small_batch(packing: Packing, number: int) -> Any:
    return sent(packing({"image": long_bytes(n)} for n in range(number, number + BATCH)))


def left_behind() -> list[str]:
    """Return the descriptors and mappings of shared batches in this process."""
    gc.collect()
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread of the loader's closed it meanwhile
            links.append(os.readlink(link))
    return [line for line in (*links, *Path("/proc/self/maps").read_text().splitlines()) if "sqlstream-batches" in line]


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_batch_has_the_values_that_it_has_without(context: str) -> None:
    plain = [default_collate([sample_of(n) for n in range(w + s, w + s + 2 * BATCH, 2)]) for s in (0, 8, 16) for w in (0, 1)]
    batches = list(loader_of(context))
    assert len(batches) == len(plain)
    assert left_behind()
    for batch, expected in zip(batches, plain, strict=True):
        assert equal(batch, expected), (batch, expected)
        assert type(batch["image"]) is type(batch["note"]) is PackedBytes
        assert type(batch["tag"]) is list
    del batch, batches
    assert not left_behind()


def test_long_bytes_and_small_tensors_do_not_weigh_on_the_message() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    samples = [{"image": long_bytes(n, 1 << 20), "number": n} for n in range(BATCH)]
    batch = packing(iter(samples))
    message = bytes(ForkingPickler.dumps(batch))
    assert len(message) < 2000
    assert b"rebuild_storage" not in message, "torch opens a file and a socket for each tensor that it shares"
    got = ForkingPickler.loads(message)
    assert got["image"] == [long_bytes(n, 1 << 20) for n in range(BATCH)]
    assert got["number"].tolist() == list(range(BATCH))
    got["number"] += 1  # the trainer's own


def test_a_field_with_something_else_in_it_stays_a_list() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    values: list[Any] = ["no file", long_bytes(1), b"", long_bytes(2)]
    for order in (values, values[::-1]):
        batch = sent(packing({"image": value} for value in order))
        assert batch["image"] == order
        assert type(batch["image"]) is list


def test_a_sample_that_a_transform_keeps_stays_as_it_is() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    own = {"image": long_bytes(1)}
    for _ in range(3):
        batch = sent(packing([own, own]))
        assert batch["image"] == [long_bytes(1)] * 2
    assert own == {"image": long_bytes(1)}


def test_packed_bytes_behave_as_the_list_that_they_stand_for() -> None:
    values = [long_bytes(n) for n in range(BATCH)]
    got = small_batch(Packing(PREFETCH, gives_views=True), 0)["image"]
    assert (len(got), got[0], got[-1], got[1:3], list(got)) == (BATCH, values[0], values[-1], values[1:3], values)
    assert got == values
    assert got != values[::-1]
    assert values[2] in got
    assert [bytes(view) for view in got.views()] == values
    assert all(view.readonly for view in got.views())
    assert pickle.loads(pickle.dumps(got)) == values
    with pytest.raises(IndexError):
        got[BATCH]
    with pytest.raises(TypeError):
        hash(got)


# -- slots ------------------------------------------------------------------------------------------------------------


def test_a_slot_is_used_again_when_the_last_view_of_it_is_gone_and_not_before() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    kept = small_batch(packing, 0)["image"].views()[2]
    for number in range(4, 4 * 20, 4):
        assert type(small_batch(packing, number)["image"]) is PackedBytes
        assert bytes(kept) == long_bytes(2)
    assert sum(packing.is_taken()) == 1, "the one whose view is kept"
    del kept
    assert not any(packing.is_taken())


def test_bytes_are_a_list_unless_views_are_asked_for_and_leave_their_slot_at_once() -> None:
    packing = Packing(PREFETCH)
    samples = [{"image": long_bytes(n)} for n in range(BATCH)]
    message = bytes(ForkingPickler.dumps(packing(iter(samples))))
    assert len(message) < MIN_PACKED_BYTES, "the bytes are in the slot"
    images = ForkingPickler.loads(message)["image"]
    assert type(images) is list
    assert images == [long_bytes(n) for n in range(BATCH)]
    assert not any(packing.is_taken())


def test_an_unknown_way_to_pack_is_refused(photos: Photos, tmp_path: Path) -> None:
    with (
        StreamingDataset(photos.src, tmp_path / "cache", columns_to_download=[], show_progress=False) as dataset,
        pytest.raises(ConfigError, match=r"pack_bytes='view' is unknown: give True, False or 'views'"),
    ):
        StreamingDataLoader(dataset, pack_bytes="view")  # type: ignore[arg-type]  # what a user may write


def test_two_fields_of_a_batch_share_its_slot() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    batch = sent(packing(map(sample_of, range(BATCH))))
    images, notes = batch["image"], batch["note"]
    del batch
    del notes
    small_batch(packing, 40)
    assert images == [long_bytes(n) for n in range(BATCH)]


def test_bytes_cross_the_pipe_while_the_trainer_keeps_all_slots() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    kept = [small_batch(packing, number)["image"] for number in range(PREFETCH + NUM_SPARE_SLOTS + 2)]
    assert [type(values) for values in kept] == [PackedBytes] * (PREFETCH + NUM_SPARE_SLOTS) + [list] * 2
    assert all(values == [long_bytes(n) for n in range(at, at + BATCH)] for at, values in enumerate(kept))
    kept.clear()
    assert type(small_batch(packing, 0)["image"]) is PackedBytes


def test_a_batch_that_is_larger_than_a_slot_crosses_the_pipe() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    size = SLOT_BYTES // 2 - 1
    batch = sent(packing({"image": long_bytes(n, size)} for n in range(3)))
    assert type(batch["image"]) is list
    assert [len(value) for value in batch["image"]] == [size] * 3
    assert not any(packing.is_taken())
    assert type(small_batch(packing, 0)["image"]) is PackedBytes


def test_a_child_that_is_forked_later_frees_nothing_of_the_trainers() -> None:
    packing = Packing(PREFETCH, gives_views=True)
    batch = small_batch(packing, 0)
    pid = os.fork()
    if pid == 0:
        del batch
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    small_batch(packing, 4)
    assert batch["image"] == [long_bytes(n) for n in range(BATCH)]


def test_a_copy_of_a_packed_collate_in_the_trainer_has_workers_of_its_own() -> None:
    first = PackedCollate(gives_views=True, prefetch_factor=PREFETCH)
    batches = []
    for collate in (first, copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        loader = DataLoader(Samples(sample_of, BATCH), batch_size=BATCH, num_workers=1, collate_fn=collate)
        batches += list(loader)
        del loader
    for batch in batches:
        assert equal(batch, default_collate([sample_of(n) for n in range(BATCH)]))
        assert type(batch["image"]) is PackedBytes
    del batch, batches, collate
    assert left_behind(), "the first is still there, and its memory until its next worker"
    del first
    assert not left_behind()


# -- nothing is left --------------------------------------------------------------------------------------------------


def run_and_forget(context: str, *, is_persistent: bool = False) -> None:
    """Two iterations that end early, with views that outlive their batches."""
    loader = loader_of(context, 200, persistent_workers=is_persistent)
    for _ in range(2):
        batches = iter(loader)
        kept = [next(batches)["image"].views()[0] for _ in range(3)]
        assert all(len(view) == LONG for view in kept)
        if not is_persistent:
            loader = loader_of(context, 200)


@pytest.mark.parametrize("is_persistent", [False, True])
def test_no_descriptor_and_no_shared_memory_outlives_a_loader(is_persistent: bool) -> None:
    run_and_forget("fork", is_persistent=is_persistent)
    assert not left_behind()


# -- our loader -------------------------------------------------------------------------------------------------------


def read_image(sample: Sample) -> Sample:
    sample["image"] = Path(sample["image"]).read_bytes() * 2
    return sample


@pytest.mark.parametrize(("is_persistent", "pack_bytes", "kind"), [(False, True, list), (True, "views", PackedBytes)])
def test_our_loader_packs_and_resumes_within_an_epoch(
    photos: Photos, tmp_path: Path, is_persistent: bool, pack_bytes: Any, kind: type[Any]
) -> None:
    def rows_and_images(batches: Iterable[Any], kind: type[Any]) -> list[tuple[int, bytes]]:
        taken: list[tuple[int, bytes]] = []
        for batch in batches:
            assert type(batch["image"]) is kind
            taken += zip(batch["__row__"].tolist(), list(batch["image"]), strict=True)
        return taken

    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": is_persistent, "multiprocessing_context": "fork"}
    kept: dict[str, Any] = {
        "index_cols_to_keep": [],
        "columns_to_download": ["image"],
        "transforms": [read_image],
        "show_progress": False,
    }
    with StreamingDataset(photos.src, tmp_path / "cache", shuffle_seed=3, **kept) as dataset:
        loader = StreamingDataLoader(dataset, BATCH, pack_bytes=pack_bytes, **options)
        epochs = [rows_and_images(loader, kind) for _ in range(2)]
        loader.set_epoch(1)
        batches = iter(loader)
        head = rows_and_images([next(batches) for _ in range(2)], kind)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert head + rows_and_images(loader, kind) == epochs[1]
        plain = StreamingDataLoader(dataset, BATCH, pack_bytes=False, **options)
        plain.set_epoch(0)
        assert rows_and_images(plain, list) == epochs[0]
    del loader, plain, batches
    assert not left_behind()


class Measured(StreamingDataset):
    """Looks at its samples on their way."""

    def __iter__(self) -> Iterator[Sample]:
        for sample in super().__iter__():
            yield {**sample, "size": len(sample["image"])}


LIMITED = """
import logging, resource, sys
from pathlib import Path
from sqlstream import StreamingDataLoader, StreamingDataset
logging.basicConfig()
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (3 << 30),) * 2)
class Made:
    def __call__(self, sample):
        return {"data": bytes([sample["__row__"]]) * 5000}
if __name__ == "__main__":
    with StreamingDataset(sys.argv[1], sys.argv[2], transforms=[Made()], show_progress=False) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=16, multiprocessing_context="fork")
        print(sum(len(value) for batch in loader for value in batch["data"]))
"""


def test_where_address_space_is_limited_batches_come_as_torch_sends_them(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", LIMITED, str(make_table(tmp_path, 64)), str(tmp_path / "cache")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == ["320000"], done.stderr
    assert done.stderr.count("(RLIMIT_AS)") == 1


def test_who_extends_a_dataset_sees_values_not_places(photos: Photos, tmp_path: Path) -> None:
    kept: dict[str, Any] = {"index_cols_to_keep": [], "columns_to_download": ["image"], "transforms": [read_image]}
    with Measured(photos.src, tmp_path / "cache", show_progress=False, **kept) as dataset:
        batches = list(StreamingDataLoader(dataset, BATCH, num_workers=1, multiprocessing_context="fork"))
    for batch in batches:
        assert batch["size"].tolist() == [len(image) for image in batch["image"]]
