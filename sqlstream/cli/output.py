"""Text for people and JSON for programs.

A table library was not taken: two kinds of plain tables need twenty lines, and `cache stats` has to start at once.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any


def print_json(document: object) -> None:
    """Print one JSON document; dataclasses become objects, what JSON does not know becomes text."""
    json.dump(document, sys.stdout, indent=2, default=_as_json)
    print()


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Print lines of name and value."""
    facts = list(facts)
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
        print(f"{name:<{width}}  {printable(value)}".rstrip())


def print_table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows under their column names; numbers stand to the right."""
    values = [list(row) for row in rows]
    cells = [[printable(name) for name in names], *([printable(_text(value)) for value in row] for row in values)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(names))]
    to_right = [bool(values) and all(isinstance(row[i], int | float | Size) for row in values) for i in range(len(names))]
    for row in cells:
        aligned = (cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, to_right, strict=True))
        print("  ".join(aligned).rstrip())


def print_section(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table below an empty line, and nothing where it has no rows."""
    if rows := list(rows):
        print()
        print_table(names, rows)


@dataclasses.dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes that prints as people read it."""

    num_bytes: int

    def __str__(self) -> str:
        """Return e.g. `1.5 GB`; units are powers of 1024, as limits are written."""
        value, unit = float(self.num_bytes), "B"
        for larger in ("KB", "MB", "GB", "TB"):
            if abs(value) < 1024:
                break
            value, unit = value / 1024, larger
        return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def moment(seconds: float) -> str:
    """Return a time of the Unix clock as local date and time."""
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def percent(part: float, whole: float) -> str:
    """Return e.g. `83 %`; nothing of nothing is 0 %."""
    return f"{100 * part / whole if whole else 0:.0f} %"


def printable(text: str) -> str:
    """Return `text` on one line, with control characters escaped: it may come from a hostile index."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _text(value: object) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _as_json(value: Any) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value.hex() if isinstance(value, bytes) else str(value)
