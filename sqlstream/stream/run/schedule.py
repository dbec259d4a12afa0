"""Order, layout and position of a dataset's run, without its samples: which process takes which positions, and when."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

from torch.utils.data import get_worker_info

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, StateError, UnknownLengthError
from sqlstream.order import Mixed, Order, Partition, Steps, Tail, is_counted
from sqlstream.stream.run.delivery import Delivery, advanced, begun, counted, processed
from sqlstream.stream.run.epoch_counter import EpochCounter
from sqlstream.stream.run.iteration_start import IterationStart
from sqlstream.stream.run.order_options import BatchOptions, OrderOptions
from sqlstream.stream.run.partial_steps import DeliveredAhead, TakenAlone
from sqlstream.stream.run.positions import JobPosition, RunPosition, WorkerPosition
from sqlstream.stream.run.shares import EpochShare, ShareProgress, check_has_step
from sqlstream.stream.run.state import RunIdentity
from sqlstream.world import World

logger = logging.getLogger(__name__)


class RunWeights(Protocol):
    """Weights of a run, of rows or of streams, that may change while it goes on."""

    def add(self, epoch: int, sample: int, weights: Any) -> None:
        """Make what is weighed weigh `weights` from position `sample` of `epoch` on."""


class Schedule:
    """Order and state of one dataset, or mixture, in this process.

    Args:
        steps: Order and steps.
        weighting: The weights of the run.
        options: What the user asked for.
        identity: What a state says of the order, and compares.
        reseeded: Returns the order with another seed; None: workers have no shuffle of their own.
        has_end: An epoch has an end.
    """

    def __init__(
        self,
        steps: Steps,
        weighting: RunWeights,
        options: OrderOptions,
        *,
        identity: RunIdentity,
        reseeded: Callable[[int], Order] | None = None,
        has_end: bool = True,
    ) -> None:
        self.steps = steps
        self.weighting = weighting
        self.identity = identity
        self.layout = options.layout
        self.is_endless = options.is_endless
        self.has_end = has_end
        self.is_mixed = False
        """It is that of a stream of a mixture, whose run says which rows come when."""
        self.counts_rows = False
        """True: each row must give one sample, since a batch is so many rows of one bucket, and samples are counted into it."""
        self.is_announced = False
        """True: a loader in the trainer sets where iterations begin; so while it creates its workers, and in those."""
        self.start = IterationStart()
        self.counter = EpochCounter()
        self.announcement = 0
        """Number under which the trainer announces where the iteration begins; 0: to itself."""
        self.batches: BatchOptions | None = None
        self._options = options
        self._reseeded = reseeded
        self.num_renewed = 0
        """How often the rows have become others (`refresh="epoch"`): workers that were started before have those of then."""
        self.refit: Callable[[int], Schedule] | None = None
        """Returns the schedule with batches that are multiples of a number; None: that does not depend on the ranks."""
        self.rank_multiple: int | None = None
        """That number, which states carry; None: it does not depend on the ranks."""
        self.keeps_rows = False
        """True: the next iteration goes on from a state, or within an epoch, whose positions are those of the rows of now."""
        self._loaded: RunPosition | None = None
        self._loaded_serial = 0
        """Serial number of the counter when the state was loaded: what is set later replaces it."""
        self._progress: ShareProgress | None = None
        self.delivery: Delivery | None = None  # what a loader has handed out of the iteration that it began last

    # -- layout -------------------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """The place of this process in its job; ranks that take the same samples count as one."""
        return self.layout.effective

    @property
    def global_batch_size(self) -> int | None:
        """Samples of a step of the whole job, or windows of rows that are packed on the way; None: not known."""
        if self.steps.gives_several:
            return self.world.world_size
        if self.steps.batch_size is None and self.steps.global_batch_size is None:
            return None  # the ranks need not be known yet
        batch_size = self.steps.batch_size_on(self.world)
        if self.steps.global_batch_size is not None:
            return self.steps.global_batch_size  # with lanes a rank may take several of its batches one after the other
        return None if batch_size is None else batch_size * self.world.world_size

    @property
    def step_size(self) -> int:
        """Positions of a step."""
        return self.global_batch_size or self.world.world_size

    @property
    def num_positions(self) -> int:
        """Positions of an epoch; of a lazy index whose filter has not been run on all of it: at most so many.

        Raises:
            UnknownLengthError: Packs show when their rows are made.
        """
        self._check_one_each()
        return self.steps.num_samples(self.counter.next.epoch)

    @property
    def num_steps(self) -> int:
        """Steps of every rank in an epoch.

        Raises:
            UnknownLengthError: They are not known yet.
        """
        return self.steps.partition(self._epoch_with_end(), self.world).num_steps

    def samples_of_workers(self, num_workers: int) -> list[int]:
        """Return how many positions of an epoch each of this rank's workers takes; UnknownLengthError while it is not known."""
        epoch = self._epoch_with_end()
        worlds = [self.world.with_worker(worker, num_workers) for worker in range(num_workers)]
        return [self.steps.partition(epoch, world).num_samples for world in worlds]

    def _epoch_with_end(self) -> int:
        """Return the next epoch, whose end is known."""
        if not self.has_end:
            raise UnknownLengthError(
                "a mixture with stop='never' has no end, and no length: give epoch_size=, or another stop="
            )
        self._check_one_each()
        epoch, order = self.counter.next.epoch, self.steps.order
        if not isinstance(order, Mixed) and not is_counted(order, epoch):  # a mixture was told the positions of its epochs
            raise UnknownLengthError(
                "the steps of an epoch are not known yet: the filter of a lazy index has not been run on all of its chunks. "
                "One whole pass finds them out, for later runs, too; or leave lazy_index_chunk_size out"
            )
        return epoch

    def _check_one_each(self) -> None:
        if self.steps.gives_several:
            raise UnknownLengthError(
                "how many packs an epoch has shows when its rows are made, since the index has no lengths: measure them once "
                "by `sqlstream index measure`, and give Packs their column, or count the rows, len(dataset)"
            )

    def renew(self, fresh: Schedule) -> None:
        """Take over the order of other rows, for epochs that begin from now on; what counts epochs and batches stays.

        Args:
            fresh: The schedule of these rows, made with the same options.
        """
        self.steps = replace(self.steps, order=fresh.steps.order)
        self.weighting, self.identity, self._reseeded = fresh.weighting, fresh.identity, fresh._reseeded
        self._progress = self.delivery = None
        self.num_renewed += 1

    def fit_ranks(self, rank_multiple: int) -> None:
        """Make batches multiples of a number, where that depends on the ranks on which the run began."""
        if self.refit is None or rank_multiple == self.rank_multiple:
            return
        fresh = self.refit(rank_multiple)
        self.renew(fresh)
        self.steps = replace(self.steps, batches=fresh.steps.batches, batch_size=None)
        self.rank_multiple = rank_multiple

    def fit_first_ranks(self) -> None:
        """Make batches multiples of the ranks of now, unless the run has begun on others."""
        has_begun = self.is_under_way or self._loaded is not None or self.counter.next != JobPosition(0, 0)
        if self.refit is not None and not has_begun:
            self.fit_ranks(self.world.world_size)

    def expect_batches(self, options: BatchOptions) -> None:
        """Take over how a loader takes samples.

        Raises:
            ConfigError: The dataset was given another batch size.
        """
        if options == self.batches:
            return  # also where a state has batches of other sizes
        batch_size, tail = options.batch_size, Tail.DROP if options.drop_last else self._options.tail
        if self._options.batch_size not in (None, batch_size):
            raise ConfigError(
                f"the loader has batch_size={batch_size}, its dataset was given batch_size={self._options.batch_size}: "
                "give the same to both, or only to the StreamingDataLoader"
            )
        steps = replace(self.steps, batch_size=None if options.follows_ranks else batch_size, tail=tail)
        if steps.batches is not None:
            steps.batch_size_on(self.world)  # else the ranks need not be known yet
        # What follows the ranks is another one in a spawned rank, and after a state that brings other batches.
        self.batches, self.steps = options, steps if self.refit is None else replace(steps, batch_size=None)

    # -- an iteration -------------------------------------------------------------------------------------------------

    def begin(self) -> tuple[ShareProgress, Iterator[EpochShare]]:
        """Begin an iteration in this process; return its progress, and its shares of the epoch and of those that follow.

        A persistent worker also gets its share of the next iteration's epoch, so that it can prepare it.
        """
        self.keeps_rows = False
        info = get_worker_info()
        if not self.is_announced:
            self._leave_epochs()
            self.batches, self.steps = None, replace(self.steps, tail=self._options.tail)  # drop_last is that of a loader
        world = self.world if info is None else self.world.with_worker(info.id, info.num_workers)
        first, seed = self._first_share(world), self.identity.shuffle_seed
        if self._options.is_unaligned and seed is not None and self._reseeded is not None:
            order = self._reseeded(own_seed(seed, first, is_endless=self.is_endless))
            first = replace(first, steps=replace(self.steps, order=order), fingerprint=order.fingerprint)
        self._progress = progress = ShareProgress(first, first.taken)
        if not self.is_announced:
            self.delivery = None
        looks_ahead = info is not None and self.batches is not None and self.batches.is_persistent
        return progress, self._from(first, looks_ahead)

    def begin_delivery(self, announcement: int) -> Delivery:
        """Begin an iteration of a loader, in the trainer; its workers read where it begins.

        Args:
            announcement: The number under which they do.

        Raises:
            StateError: The state is that of one process within a step.
        """
        share = None if self._loaded is None else self._loaded.share
        if share is not None:
            raise StateError(
                f"the state was taken within a step, {share.taken} samples beyond its start, by {share.place}: loaders go on "
                "at steps; iterate the dataset itself, or load it with strict=False to go on at the start of that step"
            )
        self._leave_epochs()
        job = self.counter.next
        if self._is_over(job):
            self.counter.set_next(JobPosition(job.epoch + 1, 0))
        self.keeps_rows = False
        num_workers = max(1, self.batches.num_workers if self.batches is not None else 0)
        world = self.world
        start = begun(self.counter.announce(announcement), self._newest, self.counter, world)
        self._progress = None
        self.delivery = Delivery(start, self.steps, world, num_workers, is_endless=self.is_endless)
        return self.delivery

    def take_back(self, delivery: Delivery) -> None:
        """Have the next iteration begin where the last one did, if that has delivered nothing."""
        if delivery is self.delivery and not delivery.has_delivered:
            self.set_next(delivery.start)

    def _leave_epochs(self) -> None:
        """Have the next iteration begin behind all epochs of an endless one: it would give again what that has given."""
        if self.is_endless and self.is_under_way and get_worker_info() is None and self.counter.epoch_of_workers is None:
            self.counter.skip_to(self._position().first_whole_epoch - 1)

    @property
    def needs_new_workers(self) -> bool:
        """The next iteration goes on from a state that workers which run already do not have."""
        return self.counter.has_more(self.counter.next)

    @property
    def progress(self) -> ShareProgress | None:
        """What counts the samples of the iteration that this process has begun last; None: it has begun none."""
        return self._progress

    def place_of_worker(self, own: ShareProgress | None = None) -> WorkerPosition:
        """Return the position of this process, a worker or the trainer, after the samples that it made.

        Args:
            own: What counts those of an iteration that may not be the last one; None: it is.
        """
        info, progress = get_worker_info(), own or self._progress
        assert progress is not None, "a batch is made of samples"
        return progress.position(0 if info is None else info.id)

    def _first_share(self, world: World) -> EpochShare:
        job, share, beyond = self._loaded or RunPosition(self.counter.next)
        if share is not None:
            self._loaded = None
            partition = self.steps.partition(job.epoch, world, job.consumed, share.first_worker)
            ours = TakenAlone.of(partition, share.taken, share.offset)
            if ours != share:
                raise StateError(
                    f"the state is that of {share.place}, this process is {ours.place}: go on with as many ranks and workers, "
                    "or save the state of a StreamingDataLoader, which fits any number of them"
                )
            self.counter.skip_to(job.epoch)
            return replace(self._share(job.epoch, self.steps, partition, beyond), taken=share.taken, offset=share.offset)
        job = self.counter.announced(self.announcement) if self.is_announced else self.counter.start()
        if self._is_over(job):
            job = JobPosition(job.epoch + 1, 0)  # a state from an epoch's end goes on with the next
            self.counter.skip_to(job.epoch)
        start = begun(job, self._newest, self.counter, world)
        partition = self.steps.partition(job.epoch, world, job.consumed, start.first_worker(world.num_workers))
        return self._share(job.epoch, self.steps, partition, start.beyond)

    def batches_of(self, epoch: int, batch_size: int) -> EpochShare:
        """Return this rank's share of an epoch in batches of `batch_size`, all in one process."""
        steps = replace(self.steps, batch_size=batch_size, tail=self._options.tail)
        return self._share(epoch, steps, steps.partition(epoch, self.world))

    def _share(self, epoch: int, steps: Steps, partition: Partition, beyond: DeliveredAhead | None = None) -> EpochShare:
        fingerprint = steps.order.fingerprint
        return EpochShare(epoch=epoch, steps=steps, partition=partition, beyond=beyond, fingerprint=fingerprint)

    def _from(self, share: EpochShare, looks_ahead: bool) -> Iterator[EpochShare]:
        while True:
            if self.is_endless:
                check_has_step(share.partition)
            yield share
            if not self.is_endless and not looks_ahead:
                return
            looks_ahead = False
            ended = share.current_partition
            epoch, first_worker = share.epoch + 1, ended.next_worker if self.is_endless else 0
            partition = share.steps.partition(epoch, ended.world, 0, first_worker)
            share = self._share(epoch, share.steps, partition, share.beyond if self.is_endless else None)

    def _is_over(self, job: JobPosition) -> bool:
        if not job.consumed:
            return False
        partition = self.steps.partition(job.epoch, self.world, job.consumed)
        return partition.first_step >= partition.num_steps

    def note_several(self) -> None:
        """Note that a position gave no sample, or several; warn once if ranks may get out of step by that.

        Raises:
            ConfigError: Samples that follow would share batches with those of other buckets.
        """
        if self.counts_rows:
            raise ConfigError(
                "a row gives no sample, or several, and samples of several buckets would then share a batch of this mixture: "
                "make one sample of each row (on_error='replace' or 'raise'), or load the dataset with batches= alone"
            )
        if self.counter.note_several() and self.world.world_size > 1 and not self.is_endless:
            which, cure = "some rows give no sample, or several", "make one sample of each row"
            if self.steps.gives_several:
                which, cure = "packs are made of rows as they are measured", "give Packs a column of lengths"
            logger.warning(
                "%s, so ranks may make different numbers of steps, and each rank needs a state of its own: use "
                "infinite_iteration=True and save every rank's state, or %s",
                *(which, cure),
            )

    # -- position -----------------------------------------------------------------------------------------------------

    def where(self, num_samples: int | None = None) -> RunPosition:
        """Return the position of the whole job: after `num_samples` of the epoch, or as far as this process knows.

        A worker, or a process within a step, adds the position in its own share.

        Raises:
            StateError: Workers of a plain DataLoader iterate: they run ahead of the trainer, and cannot know what it has taken.
                Or samples are packs that are made on the way, which are not what positions count.
        """
        if self.steps.gives_several and num_samples:
            raise StateError(
                f"num_samples={num_samples}: packs of rows that are measured on the way are not counted by an order: use a "
                "StreamingDataLoader, whose state_dict() knows what was delivered"
            )
        return self._position() if num_samples is None else RunPosition(self._position_after(num_samples))

    def set_next(self, position: RunPosition, *, is_state: bool = False) -> None:
        """Make the next iteration begin at a position; with a share, in this process alone, behind the job's position.

        Args:
            position: Where.
            is_state: It is that of a saved state, which names the rows that it counts.
        """
        self.keeps_rows = is_state or position.job.consumed > 0
        self._progress = self.delivery = self._loaded = None
        if position.share is None or get_worker_info() is None:
            self.counter.set_from_outside(position.job, has_more=position.beyond is not None)
        if position.share is not None or position.beyond is not None:
            self._loaded, self._loaded_serial = position, self.counter.serial

    @property
    def _newest(self) -> RunPosition | None:
        """The state that was loaded; None: none was, or another position was set since."""
        return self._loaded if self._loaded_serial == self.counter.serial else None

    @property
    def is_under_way(self) -> bool:
        """An iteration has begun in this process."""
        return self.delivery is not None or self._progress is not None

    @property
    def place(self) -> JobPosition:
        """The position of the whole job, at a step's end."""
        return self._position().job

    def place_after(self, num_steps: int) -> JobPosition:
        """Return the position of the whole job `num_steps` later; without endless iteration the next epoch at most."""
        return advanced(self.place, num_steps, self.steps, self.world, is_endless=self.is_endless)

    def _position(self) -> RunPosition:
        loaded = self._loaded
        if loaded is not None and (loaded.share is not None or (not self.is_under_way and loaded.job == self.counter.next)):
            return loaded
        if get_worker_info() is None and self.counter.epoch_of_workers is not None:
            raise StateError(
                "workers of a DataLoader run ahead of the trainer, so the dataset cannot know what was delivered: use "
                "StreamingDataLoader and its state_dict(), or give num_samples=, the samples of the epoch that the whole job "
                "has consumed"
            )
        if self.delivery is not None:
            return self.delivery.position()
        if self._progress is not None:
            return processed(self._progress)
        return RunPosition(self.counter.next)

    def _position_after(self, num_samples: int) -> JobPosition:
        """Return the position of the whole job `num_samples` behind the start of the epoch that the iteration began with."""
        num_samples = check_at_least("num_samples", num_samples, 0)
        if (started := self.counter.epoch_of_workers) is not None:
            epoch = started
        elif self.delivery is not None:
            epoch = self.delivery.start.job.epoch
        else:
            epoch = self.counter.next.epoch if self._progress is None else self._progress.first_epoch
        job = counted(epoch, num_samples, self.steps, self.world) if self.is_endless else JobPosition(epoch, num_samples)
        return JobPosition(epoch + 1, 0) if self._is_over(job) else job


def own_seed(seed: int, share: EpochShare, *, is_endless: bool) -> int:
    """Return a seed of this worker's own (`unaligned_worker_index`).

    A worker that goes on within an epoch takes the place of the one whose steps it takes, which may have had another number.
    """
    partition, world = share.partition, share.partition.world
    num_steps_before = partition.first_step + (share.epoch * partition.num_steps if is_endless else 0)
    worker = (world.worker - partition.first_worker + num_steps_before) % world.num_workers
    number = world.rank * world.num_workers + worker
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")
