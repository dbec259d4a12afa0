"""StreamingDataLoader: what it delivers, where it stands, and that it goes on from there on any layout."""

from __future__ import annotations

import gc
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torchdata.stateful_dataloader import StatefulDataLoader

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError, TransformError
from sqlstream.world import World
from tests.cache.session import Session
from tests.stream.kit import rows_in_order
from tests.stream.sources import Photos, check_bytes
from tests.stream.tables import Job, Rows, make_table, others, rows_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata's own
]

OpenJob = Callable[..., Job]
OpenDataset = Callable[..., StreamingDataset]
NUM_ROWS, GLOBAL_BATCH = 22, 8
STEPS_AN_EPOCH = 3


@pytest.fixture
def job(tmp_path: Path) -> Iterator[OpenJob]:
    jobs: list[Job] = []

    def open_job(num_ranks: int, num_workers: int, num_rows: int = NUM_ROWS, **options: Any) -> Job:
        src = make_table(tmp_path, num_rows)
        jobs.append(Job(src, tmp_path / "cache", num_ranks, num_workers, GLOBAL_BATCH, **options))
        return jobs[-1]

    yield open_job
    for opened in jobs:
        opened.close()


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[OpenDataset]:
    opened: list[StreamingDataset] = []

    def open_dataset(num_rows: int = NUM_ROWS, **options: Any) -> StreamingDataset:
        options = {"shuffle_seed": 5, "show_progress": False} | options
        opened.append(StreamingDataset(make_table(tmp_path, num_rows), tmp_path / "cache", **options))
        return opened[-1]

    yield open_dataset
    for one in opened:
        one.close()


def test_batches_follow_the_plan_and_each_iteration_is_the_next_epoch(dataset: OpenDataset) -> None:
    data = dataset()
    loader = StreamingDataLoader(data, batch_size=8, collate_fn=rows_of)
    assert len(loader) == STEPS_AN_EPOCH
    for epoch in range(3):
        batches = list(loader)
        assert [len(batch) for batch in batches] == [8, 8, 6]
        plan = rows_in_order(data, epoch, 0, NUM_ROWS).tolist()
        assert [pair for batch in batches for pair in batch] == [(epoch, row) for row in plan]
    loader.set_epoch(1)
    assert next(iter(loader))[0][0] == 1


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_persistent", [False, True])
def test_an_iteration_that_was_given_up_counts_as_its_epoch(
    dataset: OpenDataset, num_workers: int, is_persistent: bool
) -> None:
    loader = StreamingDataLoader(
        dataset(),
        batch_size=8,
        num_workers=num_workers,
        persistent_workers=is_persistent and num_workers > 0,
        collate_fn=rows_of,
    )
    for epoch in range(3):
        assert next(iter(loader))[0][0] == epoch
        assert loader.state_dict()["epoch"] == epoch
        assert loader.state_dict()["sample_in_epoch"] == 8


LAYOUTS = [(1, 0), (1, 2), (2, 3), (4, 0), (2, 1), (8, 0)]


