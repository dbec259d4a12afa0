"""Several loops over one dataset, in one thread or in several: each is an epoch of its own."""

from __future__ import annotations

import errno
import inspect
import itertools
import multiprocessing
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Never

import pytest
from torch.utils.data import DataLoader

from sqlstream import MixedDataset, MultiStreamDataLoader, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, TransformError
from sqlstream.stream.iterated import IteratedDataset
from sqlstream.stream.maps import EpochBatches
from sqlstream.stream.multi.options import Batch
from tests.processes import wait_until
from tests.stream.multi_jobs import opened as opened_stream
from tests.stream.multi_jobs import streams_of
from tests.stream.tables import make_table, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NUM_ROWS = 24
NUM_LOOPS, NUM_EPOCHS = 3, 4


def opened(folder: Path, kind: type[StreamingDataset] = StreamingDataset) -> StreamingDataset:
    return kind(make_table(folder, NUM_ROWS), folder / "cache", shuffle_seed=5, show_progress=False)


def loader_of(dataset: IteratedDataset, **options: Any) -> StreamingDataLoader:
    return StreamingDataLoader(dataset, batch_size=4, collate_fn=rows_of, **options)


def in_threads(loop: Callable[[], object], num_threads: int = NUM_LOOPS) -> None:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            loop()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


class Paused(StreamingDataset):
    """A dataset that does something in the middle of the start of its next iteration."""

    meanwhile: Callable[[], None] | None = None

    def _check_begun(self) -> None:
        action, self.meanwhile = self.meanwhile, None
        if action is not None:
            action()


@pytest.mark.parametrize("kind", ["dataset", "loader", "both", "mixture"])
def test_loops_in_threads_over_one_dataset_are_epochs_of_their_own(kind: str, tmp_path: Path) -> None:
    table = opened(tmp_path)
    dataset: IteratedDataset = MixedDataset({"one": table}, shuffle_seed=1) if kind == "mixture" else table
    loader, turns, epochs = loader_of(dataset), iter(range(99)), list[int]()

    def loop() -> None:
        for _ in range(NUM_EPOCHS):
            is_loader = kind in ("loader", "mixture") or (kind == "both" and next(turns) % 2)
            batches: Iterable[Any] = loader if is_loader else (rows_of([sample]) for sample in dataset)
            found = [place for batch in batches for place in batch]
            assert sorted(row for _, row in found) == [*range(NUM_ROWS)]
            epochs.extend({epoch for epoch, _ in found})

    in_threads(loop)
    assert sorted(epochs) == [*range(NUM_LOOPS * NUM_EPOCHS)]
    dataset.close()


def test_a_loop_goes_on_while_another_thread_begins_one(tmp_path: Path) -> None:
    """It was a bare AssertionError."""
    dataset = opened(tmp_path, Paused)
    assert isinstance(dataset, Paused)
    loader = loader_of(dataset)
    first, found = iter(loader), list[Any]()
    dataset.meanwhile = lambda: found.extend([next(first)])
    second = iter(loader)
    assert [place for place, _ in found[0]] == [0] * 4
    assert [place for place, _ in next(second)] == [1] * 4
    assert len([*first]) == NUM_ROWS // 4 - 1
    dataset.close()


def test_two_threads_that_begin_at_once_leave_the_loader_as_it_was(tmp_path: Path) -> None:
    """Its collate function was that of the other iteration for good: batches came with another one's position around them."""
    dataset = opened(tmp_path, Paused)
    assert isinstance(dataset, Paused)
    loader, found = loader_of(dataset), list[Iterator[Any]]()
    other = threading.Thread(target=lambda: found.append(iter(loader)))

    def begin_another() -> None:
        other.start()
        other.join(0.2)  # it waits, or would be done by then

    dataset.meanwhile = begin_another
    found.insert(0, iter(loader))
    other.join()
    assert loader.collate_fn is rows_of
    assert sorted({epoch for epoch, _ in next(batches)} == {number} for number, batches in enumerate(found)) == [True, True]
    dataset.close()


def test_workers_begin_where_their_own_loop_does(tmp_path: Path) -> None:
    """They read what was announced last, which may be the start of another loop's epoch: one came twice, one never."""
    dataset = opened(tmp_path)

    def wait(worker: int) -> None:
        del worker
        assert wait_until((tmp_path / "both have begun").exists)

    loaders = [loader_of(dataset, num_workers=1, worker_init_fn=wait, multiprocessing_context="fork") for _ in range(2)]
    both = [iter(loader) for loader in loaders]
    (tmp_path / "both have begun").touch()
    assert [{epoch for batch in batches for epoch, _ in batch} for batches in both] == [{0}, {1}]
    dataset.close()


