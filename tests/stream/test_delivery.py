"""Positions that give no sample, or several: states are exact to the sample, whatever workers made the batches before.

A model of DataLoader: workers are asked in turn, one that has ended is left out; what they yield is computed from shares.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from sqlstream.errors import StateError
from sqlstream.order import Plan, Steps, Tail
from sqlstream.stream.run.delivery import Delivery, advanced, begun
from sqlstream.stream.run.epoch_counter import EpochCounter
from sqlstream.stream.run.order_options import OrderOptions
from sqlstream.stream.run.partial_steps import DeliveredAhead, stretches_of
from sqlstream.stream.run.positions import JobPosition, RunPosition, WorkerPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.shares import PLANNED_TOGETHER, EpochShare, ShareProgress
from sqlstream.stream.run.state import RunIdentity
from sqlstream.stream.run.weighting import Weighting
from sqlstream.world import World
from tests.order.several import Uneven

Batch = list[tuple[int, int, int]]
"""Epoch, position and number within it of each sample."""


def num_samples_of(epoch: int, position: int) -> int:
    return (0, 1, 1, 2, 5)[(position * 7 + epoch) % 5]


class Model:
    """One rank's loader over an iteration."""

    def __init__(
        self, steps: Steps, world: World, num_workers: int, position: RunPosition, *, is_endless: bool = False
    ) -> None:
        beyond = position.beyond
        if beyond is not None:
            beyond = DeliveredAhead.from_dict(json.loads(json.dumps(beyond.to_dict())))
            beyond.check_place(world.rank, world.world_size)
        self._start = RunPosition(position.job, beyond=beyond)
        self._steps, self._is_endless = steps, is_endless
        self._worlds = [world.with_worker(worker, num_workers) for worker in range(num_workers)]
        self.delivery = Delivery(self._start, steps, world, num_workers, is_endless=is_endless)

    def batches(self) -> Iterator[Batch]:
        workers = [self._worker(world) for world in self._worlds]
        while workers:
            for worker in list(workers):
                batch, place = next(worker, ([], None))
                if place is None:
                    workers.remove(worker)
                else:
                    self.delivery.note(place)
                    yield batch
        self.delivery.is_over = True

    def _worker(self, world: World) -> Iterator[tuple[Batch, WorkerPosition]]:
        first = self._share(self._start.job.epoch, world, self._start.job.consumed, self._start.first_worker(world.num_workers))
        progress = ShareProgress(first, first.taken)
        batch: Batch = []
        for sample in self._samples(first, progress):
            batch.append(sample)
            if len(batch) == self._steps.batch_size:
                yield batch, progress.position(world.worker)
                batch = []
        if batch:
            yield batch, progress.position(world.worker)

    def _samples(self, share: EpochShare, progress: ShareProgress) -> Iterator[tuple[int, int, int]]:
        while True:
            for start in range(0, share.partition.num_samples, PLANNED_TOGETHER):
                for place, position in zip(*(array.tolist() for array in share.planned(start)), strict=True):
                    progress.come_to(share, place)
                    num_samples = num_samples_of(share.epoch, position)
                    for number in range(num_samples):
                        if progress.is_new(is_only=num_samples == 1):
                            yield (share.epoch, position, number)
            progress.end()
            if not self._is_endless:
                return
            share = self._share(share.epoch + 1, share.partition.world, 0, share.current_partition.next_worker)

    def _share(self, epoch: int, world: World, consumed: int, first_worker: int) -> EpochShare:
        partition = self._steps.partition(epoch, world, consumed, first_worker)
        return EpochShare(epoch=epoch, steps=self._steps, partition=partition, fingerprint="", beyond=self._start.beyond)


def plan_of(num_positions: int, batch_size: int, tail: Tail = Tail.SHORT) -> Plan:
    return Plan(num_samples=num_positions, seed=1, batch_size=batch_size, tail=tail)


