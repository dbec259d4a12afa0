"""The position of a run: in a process that makes samples, and in a loader that hands them out."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import get_worker_info

from sqlstream.errors import StateError
from sqlstream.order import Int64Array, Partition, Steps
from sqlstream.stream.run.epoch_counter import EpochCounter
from sqlstream.stream.run.partial_steps import DeliveredAhead, DeliveredSpan, PartialRow, TakenAlone, stretches_of
from sqlstream.stream.run.positions import JobPosition, RunPosition, WorkerPosition
from sqlstream.stream.run.shares import ShareProgress, check_has_step
from sqlstream.world import World

LOOKED_AT = 256
"""Numbers that are compared together, to find the first that was not delivered before."""


class Delivery:
    """What a loader has handed out of an iteration.

    Args:
        start: Where the iteration begins.
        steps: Order and steps.
        world: The place of the trainer.
        num_workers: Processes that make batches; 1 also where the trainer does.
        is_endless: The iteration goes on over epochs.
    """

    def __init__(self, start: RunPosition, steps: Steps, world: World, num_workers: int, *, is_endless: bool) -> None:
        self.start = start
        self.is_over = False
        """The iteration has ended by itself."""
        self.caller: object = None
        """What iterates the loader."""
        self._steps = steps
        self._world = world
        self._num_workers = num_workers
        self._first_workers = {start.job.epoch: start.first_worker(num_workers)}
        """The worker that takes the first step of each epoch; epochs of an order may differ in steps."""
        self._is_endless = is_endless
        self._places: dict[int, WorkerPosition] = {}
        self._next_worker = 0

    @property
    def has_delivered(self) -> bool:
        """A batch was handed out, or none is left."""
        return self.is_over or bool(self._places)

    def note(self, place: WorkerPosition) -> None:
        """Count a batch; its worker was at `place` after it."""
        self._places[place.worker] = place
        self._next_worker = (place.worker + 1) % self._num_workers

    def position(self) -> RunPosition:
        """Return the end of the last complete step, with what is delivered behind it."""
        first_epoch = self.start.job.epoch
        if self.is_over:
            return RunPosition(JobPosition(first_epoch + 1, 0))
        workers = range(self._num_workers)
        places = [self._settled(self._places.get(worker, WorkerPosition(worker, first_epoch, 0, 0))) for worker in workers]
        under_way = [place for place in places if place.taken < self._partition(place.worker, place.epoch).num_samples]
        if not under_way:
            return RunPosition(JobPosition(first_epoch + 1, 0))
        epoch = min(place.epoch for place in under_way)
        step = min(self._number(place) // self._batch_size for place in under_way if place.epoch == epoch)
        job = JobPosition(epoch, step * self._partition(0, epoch).step_size)
        return RunPosition(job, beyond=self._beyond(epoch, step, places))

    def _beyond(self, epoch: int, step: int, places: list[WorkerPosition]) -> DeliveredAhead | None:
        """Return what is delivered from `step` of `epoch` on; None if nothing is, and that step's worker is asked next."""
        taken = tuple(self._taken(epoch, step, places))
        unfinished = {(place.epoch, self._number(place)): place.offset for place in places if place.offset}
        if self.start.beyond is not None:
            for old in self.start.beyond.unfinished:
                is_done = any(s.epoch == old.epoch and s.start <= old.number < s.stop for s in taken)
                if not is_done and (old.epoch, old.number) >= (epoch, step * self._batch_size):
                    unfinished.setdefault((old.epoch, old.number), old.num_samples)
        first_worker = (self._partition(0, epoch).worker_of(step) - self._next_worker) % self._num_workers
        if not taken and not unfinished and first_worker == 0:
            return None
        return DeliveredAhead(
            rank=self._world.rank,
            world_size=self._world.world_size,
            num_workers=self._num_workers,
            first_worker=first_worker,
            taken=taken,
            unfinished=tuple(PartialRow(*key, num_samples) for key, num_samples in sorted(unfinished.items())),
        )

    def _taken(self, epoch: int, step: int, places: list[WorkerPosition]) -> Iterator[DeliveredSpan]:
        before = () if self.start.beyond is None else self.start.beyond.taken
        last_epoch = max(*(place.epoch for place in places), *(stretch.epoch for stretch in before), epoch)
        for later in range(epoch, last_epoch + 1):
            first_step = step if later == epoch else 0
            numbers: list[Int64Array] = []
            for place in places:
                partition = self._partition(place.worker, later)
                stop = partition.num_samples if place.epoch > later else place.taken if place.epoch == later else 0
                numbers.append(partition.numbers(partition.num_before(first_step), stop))
            if self.start.beyond is not None:
                numbers.append(self.start.beyond.numbers(later, first_step * self._batch_size))
            yield from stretches_of(later, np.concatenate(numbers))

    @property
    def _batch_size(self) -> int:
        return self._steps.batch_size_on(self._world) or 1

    def _number(self, place: WorkerPosition) -> int:
        return int(self._partition(place.worker, place.epoch).numbers(place.taken, place.taken + 1)[0])

    def _settled(self, place: WorkerPosition) -> WorkerPosition:
        """Return the first place that was not delivered before, in the next epoch if the iteration goes on with it."""
        while True:
            partition = self._partition(place.worker, place.epoch)
            taken = partition.next_place(place.taken)
            while self.start.beyond is not None and not place.offset and taken < partition.num_samples:
                numbers = partition.numbers(taken, taken + LOOKED_AT)
                is_left = ~self.start.beyond.is_taken(place.epoch, numbers)
                taken += int(is_left.argmax()) if is_left.any() else len(numbers)
                if is_left.any():
                    break
            if taken < partition.num_samples or not self._is_endless:
                return place._replace(taken=taken)
            place = WorkerPosition(place.worker, place.epoch + 1, 0, 0)

    def _partition(self, worker: int, epoch: int) -> Partition:
        """Return a worker's share of an epoch of this iteration."""
        world, job, first_workers = self._world.with_worker(worker, self._num_workers), self.start.job, self._first_workers
        for known in range(max(first_workers), epoch):
            consumed = job.consumed if known == job.epoch else 0
            first_workers[known + 1] = self._steps.partition(known, world, consumed, first_workers[known]).next_worker
        return self._steps.partition(epoch, world, job.consumed if epoch == job.epoch else 0, first_workers[epoch])