def test_a_loop_whose_persistent_workers_have_begun_another_one_is_an_error(tmp_path: Path) -> None:
    """It took the batches of the other one."""
    dataset = opened(tmp_path)
    loader = loader_of(dataset, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    first = iter(loader)
    next(first)
    second = iter(loader)
    with pytest.raises(ConfigError, match=r"persistent_workers=True\): end one loop before the next one begins"):
        next(first)
    assert {epoch for batch in second for epoch, _ in batch} == {1}
    assert next(second, None) is None
    dataset.close()


def test_loops_in_threads_over_a_loader_of_streams_get_each_batch_once(tmp_path: Path) -> None:
    """Torch's iterator, of which there is one, raised "generator already executing"."""
    options, found = streams_of(a=1, c=1), list[list[tuple[int, int]]]()
    for num_threads in (1, NUM_LOOPS):
        datasets = [opened_stream(tmp_path, num_rows) for num_rows in (16, 24)]
        with MultiStreamDataLoader(datasets, options, shuffle_seed=3, epoch_size=6) as loader:
            loops, batches = [iter(loader) for _ in range(num_threads)], list[Batch]()
            in_threads(lambda loops=loops, batches=batches: batches.extend(loops.pop()), num_threads)  # type: ignore[misc]
        found.append(sorted((batch.step or 0, batch.num_accum_rounds_left) for batch in batches))
    assert found[0] == found[1]


def test_what_a_worker_cannot_pickle_is_named(tmp_path: Path) -> None:
    def collate(samples: list[Any]) -> dict[str, Any]:
        return {"rows": rows_of(samples), "more": [{"locks": (1, threading.Lock())}]}

    with opened(tmp_path) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, collate_fn=collate, num_workers=1, multiprocessing_context="fork")
        problem = r"cannot pickle '_thread.lock' object\s+batch\['more'\]\[0\]\['locks'\]\[1\] cannot go from a worker"
        with pytest.raises(TypeError, match=problem):
            list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_collate_fn_that_raises_stop_iteration_ends_no_epoch(num_workers: int, tmp_path: Path) -> None:
    texts = iter(["one", "two"])

    def collate(samples: list[Any]) -> tuple[str, list[Any]]:
        return next(texts), samples

    context = "fork" if num_workers else None
    with opened(tmp_path) as dataset:
        loader = StreamingDataLoader(
            dataset, batch_size=4, collate_fn=collate, num_workers=num_workers, multiprocessing_context=context
        )
        with pytest.raises(TransformError, match=r"collate_fn=collate raised StopIteration.*next\(iterator, None\)"):
            list(loader)