BEGIN = RunPosition(JobPosition(0, 0))


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("num_workers", [1, 2, 3, 5])
@pytest.mark.parametrize(("is_endless", "is_even"), [(False, True), (True, True), (True, False)])
def test_going_on_after_every_batch_gives_the_same_batches_on_as_many_workers(
    num_ranks: int, num_workers: int, is_endless: bool, is_even: bool
) -> None:
    steps = plan_of(53, 4, Tail.FILL if is_endless else Tail.SHORT).steps
    if not is_even:
        steps = replace(steps, order=Uneven(order=steps.order))
    for rank in range(num_ranks):
        world = World(rank=rank, world_size=num_ranks, local_rank=rank, local_world_size=num_ranks)
        model = Model(steps, world, num_workers, BEGIN, is_endless=is_endless)
        reference: list[Batch] = []
        positions = [model.delivery.position()]
        for batch in model.batches():
            reference.append(batch)
            positions.append(model.delivery.position())
            if len(reference) == 60:
                break
        for stop, position in enumerate(positions):
            if position.job.epoch > 0 and not is_endless:
                continue  # all is delivered
            resumed = Model(steps, world, num_workers, position, is_endless=is_endless)
            assert resumed.delivery.position() == position
            rest = [batch for batch, _ in zip(resumed.batches(), reference[stop:], strict=False)]
            assert rest == reference[stop:], (rank, stop)


@given(st.data())
@settings(max_examples=60)
def test_any_number_of_workers_goes_on_as_often_as_one_likes_and_no_sample_is_lost_or_comes_twice(data: st.DataObject) -> None:
    num_positions, batch_size = data.draw(st.integers(1, 70)), data.draw(st.integers(1, 6))
    is_endless = data.draw(st.booleans())
    plan = plan_of(num_positions, batch_size, Tail.FILL if is_endless else Tail.SHORT)
    world = World(rank=1, world_size=2, local_world_size=2, local_rank=1)
    whole = plan.partition(world)
    num_epochs = 3 if is_endless else 1
    wanted = Counter(
        (epoch, position, number)
        for epoch in range(num_epochs)
        for position in whole.positions(0, whole.num_samples).tolist()
        for number in range(num_samples_of(epoch, position))
    )
    delivered: Counter[tuple[int, int, int]] = Counter()
    position = BEGIN
    while position.job.epoch < num_epochs:
        model = Model(plan.steps, world, data.draw(st.integers(1, 4)), position, is_endless=is_endless)
        for _, batch in zip(range(data.draw(st.integers(1, 9))), model.batches(), strict=False):
            delivered.update(batch)
        position = model.delivery.position()
    assert {key: count for key, count in delivered.items() if key[0] < num_epochs} == wanted


