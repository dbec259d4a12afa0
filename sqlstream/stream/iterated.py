"""What is iterated: the samples of a run, in its order; a single dataset, or several that are mixed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream.config import INT64_MAX, check_at_least
from sqlstream.errors import ConfigError
from sqlstream.process.children import end_with_parent
from sqlstream.stream.engines import EngineMaker
from sqlstream.stream.frameworks.accelerate import check_not_sharded_again
from sqlstream.stream.frameworks.plain_loader import collates_samples, warn_of_ranks
from sqlstream.stream.run.checkpoint import load_state, save_state
from sqlstream.stream.run.iteration_start import BegunIteration
from sqlstream.stream.run.order_options import BatchOptions
from sqlstream.stream.run.positions import JobPosition, RunPosition
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.run.whole_batches import whole_batches
from sqlstream.stream.transport.handover import Handover
from sqlstream.transforms.base import Sample
from sqlstream.world import World


class IteratedDataset(IterableDataset[Sample]):
    """The samples of this rank and this worker, in the order of a run, which goes on from any state.

    Where the order says which samples share a batch, a loader is given lists of them.
    """

    _pipeline: EngineMaker
    _schedule: Schedule
    _counts_all_ranks: ClassVar[bool] = True
    """`len()` counts the samples of all ranks, not of this one."""

    def __iter__(self) -> Iterator[Any]:
        """Return the samples of the next epoch that are this rank's and this worker's.

        In the trainer's own process the iteration begins with the first sample that is asked for. Where several are under
        way, in one thread or in several, each gives an epoch of its own, and the state is that of the one begun last.

        Raises:
            ConfigError: Accelerate deals out to ranks what is dealt out already, or a plain DataLoader cannot do it.
        """
        with self._schedule.start.lock:
            check_not_sharded_again(self._schedule)
            self._check_begun()
            begun = self._schedule.start.take_late()
            if begun is None and not self._schedule.is_announced:
                if get_worker_info() is not None:
                    end_with_parent()
                    self._check_plain_worker()
                if self._counts_all_ranks:
                    warn_of_ranks(lambda: self._schedule.world, self._pipeline.engines.warnings)
            are_whole = self._gives_batches()
            in_worker = get_worker_info() is not None
            has_loader = in_worker or collates_samples() is not None
            if begun is None and (in_worker or self._schedule.is_announced):
                begun = self._schedule.begin()
            return self._iterate(begun, are_whole=are_whole, has_loader=has_loader)

    def _gives_batches(self) -> bool:
        """Return whether batches are asked for: by a loader, where the order is made of batches.

        Raises:
            ConfigError: A plain DataLoader would make other batches of the samples.
        """
        schedule = self._schedule
        if schedule.steps.batches is None:
            return False
        if schedule.is_announced:
            return schedule.batches is not None and schedule.batches.are_whole
        collates = collates_samples()
        if collates:
            raise ConfigError(
                "batches= says which samples share a batch, and this DataLoader makes others of them: give it batch_size=None, "
                "then the dataset yields whole batches (a list of samples each, for its collate_fn), or use StreamingDataLoader"
            )
        return collates is not None

    def _iterate(self, begun: BegunIteration | None, *, are_whole: bool, has_loader: bool) -> Iterator[Sample | list[Sample]]:
        schedule = self._schedule
        if begun is None:
            with schedule.start.lock:
                self._prepare()
                begun = schedule.begin()
        progress, shares = begun
        ranks_on_node = schedule.layout.whole.local_world_size
        engines = self._pipeline.engines
        with engines.iterating(self._pipeline, ranks_on_node, schedule.batches, has_loader=has_loader) as engine:
            samples = engine.stream(
                shares,
                progress,
                is_endless=schedule.is_endless,
                note_several=schedule.note_several,
                has_end=schedule.has_end and not schedule.is_endless,
            )
            if are_whole:
                yield from whole_batches(samples, progress)
            else:
                yield from samples

    def _check_begun(self) -> None:
        """Raise ConfigError if something is missing that the order depends on."""

    def _check_plain_worker(self) -> None:
        """Raise ConfigError if a worker of a plain DataLoader, of which the trainer knows nothing, cannot iterate this."""

    def _default_collate(self) -> Callable[[list[Any]], Any] | None:
        """Return what makes batches of these samples where the user says nothing; None: torch's default."""
        return None

    def _has_equal_epochs(self) -> bool:
        """Return whether all epochs have as many steps, as long as no weights change."""
        return self._schedule.steps.has_equal_epochs

    def _prepare(self) -> None:
        """Prepare for the next iteration, in the trainer, before its workers start."""

    def expect_batches(self, options: BatchOptions) -> None:
        """Learn how a loader takes samples (`StreamingDataLoader` calls this).

        Raises:
            ConfigError: The dataset was given another batch size.
        """
        self._schedule.expect_batches(options)

    @property
    def world(self) -> World:
        """The place of this process in its job; ranks that take the same samples count as one."""
        return self._schedule.world

    @property
    def schedule(self) -> Schedule:
        """Order, layout and state."""
        return self._schedule

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of the order; the drawn one for `shuffle_seed=-1`."""
        return self._schedule.identity.shuffle_seed

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return int(self._schedule.counter.next_epoch)

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch; of a lazy index whose filter has not been run on all of it: at most so many."""
        return self._schedule.num_positions

    def num_steps(self, batch_size: int, num_workers: int = 0, *, drop_last: bool = False) -> int:
        """Return the batches that this rank takes of an epoch, as far as each row gives one sample.

        Args:
            batch_size: Samples of this rank's batch.
            num_workers: Workers of the loader. They matter to a plain DataLoader, where each makes batches of its own share.
            drop_last: The loader leaves out incomplete batches.

        Raises:
            UnknownLengthError: The end of an epoch is not known yet.
        """
        check_at_least("batch_size", batch_size, 1)
        check_at_least("num_workers", num_workers, 0)
        if self._schedule.steps.batches is not None:
            return self._schedule.num_steps
        shares = self._schedule.samples_of_workers(max(1, num_workers))
        return sum(share // batch_size if drop_last else -(-share // batch_size) for share in shares)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.set_progress(epoch, 0)

    def set_progress(self, epoch: int, sample_in_epoch: int) -> None:
        """Make the next iteration go on in `epoch` after `sample_in_epoch` samples of the whole job."""
        job = JobPosition(
            check_at_least("epoch", epoch, 0, INT64_MAX - 1), check_at_least("sample_in_epoch", sample_in_epoch, 0)
        )
        self._schedule.set_next(RunPosition(job))

    @abstractmethod
    def __len__(self) -> int:
        """Return the rows of all ranks."""

    @abstractmethod
    def reweight(self, weights: Any, at_step: int | None = None, at_epoch: int | None = None) -> None:
        """Change what comes how often, from the next epoch on, from a later one, or from a step of the epoch under way."""

    @abstractmethod
    def close(self) -> None:
        """Give all pins back, end helper process and threads, close all files. Also at the end of a `with` block."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def state_dict(self, num_samples: int | None = None) -> dict[str, object]:
        """Return the state of the run, JSON-able.

        Args:
            num_samples: Samples of the epoch that the whole job has consumed; with `infinite_iteration`, of that with which
                the iteration began, and of those that followed. Needed with the workers of a plain DataLoader, which run
                ahead of the trainer; otherwise what this process has yielded counts, or what a StreamingDataLoader has
                delivered.

        Raises:
            StateError: `num_samples` is needed and was not given.
        """
        return save_state(self._schedule, num_samples).to_dict()

    def load_state_dict(self, state: Mapping[str, object], strict: bool = True) -> None:
        """Go on where `state` says; call it in the trainer before iteration starts, on every rank with the same state.

        Args:
            state: What `state_dict` returned, on any number of ranks and workers.
            strict: False: take epoch and samples from the state of another dataset, query, seed or global batch size.

        Raises:
            StateError: `state` is that of another dataset, query, seed or global batch size.
        """
        load_state(self._schedule, state, strict=strict)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker."""
        check_not_sharded_again(self._schedule)
        return self.__dict__


def prepare(dataset: IteratedDataset) -> None:
    """Prepare a dataset for its next iteration, in the trainer."""
    dataset._prepare()


def has_equal_epochs(dataset: IteratedDataset) -> bool:
    """Return whether the length of one epoch of a dataset is that of all."""
    return dataset._has_equal_epochs()


def default_collate_of(dataset: IteratedDataset) -> Callable[[list[Any]], Any] | None:
    """Return what makes batches of a dataset's samples where the user says nothing; None: torch's default."""
    return dataset._default_collate()


def handover_of(dataset: IteratedDataset, loader: object) -> Handover | None:
    """Return where workers leave the pins of this loader's batches."""
    return dataset._pipeline.engines.handover_of(loader)


def join_loader(dataset: IteratedDataset, handover: Handover | None, announcement: int) -> None:
    """Make a worker's copy of a dataset that of a loader, which sets where iterations begin, and says it under a number."""
    dataset.schedule.is_announced, dataset.schedule.announcement = True, announcement
    dataset._pipeline.engines.handover = handover
