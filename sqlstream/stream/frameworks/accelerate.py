"""Hugging Face Accelerate: a prepared StreamingDataLoader gives each row once, and what Accelerate shards again is refused.

`accelerator.prepare(loader)` deals the batches of a DataLoader out to the ranks. A StreamingDataset has done so already: each
rank would train on a part of its part, without an error. So a StreamingDataLoader reports itself as prepared, which Accelerate
asks first, and does what Accelerate would do: it puts batches on the device, and marks the last one for gradient accumulation.
A plain DataLoader cannot do so: a dataset that one of Accelerate's own shards iterates raises an error with the cure.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from sqlstream.errors import ConfigError
from sqlstream.order import Tail
from sqlstream.stream.run.schedule import Schedule

_SHARDING = {
    "accelerate.data_loader": ("IterableDatasetShard", "DataLoaderDispatcher"),
    "transformers.trainer_pt_utils": ("IterableDatasetShard",),
}
"""Classes that deal a dataset's samples out to ranks, by their module."""


def check_not_sharded_again(schedule: Schedule) -> None:
    """Raise ConfigError if a caller deals out to several ranks what this dataset has dealt out to them.

    The stack is searched, since such a class keeps the dataset and the dataset does not know the class. A forked worker has the
    stack of its trainer; a spawned one is made from a pickle that is made below it.

    Raises:
        ConfigError: There is such a caller, and several ranks.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = _SHARDING.get(frame.f_globals.get("__name__", ""))
        if names is not None and (name := type(frame.f_locals.get("self")).__name__) in names:
            world_size = schedule.layout.whole.world_size
            if world_size > 1:
                raise ConfigError(
                    f"{name} ({frame.f_globals['__name__'].partition('.')[0]}) deals out to {world_size} ranks what this "
                    f"StreamingDataset has dealt out to them already: 1/{world_size} of the rows would be left. Give "
                    "accelerator.prepare() a sqlstream.StreamingDataLoader instead of a DataLoader, or leave the loader out of "
                    "prepare() (docs/frameworks.md)"
                )
            return
        frame = frame.f_back  # type: ignore[assignment]  # None at the end


def is_copied_by_accelerate() -> bool:
    """Return whether Accelerate wants the value that is asked for: `skip_first_batches` makes a plain DataLoader of them."""
    return sys._getframe(2).f_globals.get("__name__") == "accelerate.data_loader"


class Destination(NamedTuple):
    """The device on which Accelerate wants batches."""

    device: Any
    """None: batches stay where they are."""
    non_blocking: bool
    keeps_state: bool = False
    """The state of a loader is saved and loaded with that of the accelerator."""


def destination_of(accelerator: Any, device_placement: bool | None, schedule: Schedule) -> Destination:
    """Return what an Accelerator that prepares a loader wants of it.

    Raises:
        ConfigError: Its options contradict those of the dataset.
    """
    world_size = schedule.layout.whole.world_size
    if accelerator.num_processes not in (1, world_size):
        raise ConfigError(
            f"Accelerate runs {accelerator.num_processes} processes, but the dataset was told world_size={world_size}: leave "
            "world= out, then each process takes its own part"
        )
    if accelerator.split_batches and accelerator.num_processes > 1:
        raise ConfigError(
            "Accelerate's split_batches=True cuts each batch into one part for each process, but batch_size of a "
            "StreamingDataLoader is that of one process: leave split_batches out, and divide batch_size by their number"
        )
    if device_placement is None:
        device_placement = accelerator.device_placement
    return Destination(
        accelerator.device if device_placement else None,
        bool(accelerator.non_blocking),
        keeps_state=bool(getattr(accelerator, "use_stateful_dataloader", False)),
    )


class AcceleratedBatches:
    """A loader's batches, each on its device, taken one ahead: Accelerate steps the optimizer at the last batch in any case.

    A loop that is left ends at once, with its workers, and Accelerate forgets it: the generator does not refer to this object.

    Args:
        batches: Torch's iterator: it gives each batch with its position in the run.
        loader: The loader; Accelerate reads its `end_of_dataloader` and `remainder`, which are set here.
        place: The device of the batches.
        remainder: Samples of the last global batch without its repeats; 0: it is whole; -1: not known.
    """

    def __init__(self, batches: Any, loader: Any, place: Destination, remainder: int) -> None:
        self._batches = batches
        self._ahead = _one_ahead(batches, loader, place, remainder)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._ahead)

    def __len__(self) -> int:
        return len(self._batches)

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of torch's iterator."""
        if name in ("_batches", "_ahead"):
            raise AttributeError(name)
        return getattr(self._batches, name)


def _one_ahead(batches: Any, loader: Any, place: Destination, remainder: int) -> Iterator[Any]:
    state = importlib.import_module("accelerate.state").GradientState()
    send: Callable[..., Any] = importlib.import_module("accelerate.utils").send_to_device
    nothing: Any = object()
    loader.end_of_dataloader, loader.remainder = False, remainder
    state._add_dataloader(loader)
    try:
        following: Any = next(batches, nothing)
        while following is not nothing:
            batch, position = following
            if place.device is not None:
                batch = send(batch, place.device, non_blocking=place.non_blocking)
            following = next(batches, nothing)
            loader.end_of_dataloader = following is nothing
            yield batch, position
    finally:
        state._remove_dataloader(loader)


def remainder_of(schedule: Schedule) -> int:
    """Return how many samples the last global batch has without its repeats, as `gather_for_metrics` wants it."""
    steps = schedule.steps
    if steps.batches is not None:
        return 0  # all are whole
    if steps.num_canonical_nodes > 1 or schedule.is_endless or not schedule.has_end or steps.gives_several:
        return -1  # repeats are not at its end
    return 0 if steps.tail is Tail.DROP else schedule.num_positions % schedule.step_size