def test_where_each_position_gives_one_sample_a_state_is_the_position_of_the_job_alone() -> None:
    plan, world = plan_of(53, 4), World()
    taken = Delivery(RunPosition(JobPosition(2, 8)), plan.steps, world, 3, is_endless=False)
    for number in range(5):  # steps 2 to 6
        taken.note(WorkerPosition(number % 3, 2, 4 * (number // 3 + 1), 0))
        assert taken.position() == RunPosition(JobPosition(2, 12 + 4 * number))


def test_a_state_is_small_though_a_worker_is_far_ahead() -> None:
    taken = Delivery(RunPosition(JobPosition(0, 0)), plan_of(10**6, 8).steps, World(), 2, is_endless=False)
    taken.note(WorkerPosition(0, 0, 0, 3))
    taken.note(WorkerPosition(1, 0, 4000, 0))
    beyond = taken.position().beyond
    assert beyond is not None
    assert len(json.dumps(beyond.to_dict())) < 15_000
    assert beyond.num_delivered(0, 0) == 3
    assert beyond.numbers(0, 0).size == 4000


def test_steps_are_counted_over_epochs_of_any_length() -> None:
    steps = Steps(order=Uneven(order=plan_of(53, 4).order), batch_size=4)  # 14, 12, 11, 10 steps
    begin = JobPosition(0, 8)
    assert advanced(begin, 11, steps, World(), is_endless=True) == JobPosition(0, 52)
    assert advanced(begin, 12 + 12 + 3, steps, World(), is_endless=True) == JobPosition(2, 12)
    assert advanced(begin, 12 + 12 + 3, steps, World(), is_endless=False) == JobPosition(1, 0)


def test_the_state_of_another_rank_is_refused_with_both() -> None:
    beyond = DeliveredAhead(rank=1, world_size=4, num_workers=2, first_worker=0, taken=(), unfinished=())
    beyond.check_place(1, 4)
    with pytest.raises(StateError, match=r"rank 1 of 4, this is rank 1 of 2.*strict=False"):
        beyond.check_place(1, 2)


class Begun(IterableDataset[str]):
    """What `begun` says in each worker.

    Args:
        job: Where an iteration begins.
        counter: What is known of the epochs.
    """

    def __init__(self, job: JobPosition, counter: EpochCounter) -> None:
        self.job = job
        self.counter = counter

    def __iter__(self) -> Iterator[str]:
        try:
            yield str(begun(self.job, None, self.counter, World()))
        except StateError as error:
            yield str(error)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_that_run_already_cannot_go_on_from_what_they_never_saw() -> None:
    beyond = DeliveredAhead(rank=0, world_size=1, num_workers=1, first_worker=0, taken=(), unfinished=())
    counter, job = EpochCounter(), JobPosition(1, 8)
    counter.set_from_outside(job, has_more=True)
    loaded = RunPosition(job, beyond=beyond)
    assert begun(job, loaded, counter, World()).beyond is beyond
    assert begun(JobPosition(2, 0), loaded, counter, World()).beyond is None
    dataset = Begun(job, counter)
    assert list(dataset) == [str(RunPosition(job))], "in the trainer itself"
    (said,) = DataLoader(dataset, batch_size=None, num_workers=1)
    assert said.startswith("persistent workers")


def test_a_loaded_state_holds_until_another_position_is_set_in_any_process() -> None:
    beyond = DeliveredAhead(rank=0, world_size=1, num_workers=1, first_worker=0, taken=(), unfinished=())
    identity = RunIdentity(fingerprint="", shuffle_seed=1, num_canonical_nodes=1, blocks=None, epoch_size=53)
    weighting = Weighting(53, 53, lambda weights: pytest.fail("no weights here"), None)
    steps, options = plan_of(53, 4).steps, OrderOptions(batch_size=4)
    loaded = RunPosition(JobPosition(1, 8), beyond=beyond)
    for is_replaced in (False, True):
        schedule = Schedule(steps, weighting, options, identity=identity, reseeded=lambda seed: steps.order)
        schedule.set_next(loaded)
        if is_replaced:
            schedule.counter.set_from_outside(loaded.job, has_more=False)  # as another process does, by shared memory
        assert schedule.begin_delivery(0).start == (RunPosition(loaded.job) if is_replaced else loaded)


@pytest.mark.parametrize(
    "change",
    [{"rank": -1}, {"taken": [[0, 1]]}, {"taken": 3}, {"unfinished": [[0, 1, -2]]}, {"more": 1}, {"first_worker": True}],
)
def test_what_says_nothing_of_a_rank_is_refused(change: dict[str, Any]) -> None:
    whole = {"rank": 0, "world_size": 1, "num_workers": 1, "first_worker": 0, "taken": [[0, 3, 5]], "unfinished": []}
    assert DeliveredAhead.from_dict(whole).is_taken(0, np.array([2, 3, 4, 5])).tolist() == [False, True, True, False]
    with pytest.raises(StateError, match="beyond"):
        DeliveredAhead.from_dict(whole | change)


def test_numbers_become_the_fewest_stretches() -> None:
    assert [tuple(stretch) for stretch in stretches_of(3, np.array([7, 1, 2, 2, 9, 8]))] == [(3, 1, 3), (3, 7, 10)]
    assert stretches_of(3, np.array([], dtype=np.int64)) == []
