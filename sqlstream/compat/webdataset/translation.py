"""A chain of stages as one dataset of ours: which stages become its source, order, transforms and batches, and which cannot.

shards ─ splits ─ tarfile_to_samples ─ map, decode, … ─ batched ─ map, … ─ all else
└ source, order ┘ └ the engine reads ┘ └ transforms ┘   └ steps ┘ └ collate ┘ └ as it is
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream import StreamingDataset, distributed
from sqlstream.compat.webdataset.shardlists import (
    SPLITTERS,
    Resampled,
    ResampledShards,
    SimpleShardList,
    non_empty,
    split_by_worker,
)
from sqlstream.compat.webdataset.stages.all_samples import Batched, Curried, Shuffle, detshuffle
from sqlstream.compat.webdataset.stages.base import EachSample, PipelineStage
from sqlstream.compat.webdataset.stages.in_engine import VALUE, SampleStages, StageFailedError, StreamStopped
from sqlstream.compat.webdataset.tariterators import TarfileToSamples, open_shards, until_stopped
from sqlstream.config import AS_IT_IS, AsItIs
from sqlstream.environment import environment
from sqlstream.errors import ConfigError, SourceError, SqlStreamError, StorageError
from sqlstream.stream.selected_rows import ViewOrder
from sqlstream.transforms.base import Sample
from sqlstream.world import World

SHUFFLE_WINDOW = 8
"""Shards whose samples are mixed: as many as a job of theirs with eight workers has open. The first sample waits for so many,
or for their tables; without a drop-in it is 64."""
_MOST_SHARDS = 1_000_000
"""Shards that a function of the user may leave; theirs takes so many URLs of an iterable (`max_urls`)."""


_IDLE = "a buffer of one sample mixes nothing"


class Note(NamedTuple):
    """What became of a stage."""

    stage: str
    outcome: str
    is_translated: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settings:
    """What a `WebDataset` is given beside its stages."""

    dst: str | None = None
    """Cache directory; None: the user's own."""
    limit: int | AsItIs | None = AS_IT_IS
    """Bytes of the cache."""
    seed: int | None = None
    """Seed of the order; None: that of a stage, else 0, since all ranks must have the same."""
    shows_shards: bool = False
    """Print the URLs that are opened (`GOPEN_VERBOSE`)."""
    shows_cache: bool = False
    """Print what the cache did after each iteration (`WDS_VERBOSE_CACHE`)."""

    @classmethod
    def given(
        cls, cache_dir: str | None = None, cache_size: int = -1, seed: int | None = None, *, is_verbose: bool = False
    ) -> Settings:
        """Return what a dataset is given, or what the environment says of it, as theirs reads it.

        Raises:
            ConfigError: A size, or a seed, is no number.
        """
        said = environment("WDS_CACHE", "WDS_CACHE_SIZE", "WDS_SEED", "WDS_VERBOSE_CACHE", "GOPEN_VERBOSE")
        name = "environment variable WDS_CACHE_SIZE" if "WDS_CACHE_SIZE" in said else "cache_size"
        size = _number(name, said.get("WDS_CACHE_SIZE", cache_size))
        chosen = said.get("WDS_SEED") if seed is None else seed
        return cls(
            dst=None if size == 0 else said.get("WDS_CACHE", cache_dir),
            limit=size if size > 0 else AS_IT_IS,
            seed=None if chosen is None else _number("environment variable WDS_SEED" if seed is None else "seed", chosen),
            shows_shards=is_verbose or said.get("GOPEN_VERBOSE", "0") != "0",
            shows_cache=said.get("WDS_VERBOSE_CACHE", "0") != "0",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """A chain as one dataset, and what cannot be part of it."""

    urls: tuple[str, ...]
    reader: TarfileToSamples
    seed: int | None = None
    """Seed of the order; None: shards and samples as written."""
    is_endless: bool = False
    """Shards are drawn without end."""
    is_alone: bool = False
    """Each rank takes all samples of its shards: no stage of theirs splits them by node; one of the user's may have."""
    stages: tuple[EachSample, ...] = ()
    """Stages of single samples."""
    batch: Batched | None = None
    batch_stages: tuple[EachSample, ...] = ()
    """Stages of batches."""
    has_empty_check: bool = False
    """An iteration of which `select_files` leaves nothing is an error."""
    rest: tuple[Any, ...] = ()
    """Stages that run as they are."""
    notes: tuple[Note, ...] = ()

    @property
    def order(self) -> ViewOrder:
        """The order of the dataset."""
        return {
            "shuffle_seed": self.seed,
            "infinite_iteration": self.is_endless,
            "batch_size": None if self.batch is None else self.batch.batchsize,
            "drop_last": self.batch is not None and not self.batch.partial,
            "world": World() if self.is_alone else None,
        }

    @property
    def transforms(self) -> list[SampleStages]:
        """The transforms of the dataset; without stages rows become samples behind the engine, which costs less."""
        return [SampleStages((self.reader.from_row, *self.stages))] if self.has_transforms else []

    @property
    def has_transforms(self) -> bool:
        """The dataset makes values of rows, under `VALUE`."""
        return bool(self.stages) or self.reader.from_row.calls_given_code

    @property
    def value_of(self) -> Callable[[Sample], Any]:
        """From a sample of the dataset to what the stages have made."""
        return itemgetter(VALUE) if self.has_transforms else self.reader.from_row.take

    def view(self, dataset: StreamingDataset, **others: Any) -> StreamingDataset:
        """Return a dataset of the plan, of the rows of one that has its shards; `others` of its order are as given."""
        order: ViewOrder = {**self.order, **others}  # type: ignore[typeddict-item]  # parameters of the order
        return dataset.view(self.transforms, **order)

    def open(self, settings: Settings) -> StreamingDataset:
        """Return a dataset of the plan's shards."""
        options: dict[str, Any] = {
            "dst": settings.dst,
            "cache_limit": settings.limit,
            "shuffle_seed": self.seed,
            "shuffle_window": SHUFFLE_WINDOW,
        }
        return open_shards([*until_stopped(self.urls, self.reader.handler)], self.reader, **options)

    def iterate(self, dataset: StreamingDataset) -> Iterator[Any]:
        """Yield what one iteration of the dataset gives, after all stages."""
        made = self._values(dataset)
        if self.batch is not None:
            made = self.batch.run(made)
        for stage in self.batch_stages:
            made = stage.run(made)
        for stage in self.rest:
            made = invoke(stage, made)
        return made

    def _values(self, dataset: StreamingDataset) -> Iterator[Any]:
        try:
            yield from map(self.value_of, dataset)
        except SqlStreamError as error:
            if not self.ends_with(error):
                raise
        self.check_kept()

    def check_kept(self) -> None:
        """Raise ValueError if `select_files` has left nothing of all samples, and that is asked.

        One of several ranks, or of several workers of torch's loader, cannot tell: of samples that are kept by their number's
        parity, one of two has none.
        """
        worker = get_worker_info()
        num_processes = distributed.read_world().world_size * (1 if worker is None else worker.num_workers)
        if self.has_empty_check and self.reader.from_row.keeps_nothing and num_processes == 1:
            raise ValueError(
                "select_files keeps no member of any sample: it is given names such as 'photos/0001.jpg': correct it, or give "
                "empty_check=False"
            )

    def ends_with(self, error: SqlStreamError) -> bool:
        """Return whether an error only ends the iteration: a handler said so, or that of the reader says so now.

        Raises:
            Exception: What a stage has raised, where it did so in this process.
        """
        if isinstance(error, StreamStopped):
            return True
        if isinstance(error, StageFailedError) and isinstance(error.__cause__, Exception):
            error.__cause__.add_note(str(error))
            raise error.__cause__ from None
        is_read = isinstance(error, SourceError | StorageError)
        return is_read and not self.reader.goes_on and not self.reader.handler(error)


def _number(name: str, given: Any) -> int:
    try:
        return int(given)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{name}={given!r} is not a whole number: correct it, or leave it out") from None


def invoke(stage: Any, *given: Any) -> Iterator[Any]:
    """Return the iterator of a stage that runs as it is: of the first one, or of one that takes an iterator.

    Raises:
        ValueError: It is no stage.
    """
    if isinstance(stage, PipelineStage):
        return stage.run(*given)
    if not given and (isinstance(stage, IterableDataset | list | tuple) or hasattr(stage, "__iter__")):
        return iter(stage)
    if callable(stage):
        made: Iterator[Any] = stage(*given)
        return made
    raise ValueError(f"{stage!r} is no stage of a pipeline: give a dataset, a stage, or a function from iterator to iterator")


def translate(stages: Sequence[Any], settings: Settings) -> Plan | None:
    """Return a chain as one dataset; None: it does not begin with shards that are read, and runs as it is.

    So does one that a DataLoader's worker makes without `split_by_worker`: its shards may be those of this worker alone, whose
    samples the engine would deal to all workers.
    """
    readers = [place for place, stage in enumerate(stages) if isinstance(stage, TarfileToSamples)]
    if not readers or not isinstance(stages[0], SimpleShardList | ResampledShards) or in_shard_order(stages) is not None:
        return None
    before = stages[1 : readers[0]]
    if get_worker_info() is not None and isinstance(stages[0], SimpleShardList) and split_by_worker not in before:
        return None
    plan = _of_shards(stages[: readers[0]], stages[readers[0]], settings)
    return _of_samples(plan, stages[readers[0] + 1 :], settings)


def in_shard_order(stages: Sequence[Any]) -> Any:
    """Return the first stage that may need the samples of a shard one behind the other; None: there is none.

    That is a function of the user that takes all samples, with no `shuffle` between it and the reader: it may read another
    shard side by side. The engine deals samples to workers, and mixes those of several shards.
    """
    read = list(itertools.dropwhile(lambda stage: not isinstance(stage, TarfileToSamples), stages))[1:]
    for stage in read:
        if isinstance(stage, Shuffle | detshuffle) and stage.bufsize > 1:
            return None
        if not isinstance(stage, PipelineStage) and stage is not check_empty:
            return stage
        if isinstance(stage, Curried):
            return stage
    return None


def _is_idle(stage: Any) -> bool:
    """Return whether a stage leaves samples as they come, as a `shuffle` does whose buffer has one of them."""
    return isinstance(stage, Shuffle | detshuffle) and stage.bufsize <= 1


def _seed(settings: Settings, *given: Any) -> int:
    """Return the seed of an order: all ranks must have the same, so without one it is 0, and each epoch has another order."""
    found = [some for some in (settings.seed, *given) if isinstance(some, int) and not isinstance(some, bool)]
    return found[0] if found else 0


def _of_shards(stages: Sequence[Any], reader: TarfileToSamples, settings: Settings) -> Plan:
    """Return the plan of the stages up to the reader: which shards, in which order, for whom."""
    first, notes = stages[0], list[Note]()
    urls, seed, is_endless, is_split, is_own = list(first.urls), None, False, False, False
    if isinstance(first, ResampledShards):
        if first.nshards < 2**31:
            raise ConfigError(f"ResampledShards(nshards={first.nshards}): draws have no end here, give with_epoch() instead")
        seed, is_endless = _seed(settings, first.seed), True
        notes.append(Note(repr(first), "order without end; each shard comes as often as the others", True))
    else:
        seed = None if first.seed is None else _seed(settings, first.seed)
        notes.append(Note(repr(first), "source", True))
    for stage in stages[1:]:
        if stage in SPLITTERS:
            is_split = is_split or getattr(stage, "__name__", "") != "split_by_worker"
            notes.append(Note(name_of(stage), "the engine deals samples to ranks and workers", True))
        elif _is_idle(stage):
            notes.append(Note(name_of(stage), _IDLE, True))
        elif isinstance(stage, Shuffle | detshuffle):
            seed = _seed(settings, stage.seed)
            notes.append(Note(name_of(stage), f"order: seed {seed}, {SHUFFLE_WINDOW} shards are mixed", True))
        elif isinstance(stage, Resampled):
            seed, is_endless = _seed(settings), True
            notes.append(Note(name_of(stage), "order without end; each shard comes as often as the others", True))
        elif stage is non_empty:
            notes.append(Note(name_of(stage), "a source without samples is an error", True))
        else:
            urls, is_own = _left_by(stage, urls), True
            notes.append(Note(name_of(stage), f"ran once, on the list of shards: {len(urls)} are left", False))
    is_split = is_split or (isinstance(first, ResampledShards) and not is_own)
    if seed is not None and not is_split:
        seed += distributed.read_world().rank  # else all ranks would train on the same samples at a time
    notes.append(Note(name_of(reader), "the engine reads, caches and resumes", True))
    return Plan(urls=tuple(urls), reader=reader, seed=seed, is_endless=is_endless, is_alone=not is_split, notes=tuple(notes))


def _left_by(stage: Any, urls: Sequence[str]) -> list[str]:
    """Return the shards that a function of the user leaves.

    Raises:
        ConfigError: It leaves none, or has no end.
    """
    shards = invoke(stage, iter([{"url": url} for url in urls]))
    left = [shard["url"] for shard in itertools.islice(shards, _MOST_SHARDS + 1)]
    if not left:
        raise ConfigError(
            f"{name_of(stage)} leaves none of {len(urls)} shards: give as many shards as there are ranks, or more"
        )
    if len(left) > _MOST_SHARDS:
        raise ConfigError(
            f"{name_of(stage)} leaves more than {_MOST_SHARDS} of {len(urls)} shards, or has no end: leave it out, and give "
            "resampled=True, repeat() or with_epoch()"
        )
    return left


def _of_samples(plan: Plan, stages: Sequence[Any], settings: Settings) -> Plan:
    """Return a plan with the stages behind the reader."""
    each, batch_stages, notes, batch, seed = list[EachSample](), list[EachSample](), list[Note](), plan.batch, plan.seed
    plan = replace(plan, has_empty_check=any(stage is check_empty for stage in stages))
    for place, stage in enumerate(stages):
        if isinstance(stage, EachSample):
            (each if batch is None else batch_stages).append(stage)
            where = "in the engine" if batch is None else "where batches are made"
            notes.append(Note(name_of(stage), f"for each {'sample' if batch is None else 'batch'}, {where}", True))
        elif _is_idle(stage):
            notes.append(Note(name_of(stage), _IDLE, True))
        elif isinstance(stage, Shuffle | detshuffle) and batch is None:
            seed = _seed(settings, plan.seed, stage.seed)
            notes.append(Note(name_of(stage), f"order: seed {seed}, {SHUFFLE_WINDOW} shards are mixed", True))
        elif isinstance(stage, Batched) and batch is None:
            batch = stage
            notes.append(Note(name_of(stage), "steps of the order: the same batches on any number of workers", True))
        elif stage is check_empty:
            notes.append(Note(name_of(stage), "a source without samples is an error", True))
        else:
            rest = stages[place:]
            notes += [
                Note(name_of(some), "as it is, behind the engine; what it holds back is in no state", False) for some in rest
            ]
            return replace(
                plan,
                seed=seed,
                stages=tuple(each),
                batch=batch,
                batch_stages=tuple(batch_stages),
                rest=tuple(rest),
                notes=(*plan.notes, *notes),
            )
    notes_of_all = (*plan.notes, *notes)
    return replace(plan, seed=seed, stages=tuple(each), batch=batch, batch_stages=tuple(batch_stages), notes=notes_of_all)


def check_empty(source: Iterator[Any]) -> Iterator[Any]:
    """Yield the samples of an iteration.

    Raises:
        ValueError: There are none.
    """
    return non_empty(source)


def name_of(stage: Any) -> str:
    """Return the name of a stage in explanations."""
    return repr(stage) if isinstance(stage, PipelineStage) else getattr(stage, "__name__", None) or repr(stage)


def explained(notes: Sequence[Note]) -> str:
    """Return what became of stages, a line each."""
    width = max((len(note.stage) for note in notes), default=0)
    return "\n".join(f"{note.stage:<{width}}  {'→' if note.is_translated else '·'} {note.outcome}" for note in notes)