class Watched(StreamingDataset):
    """A dataset whose iteration is a generator: its code runs with the first sample, when the loader has begun long since."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from super().__iter__()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_a_subclass_gives_the_epochs_of_its_loader_which_goes_on_from_states(
    workers: int, tmp_path: Path
) -> None:
    with opened(tmp_path) as plain:
        want = [list(loader_of(plain)) for _ in range(4)]
    with opened(tmp_path, Watched) as dataset:
        loader = loader_of(dataset, num_workers=workers)
        assert [list(loader) for _ in range(2)] == want[:2]
        batches = iter(loader)
        begun = [next(batches) for _ in range(2)]
        state = loader.state_dict()
        assert (state["epoch"], state["sample_in_epoch"]) == (2, 8)
        rest = list(batches)
        assert begun + rest == want[2]
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == [rest, want[3]]


@pytest.mark.parametrize(
    ("workers", "other"),
    [
        pytest.param(0, {"num_workers": 2}, id="workers"),
        pytest.param(2, {"num_workers": 0}, id="no workers"),
        pytest.param(2, {"batch_size": 6, "num_workers": 2}, id="batch size"),
        pytest.param(0, {"batch_size": 5, "drop_last": True}, id="drop_last"),
    ],
)
def test_a_loader_takes_its_own_batches_though_another_one_of_its_dataset_was_made(
    workers: int, other: dict[str, Any], tmp_path: Path
) -> None:
    """The order, its length and its states were those of the loader that was made last."""
    with opened(tmp_path) as plain:
        want = [list(loader_of(plain)) for _ in range(4)]
    with opened(tmp_path) as dataset:
        loader = loader_of(dataset, num_workers=workers)
        StreamingDataLoader(dataset, **{"batch_size": 4} | other)
        assert len(loader) == NUM_ROWS // 4
        assert list(loader) == want[0]
        batches = iter(loader)
        begun = [next(batches) for _ in range(3)]
        StreamingDataLoader(dataset, **{"batch_size": 4} | other)
        state = loader.state_dict()
        assert (state["sample_in_epoch"], state["global_batch_size"], state["beyond"]) == (12, 4, None)
        rest = list(batches)
        assert begun + rest == want[1]
        StreamingDataLoader(dataset, **{"batch_size": 4} | other)
        loader.load_state_dict(state)
        assert [list(loader), list(loader)] == [rest, want[2]]


def refused(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__row__"] == 9:
        raise ValueError("not this one")
    return sample


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iteration_that_an_error_has_ended_is_not_over(workers: int, tmp_path: Path) -> None:
    """Who caught the error and went on had a state of the next epoch, without the rows that were left."""
    src, options = make_table(tmp_path, NUM_ROWS), {"show_progress": False, "on_error": "raise"}
    with StreamingDataset(src, tmp_path / "cache", transforms=[refused], **options) as dataset:  # type: ignore[arg-type]
        loader, taken, num_errors = loader_of(dataset, num_workers=workers), list[Any](), 0
        batches = iter(loader)
        while True:
            try:
                taken += next(batches)
            except StopIteration:
                break
            except TransformError:
                num_errors += 1
        state = loader.state_dict()
    assert num_errors == 1
    with StreamingDataset(src, tmp_path / "cache", **options) as dataset:  # type: ignore[arg-type]
        loader = loader_of(dataset, num_workers=workers)
        loader.load_state_dict(state)
        assert sorted(taken + [row for batch in loader for row in batch]) == [(0, row) for row in range(NUM_ROWS)]


def test_a_dataset_that_is_iterated_itself_leaves_out_nothing_that_a_loader_of_it_drops(tmp_path: Path) -> None:
    with opened(tmp_path) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=10, drop_last=True)
        assert len([*dataset]) == NUM_ROWS
        assert [len(batch["__row__"]) for batch in loader] == [10, 10]
        assert len([*DataLoader(dataset, batch_size=1)]) == NUM_ROWS
        assert sum(map(len, EpochBatches(dataset, 10))) == NUM_ROWS
        assert len(loader) == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_an_interrupt_at_any_call_of_a_starting_iteration_leaves_the_loader_as_it_was(workers: int, tmp_path: Path) -> None:
    """Its collate function stayed that of the interrupted iteration: each later batch came with a position beside it."""
    number = 0

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal number
        if frame.f_back is not None and frame.f_back.f_code.co_filename == inspect.getfile(StreamingDataLoader):
            number -= 1
            if not number:
                raise KeyboardInterrupt

    with opened(tmp_path) as dataset:
        loader = loader_of(dataset, num_workers=workers, multiprocessing_context="fork" if workers else None)
        for nth in itertools.count(1):
            number = nth
            before = sys.gettrace()
            try:
                sys.settrace(interrupt)
                iter(loader)
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            assert (loader.collate_fn, loader.worker_init_fn) == (rows_of, None), f"after call {nth}"
            if number > 0:
                break
        assert nth > 10
        assert [len(batch) for batch in loader] == [4] * (NUM_ROWS // 4)


def test_loops_over_generators_of_a_subclass_are_an_epoch_each(tmp_path: Path) -> None:
    with opened(tmp_path) as plain:
        want = [list(loader_of(plain)) for _ in range(3)]
    with opened(tmp_path, Watched) as dataset:
        loader = loader_of(dataset)
        first, second = iter(loader), iter(loader)
        assert [next(second), next(first)] == [want[1][0], want[0][0]]
        assert [rows_of([sample]) for sample in dataset] == [[row] for batch in want[2] for row in batch]
        assert [list(first), list(second)] == [want[0][1:], want[1][1:]]


def test_a_loader_whose_persistent_workers_are_gone_starts_others(tmp_path: Path) -> None:
    others = set(multiprocessing.active_children())
    with opened(tmp_path) as dataset, opened(tmp_path) as other:
        loader = loader_of(dataset, num_workers=2, persistent_workers=True)
        batches = iter(loader)
        taken = [next(batches)]
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
            worker.join()
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            taken.extend(batches)
        loader.load_state_dict(loader.state_dict())
        assert [*taken, *loader, *loader] == [*loader_of(other), *loader_of(other)]


@pytest.mark.parametrize("num_taken", [0, 2])
def test_an_iteration_whose_workers_do_not_start_is_none(
    num_taken: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(process: BaseProcess) -> Never:
        raise BlockingIOError(errno.EAGAIN, f"{process.name} is one too many")

    with opened(tmp_path) as dataset, opened(tmp_path) as other:
        want = list(loader_of(other))
        loader = loader_of(dataset, num_workers=2)
        batches = iter(loader)
        for _ in range(num_taken):
            next(batches)
        loader.load_state_dict(loader.state_dict())
        with monkeypatch.context() as patched:
            patched.setattr(BaseProcess, "start", refuse)
            with pytest.raises(BlockingIOError, match="one too many"):
                list(loader)
        assert list(loader) == want[num_taken:]
