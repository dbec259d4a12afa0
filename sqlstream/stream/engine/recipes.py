"""The recipes of several streams, each made when its first row is wanted: a stream that is not drawn costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sqlstream.errors import ConfigError
from sqlstream.stream.engine.slots import Recipe
from sqlstream.world import World

MOST_WITHOUT = 1 << 14
"""Positions one after the other without a sample that say nothing yet, in an iteration that has no end. Arbitrary: a transform
may collect many rows, and where there are few, a worker may miss the ones that give a sample for long."""


class Recipes:
    """Recipes by number of their stream.

    Args:
        makers: What makes each.
    """

    def __init__(self, makers: Sequence[Callable[[], Recipe]]) -> None:
        self._makers = tuple(makers)
        self.made: list[Recipe | None] = [None] * len(makers)
        """Those that were asked for; None: not yet."""

    def __getitem__(self, stream: int) -> Recipe:
        """Return the recipe of a stream."""
        recipe = self.made[stream]
        if recipe is None:
            recipe = self.made[stream] = self._makers[stream]()
        return recipe

    def __len__(self) -> int:
        """Return the number of streams."""
        return len(self._makers)

    def known(self) -> Iterator[tuple[int, Recipe]]:
        """Yield the recipes that are made, with the number of their stream."""
        for stream, recipe in enumerate(self.made):
            if recipe is not None:
                yield stream, recipe

    def check_given(self, num_without: int, world: World) -> None:
        """Raise ConfigError if so many positions one after the other have given no sample that none can be hoped for.

        Args:
            num_without: The positions.
            world: The process.
        """
        lengths = [self[stream].rows.known_length for stream in range(len(self))]
        num_rows = sum(length or 0 for length in lengths)
        if None in lengths or num_without <= max(MOST_WITHOUT, num_rows):
            return
        raise ConfigError(
            f"{num_without} positions one after the other have given no sample to rank {world.rank}, worker {world.worker}, "
            f"which would go on without end in search of one; there are {num_rows} rows. See what transforms, "
            "predownload_transforms and on_error='skip' leave out, and leave rows out with where= instead"
        )