def begun(job: JobPosition, loaded: RunPosition | None, counter: EpochCounter, world: World) -> RunPosition:
    """Return where an iteration begins: at `job`, with what a loaded state has behind it.

    Args:
        job: Where the whole job stands.
        loaded: The last state that this process has loaded; None: none, or another position was set since.
        counter: What trainer and workers have set.
        world: The place of this process.

    Raises:
        StateError: The state is that of another rank, or this worker started before the state was loaded.
    """
    if loaded is None and get_worker_info() is not None and counter.has_more(job):
        raise StateError(
            "persistent workers that run already cannot go on from this state: use StreamingDataLoader, or make a new "
            "DataLoader"
        )
    if loaded is None or loaded.job != job or loaded.beyond is None:
        return RunPosition(job)
    loaded.beyond.check_place(world.rank, world.world_size)
    return RunPosition(job, beyond=loaded.beyond)


def advanced(job: JobPosition, num_steps: int, steps: Steps, world: World, *, is_endless: bool) -> JobPosition:
    """Return the position of the job `num_steps` later; without endless iteration the next epoch's start at most."""
    while True:
        partition = steps.partition(job.epoch, world, job.consumed)
        num_left = partition.num_steps - partition.first_step
        if num_steps < num_left:
            return JobPosition(job.epoch, job.consumed + num_steps * partition.step_size)
        job, num_steps = JobPosition(job.epoch + 1, 0), num_steps - num_left
        if not is_endless:
            return job


def counted(epoch: int, num_samples: int, steps: Steps, world: World) -> JobPosition:
    """Return the position of the job, which iterates without end, `num_samples` behind the start of `epoch`.

    Raises:
        ConfigError: An epoch has no step.
    """
    partition = steps.partition(epoch, world)
    check_has_step(partition)
    num_steps, rest = divmod(num_samples, partition.step_size)
    job = advanced(JobPosition(epoch, 0), num_steps, steps, world, is_endless=True)
    return job._replace(consumed=job.consumed + rest)


def processed(progress: ShareProgress) -> RunPosition:
    """Return the position of this process, which iterates without a loader of ours."""
    epoch, partition, beyond = progress.share.epoch, progress.share.current_partition, progress.share.beyond
    if get_worker_info() is not None:
        return RunPosition(
            JobPosition(epoch, partition.consumed), TakenAlone.of(partition, progress.taken, progress.offset), beyond
        )
    if partition.next_place(progress.taken) >= partition.num_samples:
        return RunPosition(JobPosition(epoch + 1, 0))
    num_steps, rest = divmod(partition.next_place(progress.taken), partition.batch_size or 1)
    job = JobPosition(epoch, partition.consumed + num_steps * partition.step_size)
    is_within = rest or progress.offset or beyond is not None
    return RunPosition(job, TakenAlone.of(partition, rest, progress.offset) if is_within else None, beyond)
