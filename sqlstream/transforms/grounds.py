"""What the answer rests on that transforms draw nothing (`draw_free.py`): it is compared before each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sqlstream.transforms.harmless import PLAIN, has_plain_items


class Grounds:
    """What must stay as it was found."""

    def __init__(self) -> None:
        self.same: list[tuple[Callable[[Any], Any], Any, Any]] = []
        """Functions, their argument, and what they return."""
        self.of_plain_type: list[tuple[Callable[[Any], Any], Any]] = []
        """Functions, and their argument, that return a plain value."""
        self.containers: list[object] = []
        """Dicts, lists and sets of plain items."""
        self.absent: list[tuple[Mapping[str, Any], str]] = []
        """Namespaces, and a name that they do not have."""


class DrawFree:
    """Says of transforms, each of which was shown to draw nothing, whether what that rests on still holds."""

    __slots__ = ("_containers", "_lacking", "_of_plain_type", "_same")

    def __init__(self, grounds: Grounds) -> None:
        names_of: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        for values, name in grounds.absent:
            names_of.setdefault(id(values), (values, set()))[1].add(name)
        self._lacking = tuple((values.keys().isdisjoint, tuple(names)) for values, names in names_of.values())
        """Functions that say whether a namespace has none of some names, and these: most of what is compared."""
        self._same = tuple({(get, id(of), id(value)): (get, of, value) for get, of, value in grounds.same}.values())
        """Functions, their argument, and what they must still return; each once, however often code asks for it."""
        self._of_plain_type = tuple({(get, id(of)): (get, of) for get, of in grounds.of_plain_type}.values())
        """Functions, their argument: what they return must still be a plain value."""
        self._containers = tuple({id(container): container for container in grounds.containers}.values())
        """Dicts, lists and sets that must still have nothing but plain items."""

    def holds(self) -> bool:
        """Return whether the transforms still draw nothing."""
        try:
            for has_none, names in self._lacking:
                if not has_none(names):
                    return False
            for get, of, value in self._same:
                if get(of) is not value:
                    return False
            for container in self._containers:
                if not has_plain_items(container):
                    return False
            return all([type(get(of)) in PLAIN for get, of in self._of_plain_type])  # noqa: C419 - a generator costs more
        except (AttributeError, KeyError, RuntimeError, ValueError):  # it is gone, or a thread changes it
            return False
