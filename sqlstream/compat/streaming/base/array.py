"""Access by a number, or by several in any nesting, as MosaicML's datasets have it."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from sqlstream.errors import ConfigError


class Array:
    """Has items by number; `array[[1, [2, -1]]]`, `array[1:5]` and `array[np.array(…)]` are lists of them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of items."""

    @abstractmethod
    def get_item(self, idx: int) -> Any:
        """Return an item by its number, which is not negative."""

    def __getitem__(self, at: Any) -> Any:
        """Return the item of a number, negative ones from the end, or a list of the items of several.

        Raises:
            IndexError: There is no such item.
            ConfigError: `at` is no number, slice, list or array.
        """
        if isinstance(at, int | np.integer):
            number = int(at)
            place = number + self.size if number < 0 else number
            if not 0 <= place < self.size:
                raise IndexError(f"index {number} is out of range: there are {self.size} samples")
            return self.get_item(place)
        if isinstance(at, slice):
            return [self[place] for place in range(*at.indices(self.size))]
        if isinstance(at, list | np.ndarray):
            return [self[item] for item in at]
        raise ConfigError(
            f"[{at!r}]: give a whole number, a slice, or a list or array of whole numbers, not {type(at).__name__}"
        )
