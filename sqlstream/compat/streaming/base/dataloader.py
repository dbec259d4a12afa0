"""MosaicML's `StreamingDataLoader`: torch's parameters, in torch's order, over our loader."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import DataLoader

from sqlstream.compat.streaming.base.dataset import StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.loader import StreamingDataLoader as OurLoader

_UNSET = {"shuffle": (None, False), "sampler": (None,), "batch_sampler": (None,), "in_order": (True,)}
"""Parameters of torch's that a stream does not have, and what they are when nothing is asked for."""


class StreamingDataLoader(OurLoader):
    """Batches of a StreamingDataset, with a state after each of them.

    Args:
        args: Parameters of torch's DataLoader.
        kwargs: The same, by name.

    Raises:
        ConfigError: The order is given twice, or the dataset has another batch size.
    """

    dataset: StreamingDataset

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = dict(inspect.signature(DataLoader).bind(*args, **kwargs).arguments)
        for name, unset in _UNSET.items():
            if (value := given.pop(name, unset[0])) not in unset:
                raise ConfigError(
                    f"{name}={value!r}: the order is the dataset's; give StreamingDataset(shuffle=…), and leave it out"
                )
        if not isinstance(given["dataset"], StreamingDataset):
            raise ConfigError(
                f"StreamingDataLoader takes a StreamingDataset, not {type(given['dataset']).__name__}: use torch's DataLoader"
            )
        super().__init__(**{"batch_size": 1, **given})

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the run after the last batch that this loader has delivered."""
        return self.dataset.state_after(None)

    def load_state_dict(self, obj: dict[str, Any]) -> None:  # type: ignore[override]  # MosaicML's signature
        """Make the next iteration go on where a state says, on any number of ranks and workers."""
        self.dataset.load_state_dict(obj)
