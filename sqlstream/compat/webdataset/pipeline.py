"""A pipeline: stages one behind the other, of which as many as can be are one dataset of ours."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Self

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream import StreamingDataset
from sqlstream.compat.webdataset.stages.base import PipelineStage
from sqlstream.compat.webdataset.translation import Note, Plan, Settings, explained, in_shard_order, invoke, name_of, translate
from sqlstream.errors import StateError
from sqlstream.world import World


class _Opened:
    """The datasets of the shards of a pipeline, and of all that were composed from it."""

    def __init__(self) -> None:
        self.datasets: dict[tuple[Any, ...], StreamingDataset] = {}

    def of(self, plan: Plan, settings: Settings) -> StreamingDataset:
        """Return the dataset of a plan's shards, opened once."""
        key = (plan.urls, plan.reader)
        if (known := self.datasets.get(key)) is None:
            if settings.shows_shards:
                sys.stderr.writelines(f"GOPEN {url}\n" for url in plan.urls)
            known = self.datasets[key] = plan.open(settings)
        return known

    def close(self) -> None:
        """Close all of them."""
        for dataset in self.datasets.values():
            dataset.close()
        self.datasets.clear()


class DataPipeline(IterableDataset[Any], PipelineStage):
    """Stages that samples go through.

    What begins with a list of shards and reads them (`tarfile_to_samples`) becomes one `StreamingDataset`, with its order,
    cache and resumption, in the process that makes the pipeline; `explain()` says which stages are part of it.

    Args:
        args: The stages, or lists of them.
        kwargs: Ignored.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002 - theirs takes them
        super().__init__()
        self.pipeline: list[Any] = []
        self.length = -1
        self.repetitions = 1
        self.nsamples = -1
        self.size: int | None = None
        self._settings = getattr(self, "_settings", None) or Settings.given()
        self._opened = _Opened()
        for stage in args:
            self.pipeline += stage if isinstance(stage, list) else [] if stage is None else [stage]
        self._translate()

    def _translate(self) -> None:
        """Make one dataset of what can be part of one."""
        self._translated = list(self.pipeline)
        self._plan = translate(self.pipeline, self._settings) if self.pipeline else None
        self._streaming = None if self._plan is None else self._plan.view(self._opened.of(self._plan, self._settings))

    def _follow(self) -> None:
        """Translate the stages again where a user has changed the list of them."""
        if [*map(id, self.pipeline)] != [*map(id, self._translated)]:
            self._translate()

    # -- its stages ---------------------------------------------------------------------------------------------------

    def stage(self, i: int) -> Any:
        """Return a stage by its place."""
        return self.pipeline[i]

    def append(self, f: Any) -> None:
        """Append a stage."""
        self.pipeline.append(f)
        self._translate()

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages, over the same shards and cache."""
        made = copy.copy(self)
        made._opened = self._opened  # a copy is made as a pickle is, which leaves it out
        made.pipeline = [*self.pipeline, *args]
        made._translate()
        return made

    def explain(self) -> str:
        """Return for each stage whether it is part of one dataset of ours (`→`), or runs as it is (`·`)."""
        self._follow()
        return explained(self._notes())

    def _notes(self) -> list[Note]:
        if self._plan is None:
            notes, ordered = [Note(name_of(stage), "as it is", False) for stage in self.pipeline], in_shard_order(self.pipeline)
            if ordered is not None:
                reason = "may need the samples of a shard one behind the other, so all run as they are: say shuffle() before"
                notes.append(Note(name_of(ordered), reason, False))
            return notes
        notes = list(self._plan.notes)
        if self.repetitions != 1:
            what = f"{self.nsamples} of them are an epoch" if self.nsamples > 0 else "epochs follow each other"
            notes.append(Note("with_epoch, repeat", what, True))
        return notes

    @property
    def streaming(self) -> StreamingDataset | None:
        """The dataset that it became: its samples have what stages make under `value`; None: all stages run as they are."""
        self._follow()
        return self._streaming

    def for_world(self, world: World, num_workers: int = 1) -> Self:
        """Return this pipeline with the samples of one place among all processes; its epochs are its own.

        Args:
            world: The place.
            num_workers: Processes of each rank, of which the place is one. Where a rank takes all samples of its shards, these
                share them alone.
        """
        made = copy.copy(self)
        if self._plan is not None and self._streaming is not None:
            of_rank = World(rank=world.rank % num_workers, world_size=num_workers)
            made._streaming = self._plan.view(self._streaming, world=of_rank if self._plan.is_alone else world)
        return made

    # -- iterations ---------------------------------------------------------------------------------------------------

    def invoke(self, f: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        """Return the iterator of a stage."""
        return f.run(*args, **kwargs) if kwargs and isinstance(f, PipelineStage) else invoke(f, *args)

    def iterator1(self) -> Iterator[Any]:
        """Return the samples of one epoch."""
        if self._plan is not None and self._streaming is not None:
            return self._plan.iterate(self._streaming)
        made = invoke(self.pipeline[0])
        for stage in self.pipeline[1:]:
            made = invoke(stage, made)
        return made

    def iterator(self) -> Iterator[Any]:
        """Yield the samples of as many epochs as `repeat` says; two without samples end it, as the first may be a rest."""
        num_empty = 0
        for _ in range(self.repetitions):
            num_empty += 1
            for made in self.iterator1():
                num_empty = 0
                yield made
            self._show_cache()
            if num_empty == 2:
                return

    def __iter__(self) -> Iterator[Any]:
        """Return the samples of an epoch."""
        self._follow()
        if self.repetitions == 1 and not self._settings.shows_cache:
            return self.iterator1()
        return self.iterator() if self.repetitions == 1 or self.nsamples <= 0 else self._cut()

    def _cut(self) -> Iterator[Any]:
        """Yield so many samples as `with_epoch` says; the next epoch goes on where this one ends, but in a worker."""
        samples = self.iterator()
        for number, made in enumerate(samples, start=1):
            yield made
            if number == self.nsamples:
                break
        samples.close()  # type: ignore[attr-defined]  # it is a generator
        if self._streaming is not None and get_worker_info() is None:
            self._streaming.load_state_dict(self._streaming.state_dict())

    def run(self, *args: Any, **kw: Any) -> Iterator[Any]:
        """Return its samples, as a first stage of another pipeline does."""
        if args or kw:
            raise ValueError(f"{type(self).__name__} is no stage behind others: put it first")
        return iter(self)

    def _show_cache(self) -> None:
        if self._settings.shows_cache and self._streaming is not None and get_worker_info() is None:
            statistics = self._streaming.cache.statistics()
            sys.stderr.write(f"# cache {self._streaming.cache.path}: {statistics}\n")

    # -- lengths ------------------------------------------------------------------------------------------------------

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Set what `len()` returns; the number of samples stays."""
        if not silent:
            warnings.warn("with_length() sets len() alone; with_epoch() sets the number of samples of an epoch", stacklevel=2)
        self.size = n
        return self

    def __len__(self) -> int:
        """Return what `with_length` has set."""
        if self.size is None:
            raise TypeError(f"{type(self).__name__} has no length: give with_length()")
        return self.size

    def __bool__(self) -> bool:
        """Return True, also without a length."""
        return True

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Make an epoch of so many samples, or batches: the first ones, then those that follow."""
        self.repetitions = sys.maxsize
        self.nsamples = max(nsamples, nbatches)
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Make one iteration of so many epochs, or without end, and of so many batches at most."""
        self.repetitions = nepochs if nepochs > 0 else sys.maxsize
        self.nsamples = nbatches
        return self

    # -- its state ----------------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int | None = None) -> dict[str, Any]:
        """Return the state of the run (`StreamingDataset.state_dict`); what stages that run as they are hold back is lost."""
        return self._stateful().state_dict(num_samples)

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where a state says."""
        self._stateful().load_state_dict(state, strict=strict)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self._stateful().set_epoch(epoch)

    def _stateful(self) -> StreamingDataset:
        self._follow()
        if self._streaming is None:
            raise StateError(
                f"this pipeline has no state, since it does not begin with shards that are read:\n{self.explain()}"
            )
        return self._streaming

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close what it has opened, for all pipelines that were composed from the same one."""
        self._opened.close()
        for stage in self.pipeline:
            if hasattr(stage, "close"):
                stage.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which opens nothing itself."""
        return {**self.__dict__, "_opened": _Opened()}

    def __repr__(self) -> str:
        """Return its stages."""
        return f"{type(self).__name__}({', '.join(map(name_of, self.pipeline))})"