@pytest.mark.parametrize("options", [{}, {"drop_last": True}, {"infinite_iteration": True}], ids=["epochs", "drop", "endless"])
def test_resuming_after_every_step_on_other_layouts_goes_on_exactly(job: OpenJob, options: dict[str, Any]) -> None:
    per_epoch = STEPS_AN_EPOCH - ("drop_last" in options)
    total = 2 * per_epoch + 2  # over two epochs' ends
    jobs = {layout: job(*layout, dataset_options=options) for layout in LAYOUTS}
    reference: list[Rows] = []
    states = [json.loads(json.dumps(jobs[1, 0].state()))]
    for rows in jobs[1, 0].steps(total):
        reference.append(rows)
        states.append(json.loads(json.dumps(jobs[1, 0].state())))
    assert [state["epoch"] for state in states] == [step // per_epoch for step in range(total + 1)]
    assert len(set().union(*reference[:per_epoch])) == (16 if "drop_last" in options else NUM_ROWS)
    for number, (first, second) in enumerate(others(LAYOUTS)):
        for stop in range(number % 2, total + 1, 2):  # every step, in one pair of layouts or the next
            jobs[first].load(states[stop])
            delivered = reference[:stop] + list(jobs[first].steps(min(2, total - stop)))
            assert jobs[first].state() == states[len(delivered)]
            jobs[second].load(jobs[first].state())
            delivered += jobs[second].steps(min(total - len(delivered), per_epoch))
            assert delivered == reference[: len(delivered)], (first, second, stop)
            assert jobs[second].state() == states[len(delivered)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_persistent_workers_take_a_loaded_state_between_epochs(job: OpenJob, num_workers: int) -> None:
    options = {"persistent_workers": True} if num_workers else {}
    running = job(1, num_workers, loader_options=options)
    states, reference = [running.state()], []
    for rows in running.steps(7):
        reference.append(rows)
        states.append(running.state())
    for stop in (4, 0, 6, 3):
        running.load(states[stop])
        assert list(running.steps(7 - stop)) == reference[stop:]


@pytest.mark.parametrize(("num_rows", "num_ranks", "num_workers"), [(1, 4, 0), (3, 1, 3), (3, 2, 2), (9, 8, 1), (7, 4, 3)])
def test_fewer_rows_than_a_batch_or_ranks_or_workers_all_work(
    job: OpenJob, num_rows: int, num_ranks: int, num_workers: int
) -> None:
    running = job(num_ranks, num_workers, num_rows=num_rows)
    steps = -(-num_rows // GLOBAL_BATCH)
    seen = [set().union(*running.steps(steps)) for _ in range(2)]
    assert seen == [{(epoch, row) for row in range(num_rows)} for epoch in range(2)]


def test_a_batch_of_none_gives_samples_one_by_one(dataset: OpenDataset) -> None:
    data = dataset()
    loader = StreamingDataLoader(data, batch_size=None, num_workers=2)
    assert len(loader) == NUM_ROWS
    batches = iter(loader)
    first = [next(batches)["__row__"] for _ in range(9)]
    state = loader.state_dict()
    assert state["sample_in_epoch"] == 9
    del batches
    loader.load_state_dict(state)
    rest = [sample["__row__"] for sample in loader]
    assert first + rest == rows_in_order(data, 0, 0, NUM_ROWS).tolist()


def test_spawned_workers_take_the_place_and_the_state_of_their_trainer(dataset: OpenDataset) -> None:
    data = dataset(world=World(rank=1, world_size=2))
    loader = StreamingDataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="spawn", collate_fn=rows_of)
    data.set_progress(3, 8)
    batches = list(loader)
    assert batches[0] == [(3, row) for row in rows_in_order(data, 3, 12, 16).tolist()]
    assert loader.state_dict()["epoch"] == 4


def test_unaligned_workers_have_a_shuffle_of_their_own_and_go_on_in_it(dataset: OpenDataset) -> None:
    for options in ({}, {"infinite_iteration": True}):
        loader = StreamingDataLoader(dataset(unaligned_worker_index=True, **options), 4, num_workers=2, collate_fn=rows_of)
        batches, states = [], []
        for batch, _ in zip(loader, range(9), strict=False):
            batches.append(batch)
            states.append(loader.state_dict())
        order = rows_in_order(loader.dataset, 0, 0, NUM_ROWS).tolist()
        assert [row for batch in batches[:6] for _, row in batch][:NUM_ROWS] != order
        for stop in (1, 2, 4):
            loader.load_state_dict(states[stop - 1])
            again = [batch for batch, _ in zip(loader, range(len(batches) - stop), strict=False)]
            assert again[: len(batches) - stop] == batches[stop:], (options, stop)


# -- states that do not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batch_size", "message"),
    [
        ({"num_rows": 23}, 8, r"the number of rows \(it was 22, and is 23\)"),
        (
            {"sql_query": "SELECT * FROM dataframe WHERE score >= 0.1"},
            8,
            r"the query \(it was None, and is 'SELECT .* WHERE score >= 0\.1",
        ),
        ({"shuffle_seed": 6}, 8, "shuffle_seed=5, this dataset 6"),
        ({"num_canonical_nodes": 2}, 8, "num_canonical_nodes=1, this dataset 2"),
        ({}, 6, "global_batch_size=8, this dataset 6"),
        ({"world": World(world_size=2, local_world_size=2)}, 8, "global_batch_size=8, this dataset 16"),
    ],
)
def test_the_state_of_another_run_is_refused_with_both_values(
    dataset: OpenDataset, options: dict[str, Any], batch_size: int, message: str
) -> None:
    loader = StreamingDataLoader(dataset(), batch_size=8, collate_fn=rows_of)
    next(iter(loader))
    other = StreamingDataLoader(dataset(**options), batch_size=batch_size, collate_fn=rows_of)
    with pytest.raises(StateError, match=message):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(loader.state_dict(), strict=False)
    assert other.state_dict()["sample_in_epoch"] == 8 - 8 % other.dataset.schedule.step_size


def test_insisting_on_another_batch_size_goes_on_at_its_last_whole_step(
    dataset: OpenDataset, caplog: pytest.LogCaptureFixture
) -> None:
    other = StreamingDataLoader(dataset(), batch_size=6, collate_fn=rows_of)
    with caplog.at_level(logging.WARNING):
        other.load_state_dict({"epoch": 0, "sample_in_epoch": 16}, strict=False)
    assert "sample_in_epoch=16 of the state is no multiple of a step of 6 samples: going on after 12, so 4" in caplog.text
    assert [row for _, row in next(iter(other))] == rows_in_order(other.dataset, 0, 12, 18).tolist()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "the state is None, of type NoneType: give the dict that"),
        ({"epoch": 1}, "missing keys .*sample_in_epoch"),
        ({"epoch": 1, "sample_in_epoch": 2, "speed": 3}, "unknown keys .*speed"),
        ({"epoch": -1, "sample_in_epoch": 2}, "epoch=-1"),
        ({"epoch": 1, "sample_in_epoch": 2, "version": 99}, "version 99, this sqlstream knows 6: upgrade"),
        ({"epoch": 1, "sample_in_epoch": 8, "share": {"rank": 0}}, "share="),
    ],
)
def test_what_is_no_state_is_refused(dataset: OpenDataset, state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        StreamingDataLoader(dataset(), batch_size=8).load_state_dict(state)


def test_a_loader_and_its_dataset_must_agree_on_the_batch_size(dataset: OpenDataset) -> None:
    with pytest.raises(ConfigError, match=r"loader has batch_size=8.*given batch_size=4"):
        StreamingDataLoader(dataset(batch_size=4), batch_size=8)
    with pytest.raises(ConfigError, match="batch_size=0"):
        StreamingDataLoader(dataset(), batch_size=0)
    with pytest.raises(ConfigError, match="not list"):
        StreamingDataLoader([1, 2], batch_size=8)  # type: ignore[arg-type]  # the mistake of the test


# -- torch's and torchdata's loaders ----------------------------------------------------------------------------------


def test_a_plain_loader_goes_on_anywhere_with_the_count_of_its_trainer(dataset: OpenDataset) -> None:
    options = {"batch_size": 4}
    world = World(world_size=2, local_world_size=2)
    data = dataset(world=world, **options)
    loader = DataLoader(data, batch_size=4, num_workers=2, collate_fn=rows_of)
    plain = iter(loader)
    first = [next(plain) for _ in range(2)]
    with pytest.raises(StateError, match="num_samples="):
        data.state_dict()
    state = data.state_dict(num_samples=2 * 4 * 2)
    assert (state["epoch"], state["sample_in_epoch"], state["global_batch_size"]) == (0, 16, 8)
    del plain
    assert data.state_dict(num_samples=NUM_ROWS)["epoch"] == 1
    alone = dataset(batch_size=8)
    alone.load_state_dict(state)
    rest = list(DataLoader(alone, batch_size=8, num_workers=3, collate_fn=rows_of))
    order = rows_in_order(alone, 0, 0, NUM_ROWS).tolist()
    assert [row for batch in first for _, row in batch] == order[0:4] + order[8:12]
    assert [row for batch in rest for _, row in batch] == order[16:]


def test_without_a_batch_size_workers_cannot_go_on_within_an_epoch(dataset: OpenDataset) -> None:
    data = dataset()
    data.load_state_dict(data.state_dict(num_samples=8))
    batches: Any = iter(DataLoader(data, batch_size=4, num_workers=2, collate_fn=rows_of))
    with pytest.raises(StateError, match="batch_size="):
        next(batches)
    # torch waits 5 seconds for each worker whose dataset raised; else it takes their end for an accident, in any later test
    signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]  # of C, not exported
    batches._worker_pids_set = False
    for worker in batches._workers:
        worker.terminate()
        worker.join()


