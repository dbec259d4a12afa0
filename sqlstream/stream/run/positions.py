"""Where a run stands: the whole job, one of its workers, and what goes on from a state."""

from __future__ import annotations

from typing import NamedTuple

from sqlstream.stream.run.partial_steps import DeliveredAhead, TakenAlone


class JobPosition(NamedTuple):
    """The position of the whole job, at a step's end."""

    epoch: int
    consumed: int
    """Samples of the epoch that the whole job has taken."""


class WorkerPosition(NamedTuple):
    """The position of a worker in its share, after a batch; it goes to the trainer with the batch."""

    worker: int
    epoch: int
    taken: int
    """Positions of the share that are taken."""
    offset: int
    """Samples of the next position that are taken."""


class RunPosition(NamedTuple):
    """The position of a run, as far as one process knows; an iteration goes on from it, and a state is made of it."""

    job: JobPosition
    share: TakenAlone | None = None
    """What this process alone has taken behind the job's position."""
    beyond: DeliveredAhead | None = None
    """What this rank was given behind the job's position."""

    def first_worker(self, num_workers: int) -> int:
        """Return the worker that takes the first step of an iteration; not 0 only where as many workers went before."""
        return self.beyond.first_worker if self.beyond is not None and self.beyond.num_workers == num_workers else 0

    @property
    def first_whole_epoch(self) -> int:
        """The first epoch of which nothing is taken."""
        return self.job.epoch + int(self.job.consumed > 0 or self.share is not None or self.beyond is not None)
