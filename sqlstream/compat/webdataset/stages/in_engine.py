"""Stages of single samples where the engine makes these, and of batches where a loader does."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from sqlstream.compat.webdataset.handlers import is_known
from sqlstream.compat.webdataset.stages.base import EachSample, Outcome, apply_each
from sqlstream.errors import SqlStreamError
from sqlstream.storage.base.urls import redact
from sqlstream.transforms.base import Sample
from sqlstream.transforms.draw_free import GivenCode

_PACKAGE = "sqlstream.compat.webdataset."
"""Stages of classes of the user may do anything."""
VALUE = "value"
"""Field of the engine's samples that has what the stages made."""


class StreamStopped(SqlStreamError):  # noqa: N818 - it is a sign, and no error
    """A handler says that the iteration ends."""


class StageFailedError(SqlStreamError):
    """A stage failed, and its handler has raised that; in the process itself it is its cause that the user gets."""


class SampleStages:
    """The transform that runs stages of single samples.

    Args:
        stages: The stages; the first one takes a row.
    """

    def __init__(self, stages: Sequence[EachSample]) -> None:
        self.stages = tuple(stages)
        self.calls_given_code = any(stage.calls_given_code for stage in stages)
        self._takes = tuple((stage, stage.take) for stage in stages)

    @property
    def given_code(self) -> GivenCode | None:
        """The functions of all stages, and their handlers; None: what a stage calls is not known."""
        given = [stage.given if type(stage).__module__.startswith(_PACKAGE) else None for stage in self.stages]
        handlers = [stage.handler for stage in self.stages if not is_known(stage.handler)]
        found = [called for called in given if called is not None]
        return GivenCode(called=(*itertools.chain.from_iterable(found), *handlers)) if len(found) == len(given) else None

    def __call__(self, sample: Sample) -> Sample | tuple[Sample, ...]:
        """Return what the stages make of a row under `VALUE`, or no sample.

        Raises:
            StreamStopped: A handler says so.
            StageFailedError: A handler has raised what it was given.
        """
        made: Any = sample
        for stage, take in self._takes:
            try:
                made = take(made)
            except Exception as error:
                made = self._outcome(stage, sample, error)
            if made is Outcome.DROPPED:
                return ()
            if made is Outcome.STOPPED:
                raise StreamStopped(f"a handler of {stage!r} ends the iteration")
        sample.clear()  # a new dict would be one more to carry the generator of the sample to
        sample[VALUE] = made
        return sample

    def _outcome(self, stage: EachSample, sample: Sample, error: Exception) -> Outcome:
        """Ask the handler of a stage; what it raises is no failure of reading, so `on_error` does not see it."""
        try:
            goes_on = stage.handler(error)
        except Exception as raised:
            text = f"{stage!r} failed on {_described(sample)}: {type(raised).__name__}: {raised}"
            raise StageFailedError(text) from raised
        if not goes_on:
            raise StreamStopped(f"the handler of {stage!r} ends the iteration")
        return Outcome.DROPPED


class Collate:
    """Makes what a loader yields of samples of the engine.

    Args:
        collate: From a list of values to a batch; None: the list.
        stages: Stages of batches.
        value_of: From a sample of the engine to its value.
        takes_one: The loader makes no batches, and gives single samples.
        finish: What the loader makes of a batch, behind its stages; None: nothing.
    """

    def __init__(
        self,
        collate: Callable[[list[Any]], Any] | None,
        stages: Sequence[EachSample],
        value_of: Callable[[Sample], Any],
        *,
        takes_one: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        self._collate, self._stages, self._finish = collate, tuple(stages), finish
        self._value_of, self._takes_one = value_of, takes_one

    def __call__(self, samples: Any) -> Any:
        """Return the batch, or the outcome that it is none."""
        values = self._value_of(samples) if self._takes_one else [*map(self._value_of, samples)]
        made = values if self._collate is None else self._collate(values)
        made = apply_each(self._stages, made) if self._stages else made
        return made if self._finish is None or isinstance(made, Outcome) else self._finish(made)


def _described(row: Sample) -> str:
    """Return what names the sample of a row in messages."""
    return f"sample {row.get('__key__')!r} of {redact(str(row.get('__url__')))}"
