"""`WebLoader`: a loader of batches with the fluid interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

from torch.utils.data import DataLoader
from torch.utils.data import default_convert as _default_convert

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.compat.webdataset.compat import FluidInterface
from sqlstream.compat.webdataset.pipeline import DataPipeline
from sqlstream.compat.webdataset.stages.all_samples import Batched, Shuffle, Unbatched, default_collation_fn
from sqlstream.compat.webdataset.stages.base import Outcome
from sqlstream.compat.webdataset.stages.in_engine import Collate
from sqlstream.compat.webdataset.translation import Note, Plan, name_of
from sqlstream.errors import ConfigError, SqlStreamError, StateError
from sqlstream.stream.transport.packed_collate import batch_of

_TAKEN = "taken"
"""Key of a loader's state: what it has yielded of an epoch of `with_epoch`."""
default_convert: Callable[[Any], Any] = _default_convert
"""What torch makes of samples that are no batch; it has no types there."""


class WebLoader(DataPipeline, FluidInterface):
    """A loader with the fluid interface: a `StreamingDataLoader`, where the dataset is one of ours.

    `.unbatched().shuffle(n).batched(b)` makes it a loader of batches of b: the order is mixed over all workers already.

    Args:
        args: Those of `torch.utils.data.DataLoader`.
        kw: Those of `torch.utils.data.DataLoader`.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        names = ("dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn")
        self._given = dict(zip(names, args, strict=False)) | kw
        self._dataset = self._given.pop("dataset")
        self._loader: DataLoader[Any] | None = None
        self._taken = self._loaded = 0
        """What was yielded of an epoch; and of the epoch that a state goes on in."""
        super().__init__()
        self._translate()

    def _translate(self) -> None:
        """Make a loader for the stages so far; it is made when it is first asked for."""
        self._translated = list(self.pipeline)
        self._plan = self._streaming = None
        self._rebatched, self._kept = _rebatching(self.pipeline, self._dataset_plan, self._given)
        self._loader = None

    @property
    def _dataset_plan(self) -> Plan | None:
        return self._dataset._plan if isinstance(self._dataset, DataPipeline) else None

    @property
    def loader(self) -> DataLoader[Any]:
        """The loader: a `StreamingDataLoader` where that can be."""
        if self._loader is None:
            self._loader = self._made()
        return self._loader

    def _made(self) -> DataLoader[Any]:
        plan, given = self._dataset_plan, dict(self._given)
        dataset = self._dataset.streaming if plan is not None else None
        batch_size = given.pop("batch_size", 1)
        if plan is None or dataset is None or plan.rest or (plan.batch is not None and batch_size is not None):
            return DataLoader(self._dataset, batch_size=batch_size, **given)
        if wrong := [name for name in ("shuffle", "sampler", "batch_sampler") if given.pop(name, None)]:
            raise ConfigError(
                f"WebLoader({wrong[0]}=…): the order is that of the dataset: leave it out, and say shuffle() there"
            )
        collate, drop_last = given.pop("collate_fn", None), bool(given.pop("drop_last", False))
        if plan.batch is None and self._rebatched is None:
            made = (default_convert if batch_size is None else batch_of) if collate is None else collate
            together = Collate(made, (), plan.value_of, takes_one=batch_size is None)
        else:
            batch = self._rebatched or cast(Batched, plan.batch)
            batch_size, drop_last = batch.batchsize, not batch.partial
            finish = partial(_finished, collate, is_rebatched=self._rebatched is not None)
            together = Collate(batch.collated, plan.batch_stages, plan.value_of, finish=finish)
        view = plan.view(dataset, batch_size=None, drop_last=drop_last, **_seed_of(self.pipeline, plan))
        return StreamingDataLoader(view, batch_size=batch_size, drop_last=drop_last, collate_fn=together, **given)

    # -- iterations ---------------------------------------------------------------------------------------------------

    def _batches(self) -> Iterator[Any]:
        """Yield what the loader gives in an epoch."""
        plan = self._dataset_plan
        try:
            for batch in self.loader:
                if batch is Outcome.STOPPED:
                    return
                if batch is not Outcome.DROPPED:
                    yield batch
        except SqlStreamError as error:
            if plan is None or not plan.ends_with(error):
                raise
        if plan is not None:
            plan.check_kept()

    def iterator1(self) -> Iterator[Any]:
        """Return what an epoch gives, after all stages."""
        made = self._batches()
        for stage in self._kept:
            made = self.invoke(stage, made)
        return made

    @property
    def _epoch(self) -> tuple[int, int]:
        """How many epochs of the dataset one iteration has, and how many batches at most; 0: no limit."""
        if self.repetitions != 1 or not isinstance(self.loader, StreamingDataLoader):
            return self.repetitions, max(0, self.nsamples)
        plan, limit = self._dataset_plan, max(0, self._dataset.nsamples)
        if plan is not None and plan.batch is None and self.loader.batch_size:
            size = self.loader.batch_size
            limit = limit // size if self.loader.drop_last else -(-limit // size)
        return self._dataset.repetitions, limit * max(1, self.loader.num_workers)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch; the next one goes on where this one ends."""
        self._follow()
        repetitions, limit = self._epoch
        self._taken, self._loaded = self._loaded, 0  # an iteration that was left in the middle is over
        if 0 < limit <= self._taken:  # the state is of the end of an epoch, or of a longer one
            self._taken = 0
        num_empty = 0
        for _ in range(repetitions):
            num_empty += 1
            for made in self.iterator1():
                num_empty = 0
                self._taken += 1
                yield made
                if self._taken == limit:
                    self._go_on()
                    return
            if num_empty == 2:  # the first one may be the rest of an epoch, whose samples are dropped
                break
        self._taken = 0

    def _go_on(self) -> None:
        """Begin the next epoch behind what was delivered."""
        self._taken = 0
        if isinstance(self.loader, StreamingDataLoader):
            self.loader.load_state_dict(self.loader.state_dict())

    # -- its state ----------------------------------------------------------------------------------------------------

    def state_dict(self, num_samples: int | None = None) -> dict[str, Any]:
        """Return the state after the last batch that it has yielded; what stages of the loader hold back is lost.

        Raises:
            StateError: The loader is torch's, which has none.
        """
        if num_samples is not None:
            raise StateError("a loader counts what it delivers: leave num_samples out")
        return {"stream": self._stateful_loader().state_dict(), _TAKEN: self._taken}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Go on where a state says."""
        self._stateful_loader().load_state_dict(state["stream"], strict=strict)
        self._taken = self._loaded = int(state[_TAKEN])

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self._stateful_loader().set_epoch(epoch)
        self._taken = self._loaded = 0

    def _stateful_loader(self) -> StreamingDataLoader:
        if not isinstance(self.loader, StreamingDataLoader):
            raise StateError(f"this loader is torch's, which has no state, since a stage runs as it is:\n{self.explain()}")
        return self.loader

    @property
    def streaming(self) -> StreamingDataset | None:
        """The dataset of its loader; None: the loader is torch's."""
        dataset = self.loader.dataset
        return dataset if isinstance(dataset, StreamingDataset) else None

    def _notes(self) -> list[Note]:
        notes = (
            self._dataset._notes()
            if isinstance(self._dataset, DataPipeline)
            else [Note(repr(self._dataset), "as it is", False)]
        )
        is_ours = isinstance(self.loader, StreamingDataLoader)
        what = "StreamingDataLoader: counts batches, and resumes" if is_ours else "torch's DataLoader, as it is"
        notes = [*notes, Note("WebLoader", what, is_ours)]
        merged = len(self.pipeline) - len(self._kept)
        outcome = "the loader makes batches of this size, of an order that is mixed already"
        notes += [Note(name_of(stage), outcome, True) for stage in self.pipeline[:merged]]
        return notes + [Note(name_of(stage), "as it is, in the trainer", False) for stage in self._kept]

    def close(self) -> None:
        """Close the dataset."""
        if isinstance(self._dataset, DataPipeline):
            self._dataset.close()
        super().close()

    def __repr__(self) -> str:
        """Return the dataset, and the stages behind the loader."""
        return f"WebLoader({', '.join([repr(self._dataset), *map(name_of, self.pipeline)])})"