def test_iterating_the_dataset_itself_stops_and_goes_on_at_any_sample(dataset: OpenDataset) -> None:
    data = dataset(batch_size=8)
    order = [(epoch, row) for epoch in range(2) for row in rows_in_order(data, epoch, 0, NUM_ROWS).tolist()]
    for stop in (0, 1, 7, 8, 9, 16, 21, 22):
        data.set_epoch(0)
        samples = iter(data)
        begun = [next(samples) for _ in range(stop)]
        state = json.loads(json.dumps(data.state_dict()))
        del samples
        data.load_state_dict(state)
        assert data.state_dict() == state
        rest = list(data) + list(data)
        assert rows_of(begun + rest)[: 2 * NUM_ROWS] == order


def test_a_state_from_within_a_step_is_refused_by_a_loader_unless_one_insists(dataset: OpenDataset) -> None:
    data = dataset(batch_size=8)
    samples = iter(data)
    for _ in range(11):
        next(samples)
    state = data.state_dict()
    assert (state["sample_in_epoch"], state["share"]["taken"]) == (8, 3)  # type: ignore[index]  # a state's values are objects
    loader = StreamingDataLoader(dataset(), batch_size=8, collate_fn=rows_of)
    loader.load_state_dict(state)
    with pytest.raises(StateError, match="3 samples beyond its start"):
        next(iter(loader))
    loader.load_state_dict(state, strict=False)
    assert [row for _, row in next(iter(loader))] == rows_in_order(data, 0, 8, 16).tolist()


