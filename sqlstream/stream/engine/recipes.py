"""The recipes of several streams, each made when its first row is wanted: a stream that is not drawn costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from sqlstream.stream.engine.slots import Recipe


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