def _finished(collate: Callable[[Any], Any] | None, made: Any, *, is_rebatched: bool) -> Any:
    """Return what a loader makes of a batch of its dataset; a function of its own takes it as it is.

    torch makes a list of a tuple as a loader converts it; a batch that was made behind the loader stays what it is.
    """
    if collate is not None:
        return collate(made)
    converted = default_convert(made)
    return type(made)(converted) if is_rebatched and type(made) is tuple else converted


def _seed_of(stages: Sequence[Any], plan: Plan) -> dict[str, Any]:
    """Return the seed that a `shuffle` behind the loader asks for, where the dataset has none."""
    is_shuffled = any(isinstance(stage, Shuffle) for stage in stages[:2])
    return {"shuffle_seed": 0} if is_shuffled and plan.seed is None else {}


def _rebatching(stages: Sequence[Any], plan: Plan | None, given: Mapping[str, Any]) -> tuple[Batched | None, list[Any]]:
    """Return the batches that `.unbatched().shuffle(n).batched(b)` makes of a loader, and the stages that are left."""
    kinds = [stage for stage in stages if not isinstance(stage, Shuffle)][:2]
    at = len(stages[: 3 if len(stages) > 1 and isinstance(stages[1], Shuffle) else 2])
    can_be = (
        plan is not None
        and not plan.rest
        and not plan.batch_stages
        and plan.batch is not None
        and plan.batch.collation_fn is default_collation_fn
        and given.get("batch_size", 1) is None
        and given.get("collate_fn") is None
        and len(kinds) == 2
        and at <= len(stages)
        and isinstance(stages[0], Unbatched)
        and isinstance(stages[at - 1], Batched)
    )
    return (stages[at - 1], list(stages[at:])) if can_be else (None, list(stages))