@pytest.mark.parametrize("num_workers", [0, 1, 3])
@pytest.mark.parametrize("batch_size", [8, None])
@pytest.mark.parametrize("every", [1, 2])
def test_torchdatas_loader_resumes_after_every_step(
    dataset: OpenDataset, num_workers: int, batch_size: int | None, every: int
) -> None:
    """With and without the dataset knowing the batch size: each worker keeps its own place in the loader's state."""

    def loader() -> StatefulDataLoader[Any]:
        data = dataset(batch_size=batch_size)
        return StatefulDataLoader(data, batch_size=8, num_workers=num_workers, collate_fn=rows_of, snapshot_every_n_steps=every)

    reference, states = [], []
    first = loader()
    for _ in range(2):
        for batch in first:
            reference.append(batch)
            states.append(json.loads(json.dumps(first.state_dict())) if num_workers == 0 else first.state_dict())
    assert sorted(pair for batch in reference for pair in batch) == [(e, r) for e in range(2) for r in range(NUM_ROWS)]
    for stop, state in enumerate(states[: len(states) - 1], start=1):
        second = loader()
        second.load_state_dict(state)
        delivered = reference[:stop]
        for _ in range(3):
            delivered = delivered + list(second)
        assert delivered[: len(reference)] == reference, stop


