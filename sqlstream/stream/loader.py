"""A DataLoader that tells its dataset how it takes samples, counts what it has delivered, and resumes anywhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch.utils.data import DataLoader, default_collate
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sqlstream.config import AS_IT_IS, AsItIs, check_at_least, flag_of, is_word
from sqlstream.errors import ConfigError, UnknownLengthError
from sqlstream.stream.chain.global_rng import GeneratorLoan
from sqlstream.stream.frameworks.accelerate import (
    AcceleratedBatches,
    Destination,
    destination_of,
    is_copied_by_accelerate,
    remainder_of,
)
from sqlstream.stream.frameworks.lightning import Epochs, LookingAhead, is_asked_by_lightning
from sqlstream.stream.iterated import (
    IteratedDataset,
    default_collate_of,
    handover_of,
    has_equal_epochs,
    join_loader,
    prepare,
)
from sqlstream.stream.mixed.dataset import MixedDataset
from sqlstream.stream.mixture.mixture_run import PlannedStep
from sqlstream.stream.run.iteration_start import LateStart
from sqlstream.stream.run.order_options import TORCH_PREFETCH_FACTOR, BatchOptions
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.transport.counted_batches import CollateWithPlace, CountedBatches, InitWorker
from sqlstream.stream.transport.packed_collate import PackedCollate, batch_of
from sqlstream.transforms.base import Sample
from sqlstream.transforms.optional import PILLOW, import_ahead
from sqlstream.world import World


class StreamingDataLoader(DataLoader[Sample]):
    """Batches of a StreamingDataset: the same global batches on any number of ranks and workers, resumable after each of them.

    Each iteration is the next epoch, also with persistent workers; `set_epoch` and `load_state_dict` say otherwise.

    Args:
        dataset: What to load.
        batch_size: Samples of this rank's batch, the same on every rank; None: samples one by one, not collated. `AS_IT_IS`: 1,
            or what the dataset's `batches=` says; where it says another one for each bucket, `loader.batch_size` is None.
        num_workers: Processes that make batches; 0: this one does.
        collate_fn: From a list of samples to a batch; None: torch's default, or what goes with the dataset's `batches=`:
            `collate_packs` for packs, `PaddingCollate` where samples of several lengths share a batch.
        pin_memory: Copy tensors into page-locked memory.
        drop_last: Leave out the last, incomplete global batch. None: as the dataset has it.
        timeout: Longest wait for a batch of a worker, in seconds; 0: no limit.
        worker_init_fn: Called in each worker with its number.
        multiprocessing_context: How workers start: `'fork'`, `'spawn'`, `'forkserver'` or a context; None: the platform's way.
        generator: Draws the seeds of the workers. The order does not depend on it.
        prefetch_factor: Batches that each worker makes ahead; None: 2.
        persistent_workers: Keep the workers from epoch to epoch; they prepare the next one while the last batches are taken.
        pin_memory_device: The device of `pin_memory`.
        pack_bytes: With workers, long bytes, texts, tensors and arrays of a batch come by shared memory that is used again,
            whatever the structure of the batch. `'views'`: a list of `bytes` is then a `PackedBytes`, which gives them without
            a copy; True: it is a list, as without workers. False: all as torch sends it.
        sampler, batch_sampler: None. Lightning gives both as it makes a loader anew, to predict.
        shuffle: False, or None, as scripts for torch's DataLoader have it.

    Raises:
        ConfigError: The dataset was given another batch size, or is no StreamingDataset; or a sampler or shuffle is asked for.

    Example:
        >>> loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2)
        >>> for batch in loader:
        ...     state = loader.state_dict()
    """

    dataset: IteratedDataset

    def __init__(
        self,
        dataset: IteratedDataset,
        batch_size: int | AsItIs | None = AS_IT_IS,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool | None = None,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Any = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        pack_bytes: bool | Literal["views"] = True,
        sampler: None = None,
        batch_sampler: None = None,
        shuffle: bool | None = None,
    ) -> None:
        shuffle = flag_of("shuffle", False if shuffle is None else shuffle)
        if sampler is not None or batch_sampler is not None or shuffle:
            asked = "does not shuffle" if shuffle else "takes no sampler"
            raise ConfigError(
                f"the order is the dataset's, so a StreamingDataLoader {asked}: give the dataset shuffle_seed=, "
                "weights= or batches=, or give torch's DataLoader a MapView of the dataset"
            )
        if not isinstance(dataset, IteratedDataset):
            raise ConfigError(
                f"StreamingDataLoader takes a StreamingDataset or a MixedDataset, not {type(dataset).__name__}: use torch's "
                "DataLoader"
            )
        schedule = dataset.schedule
        schedule.fit_first_ranks()
        has_own = schedule.steps.batches is not None
        follows_ranks = has_own and (batch_size is None or isinstance(batch_size, AsItIs))
        if follows_ranks:
            batch_size = schedule.steps.batch_size_on(dataset.world)
        elif isinstance(batch_size, AsItIs):
            batch_size = 1
        if batch_size is not None:
            batch_size = check_at_least("batch_size", batch_size, 1)
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(f"collate_fn={collate_fn!r} cannot be called: give a function from samples to a batch")
        num_workers = check_at_least("num_workers", num_workers, 0)
        if prefetch_factor is not None:
            prefetch_factor = check_at_least("prefetch_factor", prefetch_factor, 1)
        drop_last = flag_of("drop_last", False if drop_last is None else drop_last)
        persistent_workers = flag_of("persistent_workers", persistent_workers)
        self._batch_options = BatchOptions(
            batch_size=batch_size or 1,
            drop_last=drop_last,
            num_workers=num_workers,
            prefetch_factor=TORCH_PREFETCH_FACTOR if prefetch_factor is None else prefetch_factor,
            is_persistent=persistent_workers,
            are_whole=has_own,
            follows_ranks=follows_ranks,
        )
        if has_own:
            _check_iterates_batches(dataset)
        dataset.expect_batches(self._batch_options)
        if not isinstance(pack_bytes, bool) and not is_word(pack_bytes, "views"):
            raise ConfigError(f"pack_bytes={pack_bytes!r} is unknown: give True, False or 'views'")
        self.pack_bytes = pack_bytes
        self._packing: PackedCollate | None = None
        self._accelerated: Destination | None = None
        self._made_of: tuple[int, World] | None = None
        """What its workers have: how often rows were renewed, and the place in the job; None: it has begun no iteration."""
        self._announcement = 0
        """Number under which its workers read where they begin; 0: there are none."""
        self._epochs = Epochs()
        self._num_begun = 0
        """Iterations, of which persistent workers make the last one."""
        super().__init__(
            dataset,
            batch_size=None if has_own else batch_size,  # then torch takes what the dataset yields for a batch
            num_workers=num_workers,
            collate_fn=default_collate_of(dataset) or default_collate
            if collate_fn is None and batch_size is not None
            else collate_fn,
            pin_memory=flag_of("pin_memory", pin_memory),
            drop_last=drop_last and not has_own,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
        )
        if has_own and schedule.steps.batches is not None and schedule.steps.batches.is_even and schedule.refit is None:
            self.__dict__["batch_size"] = batch_size  # for who asks; torch sets it once

    def __iter__(self) -> _BaseDataLoaderIter:
        """Begin the next epoch, or go on where a state said.

        Where several iterations are under way, in one thread or in several, each gives an epoch of its own, and the state is
        that of the one that was begun last.
        """
        with self.dataset.schedule.start.lock:
            self._expect_batches()
            return self._begin()

    def _begin(self) -> _BaseDataLoaderIter:
        schedule, collate_fn, init_fn = self.dataset.schedule, self.collate_fn, self.worker_init_fn
        fetcher = LookingAhead.of_caller()
        if not self._epochs.find(self, schedule, fetcher):
            return iter(())  # type: ignore[return-value]  # as torch's
        if fetcher.most_held:
            self._expect_held(fetcher.most_held)
        prepare(self.dataset)
        made_of = schedule.num_renewed, schedule.world  # another loader may have renewed the rows, a process group come or gone
        is_other, self._made_of = made_of != self._made_of, made_of
        if is_other or schedule.needs_new_workers or self._has_lost_workers():
            self._end_workers()
        if self.num_workers and self._iterator is None:  # workers that go on know the number
            self._announcement = schedule.counter.new_announcement()
        delivery, loan = schedule.begin_delivery(self._announcement), GeneratorLoan()
        self._epochs.note(fetcher, delivery)
        is_alone = type(self.dataset).__iter__ is IteratedDataset.__iter__  # a subclass may look at samples
        if self.num_workers and self._iterator is None:  # workers are about to start
            self._packing = self._new_packing() if self.pack_bytes else None
            if "PIL.Image" in sys.modules:  # each would bring what opens the first image
                import_ahead(*PILLOW)
        collate = CollateWithPlace(self._packing or _quicker(collate_fn), schedule, loan)
        join_fn = init_fn
        if self.num_workers:
            join = partial(join_loader, handover=handover_of(self.dataset, self), announcement=self._announcement)
            join_fn = InitWorker(join, init_fn)
        try:
            self.collate_fn, self.worker_init_fn = collate, join_fn
            schedule.is_announced = not self.num_workers  # torch iterates the dataset in this very call
            batches = super().__iter__()
            late = self._late_start(schedule)
        except BaseException:
            schedule.take_back(delivery)
            self._end_workers()  # those that stay would answer what the next iteration does not ask
            raise
        finally:
            schedule.is_announced = False
            self.__dict__.update(collate_fn=collate_fn, worker_init_fn=init_fn)  # in torch's setter Python looks for signals
        if not self.num_workers:
            collate.progress = schedule.progress
        if self._accelerated is not None:
            batches = AcceleratedBatches(batches, self, self._accelerated, remainder_of(schedule))  # type: ignore[assignment]  # same
        around = loan if is_alone else late or contextlib.nullcontext()
        self._num_begun += 1
        is_current = partial(self._makes, self._num_begun) if self.num_workers and self.persistent_workers else None
        return CountedBatches(batches, delivery, self._packing, around, is_current, fetcher)  # type: ignore[return-value]  # as torch's

    def _late_start(self, schedule: Schedule) -> LateStart | None:
        """Return the iteration for a generator of a subclass, whose code has not run yet; None: it is none, or has workers."""
        if self.num_workers or schedule.progress is not None:
            return None
        return LateStart(schedule.start, schedule.begin())

    def _makes(self, number: int) -> bool:
        """Return whether no iteration has begun since the one of that number."""
        return self._num_begun == number

    def _has_lost_workers(self) -> bool:
        """Return whether one of the workers that stay is gone: Ctrl-C in a terminal, or a notebook, ends them all."""
        return self._iterator is not None and not all(worker.is_alive() for worker in self._iterator._workers)  # type: ignore[attr-defined]  # one of torch's, with workers

    def _end_workers(self) -> None:
        """End the workers that stay; the next iteration starts others."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]  # as above
            self._iterator = None

    def _new_packing(self) -> PackedCollate:
        """Return what packs the batches of workers that are about to start."""
        if isinstance(self.collate_fn, PackedCollate):
            return self.collate_fn
        prefetch_factor = self.prefetch_factor or TORCH_PREFETCH_FACTOR
        return PackedCollate(self.collate_fn, gives_views=self.pack_bytes == "views", prefetch_factor=prefetch_factor)

    def _expect_held(self, num_held: int) -> None:
        """Have the paths of so many batches more stay valid."""
        self._batch_options = replace(self._batch_options, num_held=num_held)
        self._expect_batches()

    def _expect_batches(self) -> None:
        """Tell the dataset how this loader takes samples: another loader of it may have said otherwise meanwhile."""
        self.dataset.expect_batches(self._batch_options)

    @property
    def batch_size(self) -> int | None:
        """Samples of a batch of this rank; None: it differs by bucket, or samples come one by one.

        To Accelerate, which makes a plain DataLoader of what this one says, None for all datasets that give whole batches.
        """
        is_whole = self._batch_options.are_whole and is_copied_by_accelerate()
        return None if is_whole else self.__dict__["batch_size"]

    @batch_size.setter
    def batch_size(self, value: int | None) -> None:
        self.__dict__["batch_size"] = value  # Lightning looks there for the arguments of a loader that it makes anew

    @property
    def _is_accelerate_prepared(self) -> bool:
        """What `accelerator.prepare` asks first: it hands a prepared loader back (`stream.frameworks.accelerate`)."""
        caller = sys._getframe(1).f_locals
        if any(kind.__name__ == "Accelerator" for kind in type(caller.get("self")).__mro__):
            self._accelerated = destination_of(caller["self"], caller.get("device_placement"), self.dataset.schedule)
            self._expect_held(1)
        return self._accelerated is not None

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        """Accelerate notes what it has prepared."""

    @property
    def use_stateful_dataloader(self) -> bool:
        """What `accelerator.save_state` and `load_state` ask: they keep the state of a loader where Accelerate was told so."""
        return self._accelerated is not None and self._accelerated.keeps_state

    def __repr__(self) -> str:
        """Return dataset, batch size and workers; nothing is read."""
        return f"{type(self).__name__}({self.dataset!r}, batch_size={self.batch_size}, num_workers={self.num_workers})"

    def __len__(self) -> int:
        """Return the batches of this rank in an epoch; Lightning, which asks once, is told none where epochs differ."""
        if is_asked_by_lightning() and not has_equal_epochs(self.dataset):
            raise UnknownLengthError("epochs differ in length, and Lightning ends all of them after the length of one")
        self._expect_batches()
        return self.dataset.schedule.num_steps

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`, from its start."""
        self.dataset.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the last batch that this loader has delivered: JSON-able.

        It is equal on all ranks, unless rows give no sample, or several: then save it on each.
        """
        self._expect_batches()
        return self.dataset.state_dict()

    def load_state_dict(
        self, state: Mapping[str, Any], strict: bool = True, streams: str | Mapping[str, str] | None = None
    ) -> None:
        """Make the next iteration go on where `state` says, on any number of ranks and workers.

        Args:
            state: What `state_dict` returned: any rank's, or, where rows give no sample or several, this rank's own.
            strict: False: take epoch and samples from the state of another dataset, query, seed or global batch size.
            streams: Of a mixture: `'continue'`, so that streams may come and go; see `MixedDataset.load_state_dict`.

        Raises:
            StateError: `state` is that of another dataset, query, seed or global batch size.
            ConfigError: There is `streams`, and the dataset is no mixture.
        """
        self._expect_batches()
        if streams is None:
            self.dataset.load_state_dict(state, strict=strict)
        else:
            self._mixed("load_state_dict(streams=)").load_state_dict(state, strict=strict, streams=streams)

    def counts(self, step: int) -> dict[str, int]:
        """Return how many samples of each stream of a mixture the whole job has taken before a step of the run.

        With `drop_last` this counts what the ends of epochs left out, too: the next epoch goes on behind it.
        """
        return self._mixed("counts").counts(step)

    def plan(self, first: int, stop: int) -> Iterator[PlannedStep]:
        """Yield what the steps `[first, stop)` of the run take of each stream of a mixture, without loading anything."""
        return self._mixed("plan").plan(first, stop)

    def _mixed(self, what: str) -> MixedDataset:
        """Return the dataset.

        Raises:
            ConfigError: It is no mixture.
        """
        if not isinstance(self.dataset, MixedDataset):
            raise ConfigError(f"{what} is of mixtures, and the dataset is {self.dataset!r}: give a MixedDataset")
        self._expect_batches()
        return self.dataset


def _check_iterates_batches(dataset: IteratedDataset) -> None:
    """Raise ConfigError if a dataset that yields whole batches is iterated in a manner of its own."""
    if type(dataset).__iter__ is not IteratedDataset.__iter__:
        raise ConfigError(
            f"a dataset with batches= yields whole batches to its loader, and {type(dataset).__name__} has an __iter__ of its "
            "own, which expects samples: make it a transform"
        )


def _quicker(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return batch_of if collate_fn is default_collate else collate_fn
