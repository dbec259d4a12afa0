"""What a pipeline is made of: stages of one sample at a time, which the engine runs, and stages of all samples."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any

from sqlstream.compat.webdataset.handlers import Handler, reraise_exception


class Outcome(Enum):
    """What a stage returns in place of a sample; members of an enum stay themselves on their way from a worker."""

    DROPPED = "dropped"
    """There is no sample: the next one follows."""
    STOPPED = "stopped"
    """There is no sample, and none follows."""


class PipelineStage:
    """A stage that takes an iterator of samples, and returns one."""

    name = ""
    """Name in explanations; empty: that of the class."""
    shown: tuple[str, ...] = ()
    """Attributes in explanations."""

    def run(self, *args: Any, **kw: Any) -> Iterator[Any]:
        """Return what becomes of the samples of an iterator."""
        raise NotImplementedError  # as theirs: stages of users define it

    def __call__(self, *args: Any, **kw: Any) -> Iterator[Any]:
        """Run: what `wds.map(f)` and the like return can be called, too."""
        return self.run(*args, **kw)

    def __repr__(self) -> str:
        """Return its name and what it was given."""
        return f"{self.name or type(self).__name__}({', '.join(_shown(getattr(self, name)) for name in self.shown)})"


class EachSample(PipelineStage):
    """A stage that makes one sample, or none, of each one, whatever came before: the engine can run it where samples are made.

    Args:
        handler: Called with the exception of a sample.
    """

    calls_given_code = True
    """It calls functions of the user, which may draw from global generators."""

    def __init__(self, handler: Handler = reraise_exception) -> None:
        self.handler = handler

    @property
    def given(self) -> tuple[Callable[..., Any], ...] | None:
        """What it calls of the user's beside its handler; None: not known."""
        return None if self.calls_given_code else ()

    @abstractmethod
    def take(self, sample: Any) -> Any:
        """Return what becomes of a sample, or `Outcome.DROPPED`."""

    def of(self, sample: Any) -> Any:
        """Return what becomes of a sample, its handler asked where that fails."""
        try:
            return self.take(sample)
        except Exception as error:
            return Outcome.DROPPED if self.handler(error) else Outcome.STOPPED

    def run(self, source: Iterable[Any]) -> Iterator[Any]:
        """Yield what becomes of samples."""
        for sample in source:
            made = self.of(sample)
            if made is Outcome.STOPPED:
                return
            if made is not Outcome.DROPPED:
                yield made


def apply_each(stages: Iterable[EachSample], sample: Any) -> Any:
    """Return what becomes of a sample by several stages, or an outcome without one."""
    for stage in stages:
        sample = stage.of(sample)
        if isinstance(sample, Outcome):
            return sample
    return sample


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_shown(some)}" for name, some in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_shown, value))
    return getattr(value, "__qualname__", None) or repr(value)