def test_torchdatas_state_of_another_place_is_refused(dataset: OpenDataset) -> None:
    loader = StatefulDataLoader(dataset(batch_size=4), batch_size=4, num_workers=2, collate_fn=rows_of)
    next(iter(loader))
    state = loader.state_dict()["_snapshot"]["_worker_snapshots"]["worker_0"]["dataset_state"]
    other = dataset(batch_size=2, world=World(world_size=2, local_world_size=2))
    other.load_state_dict(state)
    with pytest.raises(StateError, match="rank 0 of 1, worker 0 of 2, this process is rank 0 of 2"):
        next(iter(other))


# -- several samples of a row -----------------------------------------------------------------------------------------


def twice(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield dict(sample)
    yield dict(sample)


def test_transforms_that_make_several_samples_warn_once_where_ranks_could_get_out_of_step(
    job: OpenJob, caplog: pytest.LogCaptureFixture
) -> None:
    several = {"transforms": [twice], "columns_to_download": []}
    for num_ranks, options, num_warnings in [(2, {}, 2), (2, {"infinite_iteration": True}, 0), (1, {}, 0)]:
        running = job(num_ranks, 0, dataset_options=several | options)
        with caplog.at_level(logging.WARNING):
            list(running.steps(5))
        warnings = [record for record in caplog.records if "no sample, or several" in record.message]
        assert len(warnings) == num_warnings  # once for each rank, which is a process of its own elsewhere
        caplog.clear()


def test_a_loader_whose_rows_give_several_samples_does_not_lose_the_end_of_its_epoch(job: OpenJob) -> None:
    running = job(1, 2, dataset_options={"transforms": [twice]})
    loader = running.loaders[0]
    epochs = [loader.state_dict()["epoch"] for _ in loader]
    assert epochs == [0] * len(epochs)
    assert len(epochs) > STEPS_AN_EPOCH
    assert loader.state_dict()["epoch"] == 1


# -- paths ------------------------------------------------------------------------------------------------------------


def paths_of(samples: list[dict[str, Any]]) -> list[str]:
    return [sample["image"] for sample in samples]


def test_paths_under_way_to_the_trainer_stay_valid(photos: Photos, tmp_path: Path) -> None:
    with StreamingDataset(
        photos.src, tmp_path / "cache", columns_to_download=["image"], cache_limit=photos.total_bytes // 2, prefetch=4
    ) as data:
        loader = StreamingDataLoader(data, batch_size=4, num_workers=2, prefetch_factor=3, collate_fn=paths_of)
        number = 0
        for batch in loader:
            for path in batch:
                assert Path(path).read_bytes() == photos.data(number)
                number += 1
    assert number == photos.num


def test_an_endless_iteration_has_the_next_epoch_on_its_way_before_this_one_ends(photos: Photos, tmp_path: Path) -> None:
    half = photos.total_bytes // 2
    options: dict[str, Any] = {"shuffle_seed": 3, "cache_limit": half, "prefetch": 8, "infinite_iteration": True}
    options["transforms"] = [check_bytes]  # no path leaves, so nothing else is pinned
    with StreamingDataset(photos.src, tmp_path / "cache", columns_to_download=["image"], **options) as data:
        samples = iter(data)
        for _ in range(photos.num):
            next(samples)
        wanted = {photos.path(row) for row in rows_in_order(data, 1, 0, 4).tolist()}
        with Session(data.cache).transaction() as tx:
            pinned = {row[0] for row in tx.connection.execute("SELECT url FROM entry JOIN pin USING (key)")}
        assert {photos.server.url + path for path in wanted} <= pinned
        del samples


@pytest.mark.parametrize("num_workers", [0, 2, None], ids=["alone", "workers", "no loader"])
def test_an_endless_iteration_that_is_left_is_followed_by_an_epoch_that_it_has_not_begun(
    num_workers: int | None, tmp_path: Path
) -> None:
    table = make_table(tmp_path, 10)
    options: dict[str, Any] = {"shuffle_seed": 1, "infinite_iteration": True, "show_progress": False}
    with StreamingDataset(table, tmp_path / "cache", columns_to_download=[], batch_size=4, **options) as data:
        loader = data if num_workers is None else StreamingDataLoader(data, 4, num_workers, rows_of)
        first_epochs: list[int] = []
        for num_taken in (24, 8, 0) if num_workers is None else (6, 2, 0):  # two epochs, and a part of one
            samples = iter(loader)
            first_epochs.append(epoch_of(next(samples)))
            for _ in range(num_taken - 1):
                epoch_of(next(samples))
            del samples
    assert first_epochs == [0, 2, 3]


def epoch_of(taken: Any) -> int:
    """Return the epoch of a sample, or of a batch of `rows_of`."""
    return int(taken["__epoch__"] if isinstance(taken, dict) else taken[0][0])


@pytest.mark.parametrize(("num_rows", "batch_size", "num_workers"), [(50, None, 2), (50, 3, 2), (46, None, 2), (50, None, 1)])
def test_a_plain_loader_that_counts_fewer_batches_than_its_workers_give_is_warned_once(
    num_rows: int, batch_size: int | None, num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A Trainer stops after so many."""
    table = make_table(tmp_path, num_rows)
    with StreamingDataset(
        table, tmp_path / "cache", columns_to_download=[], batch_size=batch_size, show_progress=False
    ) as data:
        loader = DataLoader(data, 3, num_workers=num_workers)
        assert len(loader) == len(loader) == -(-num_rows // 3)
    warned = [record for record in caplog.records if "leaves rows out" in record.message]
    assert len(warned) == ((num_rows, batch_size, num_workers) == (50, None, 2))


def test_persistent_workers_have_the_next_epoch_on_its_way_before_it_is_asked_for(photos: Photos, tmp_path: Path) -> None:
    half = photos.total_bytes // 2
    options: dict[str, Any] = {"shuffle_seed": 3, "cache_limit": half, "prefetch": 8, "transforms": [check_bytes]}
    with StreamingDataset(photos.src, tmp_path / "cache", columns_to_download=["image"], **options) as data:
        loader = StreamingDataLoader(data, batch_size=4, num_workers=1, persistent_workers=True, collate_fn=rows_of)
        list(loader)
        wanted = {photos.path(row) for row in rows_in_order(data, 1, 0, 4).tolist()}
        with Session(data.cache).transaction() as tx:
            pinned = {row[0] for row in tx.connection.execute("SELECT url FROM entry JOIN pin USING (key)")}
        assert {photos.server.url + path for path in wanted} <= pinned
        assert len(list(loader)) == 30
        loader.set_epoch(7)  # another one than prepared
        assert [pair for batch in loader for pair in batch] == [
            (7, row) for row in rows_in_order(data, 7, 0, photos.num).tolist()
        ]
        del loader


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    """As in a program of a user: tests freeze what their collection made."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_workers_keep_the_garbage_collector_off_what_they_inherit(photos: Photos, tmp_path: Path) -> None:
    def note_frozen(sample: dict[str, Any]) -> dict[str, Any]:
        return {"pid": os.getpid(), "frozen": gc.get_freeze_count()}

    options: dict[str, Any] = {"transforms": [note_frozen], "epoch_size": 8}  # to count what is frozen takes 30 ms
    with StreamingDataset(photos.src, tmp_path / "cache", show_progress=False, **options) as data:
        assert {sample["frozen"] for sample in data} == {0}
        workers: dict[str, Any] = {"num_workers": 2, "persistent_workers": True, "multiprocessing_context": "fork"}
        loader = StreamingDataLoader(data, batch_size=None, **workers)
        seen = [sample for _ in range(2) for sample in loader]
        assert len({sample["pid"] for sample in seen}) == 2
        assert min(sample["frozen"] for sample in seen) > 1000
        for pid in {sample["pid"] for sample in seen}:
            counts = [sample["frozen"] for sample in seen if sample["pid"] == pid]
            assert counts == sorted(counts, reverse=True), "once in a process: what it makes itself is collected"
    assert gc.get_freeze_count() == 0


def contents(dataset: StreamingDataset) -> dict[str, object]:
    """What the dataset, its pipeline and its schedule hold, but for where the iteration stands that has begun."""
    parts = {"dataset": dataset, "pipeline": dataset._pipeline, "schedule": dataset.schedule}
    held = {f"{part}.{name}": value for part, owner in parts.items() for name, value in vars(owner).items()}
    return {name: value for name, value in held.items() if name not in ("schedule.delivery", "schedule._progress")}


@pytest.mark.parametrize(("context", "is_persistent"), [("fork", False), ("spawn", True)])
def test_a_loader_changes_nothing_in_its_dataset_while_workers_start(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str, is_persistent: bool
) -> None:
    with StreamingDataset(
        photos.src, tmp_path / "cache", columns_to_download=["image"], transforms=[check_bytes], shuffle_seed=0
    ) as dataset:
        loader = StreamingDataLoader(
            dataset, batch_size=40, num_workers=2, multiprocessing_context=context, persistent_workers=is_persistent
        )
        before = contents(dataset)
        init_fn, collate_fn = loader.worker_init_fn, loader.collate_fn
        found: list[dict[str, object]] = []
        start = BaseProcess.start

        def noted(process: BaseProcess) -> None:
            found.append(contents(dataset))
            start(process)

        monkeypatch.setattr(BaseProcess, "start", noted)
        for epoch in range(2):
            rows = [row for batch in loader for row in batch["__row__"].tolist()]
            assert sorted(rows) == list(range(photos.num)), epoch
        assert len(found) == (2 if is_persistent else 4)
        for during in (*found, contents(dataset)):
            assert during.keys() == before.keys()
            assert [name for name in before if during[name] is not before[name]] == []
        assert (loader.worker_init_fn, loader.collate_fn) == (init_fn, collate_fn)


def name_after_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    info.dataset.marks = [worker, info.dataset.schedule.is_announced]  # type: ignore[attr-defined]  # of its copy


def test_a_users_init_function_runs_in_each_worker_on_its_dataset(dataset: OpenDataset) -> None:
    opened = dataset(transforms=[])
    loader = StreamingDataLoader(opened, batch_size=4, num_workers=2, worker_init_fn=name_after_worker, collate_fn=marks_of)
    assert {tuple(batch) for batch in loader} == {(0, True), (1, True)}
    assert not hasattr(opened, "marks")


def marks_of(samples: list[Any]) -> list[Any]:
    info = get_worker_info()
    assert info is not None
    return list(info.dataset.marks)  # type: ignore[attr-defined]  # set above


def fail(_: dict[str, Any]) -> dict[str, Any]:
    """Raises in a worker."""
    raise ZeroDivisionError


def test_the_error_of_a_worker_keeps_torchs_iterator_in_no_circle(dataset: OpenDataset) -> None:
    """The garbage collector would end its workers, within a transaction of the cache perhaps, for which they wait."""
    loader = StreamingDataLoader(dataset(transforms=[fail], on_error="raise"), batch_size=8, num_workers=1)
    gc.disable()
    try:
        batches: Any = iter(loader)
        ended = weakref.ref(batches._batches)
        with pytest.raises(TransformError):
            next(batches)
        del batches
        assert ended() is None
    finally:
        gc.enable()


def test_a_sampler_and_a_shuffle_are_refused(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, NUM_ROWS), tmp_path / "cache", show_progress=False) as dataset:
        for name in ("sampler", "batch_sampler"):
            given: dict[str, Any] = {name: [[0, 1]]}
            with pytest.raises(ConfigError, match="takes no sampler: give the dataset shuffle_seed="):
                StreamingDataLoader(dataset, **given)
        with pytest.raises(ConfigError, match="does not shuffle: give the dataset shuffle_seed="):
            StreamingDataLoader(dataset, shuffle=True)
        assert len(StreamingDataLoader(dataset, shuffle=False)) == NUM_ROWS
