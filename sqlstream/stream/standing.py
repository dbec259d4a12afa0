"""Where a dataset stands in its run: its epoch, its place in the job, and its state, saved and loaded."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from sqlstream.cache import Cache
from sqlstream.cache.ledger.reports import FailureRecord, failures
from sqlstream.config import check_at_least
from sqlstream.index.file.index import Index
from sqlstream.index.weights import WeightsSpec
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.epoch_counter import JobPosition
from sqlstream.stream.run.schedule import Schedule, reweight
from sqlstream.stream.run.state import StreamState
from sqlstream.world import World

logger = logging.getLogger(__name__)


class RunState:
    """The part of a dataset's interface that is about its order and state, over its schedule."""

    _schedule: Schedule

    _pipeline: Pipeline

    @property
    def index(self) -> Index:
        """The index that the rows come from."""
        return self._pipeline.index

    @property
    def cache(self) -> Cache:
        """The cache that the objects go through."""
        return self._pipeline.cache

    def get_identifier_desc(self) -> str:
        """Return a line that names this dataset in logs."""
        known = self.index.known_length
        return f"{self._pipeline.name} ({'an unknown number of' if known is None else known} samples of {self.index.src})"

    @property
    def world(self) -> World:
        """Where this process stands in its job; ranks that take the same samples count as one."""
        return self._schedule.world

    @property
    def schedule(self) -> Schedule:
        """Order, layout and state."""
        return self._schedule

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of the order; the drawn one for `shuffle_seed=-1`."""
        return self._schedule.plan.seed

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self._schedule.counter.next.epoch

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch; of a lazy index whose filter has not been run on all of it: at most so many."""
        return self._schedule.plan.partition(World()).num_positions

    def num_steps(self, batch_size: int, num_workers: int = 0, *, drop_last: bool = False) -> int:
        """Return the batches that this rank takes of an epoch, as far as each row gives one sample.

        Args:
            batch_size: Samples of this rank's batch.
            num_workers: Workers of the loader. They matter to a plain DataLoader, where each makes batches of its own share.
            drop_last: The loader leaves out incomplete batches.
        """
        check_at_least("batch_size", batch_size, 1)
        check_at_least("num_workers", num_workers, 0)
        schedule, count = self._schedule, max(1, num_workers)
        shares = [schedule.plan.partition(schedule.world.with_worker(worker, count)).num_samples for worker in range(count)]
        return sum(share // batch_size if drop_last else -(-share // batch_size) for share in shares)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.set_progress(epoch, 0)

    def set_progress(self, epoch: int, sample_in_epoch: int) -> None:
        """Make the next iteration go on in `epoch` after `sample_in_epoch` samples of the whole job."""
        check_at_least("epoch", epoch, 0)
        check_at_least("sample_in_epoch", sample_in_epoch, 0)
        self._schedule.set_next(JobPosition(epoch, sample_in_epoch))

    def reweight(self, weights: WeightsSpec | None, at_step: int | None = None) -> None:
        """Change how often rows come; call it on every rank, after the same step. States carry it.

        Args:
            weights: An SQL expression over the selected rows, a column, or a number for each row; None: all the same.
            at_step: From this step of the epoch under way on; None: from the next epoch on.

        Raises:
            StateError: That step is handed out or planned already; the message names the first possible one.
            ConfigError, QueryError: These are no weights.
        """
        reweight(self._schedule, weights, at_step, self._pipeline.options.prefetch)

    def failures(self) -> list[FailureRecord]:
        """Return what failed in this cache, in any process: URLs that could not be brought, rows that made no sample.

        Each names row, URL, global step (in its epoch), error, count and time; the most frequent first.
        """
        return failures(self._pipeline.cache.store.ledger)

    def state_dict(self, num_samples: int | None = None) -> dict[str, object]:
        """Return where the run stands, JSON-able.

        Args:
            num_samples: Samples of the epoch that the whole job has consumed. Needed with the workers of a plain DataLoader,
                which run ahead of the trainer; otherwise what this process has yielded counts, or what a StreamingDataLoader
                has delivered.

        Raises:
            StateError: It is needed and was not given.
        """
        return self._state(num_samples).to_dict()

    def load_state_dict(self, state: Mapping[str, object], strict: bool = True) -> None:
        """Go on where `state` says; call it in the trainer before iteration starts, on every rank with the same state.

        Args:
            state: What `state_dict` returned, on any number of ranks and workers.
            strict: False: take epoch and samples from the state of another dataset, query, seed or global batch size.

        Raises:
            StateError: It is the state of another one.
        """
        loaded, schedule = StreamState.from_dict(state), self._schedule
        consumed = loaded.sample_in_epoch
        if strict:
            loaded.check(self._state(0))
            if loaded.fingerprint is not None:
                schedule.weighting.restore(loaded.weights)
        elif schedule.plan.batch_size is not None and consumed < self.epoch_size and consumed % schedule.step_size:
            consumed -= consumed % schedule.step_size
            logger.warning(
                "sample_in_epoch=%d of the state is no multiple of a step of %d samples: going on after %d, so %d come again",
                *(loaded.sample_in_epoch, schedule.step_size, consumed, loaded.sample_in_epoch - consumed),
            )
        mark = JobPosition(loaded.epoch, consumed)
        if strict:
            schedule.set_next(mark, loaded.share, loaded.beyond)
        else:
            schedule.set_next(mark)

    def _state(self, num_samples: int | None) -> StreamState:
        schedule = self._schedule
        mark, share, beyond = schedule.where(num_samples)
        blocks = schedule.plan.blocks
        return StreamState(
            epoch=mark.epoch,
            sample_in_epoch=mark.consumed,
            fingerprint=self.index.fingerprint,
            shuffle_seed=schedule.plan.seed,
            global_batch_size=schedule.global_batch_size,
            num_canonical_nodes=schedule.plan.num_canonical_nodes,
            blocks=None if blocks is None else blocks.fingerprint,
            epoch_size=schedule.plan.num_samples,
            weights=tuple(schedule.weighting.to_state()),
            share=share,
            beyond=beyond,
        )
