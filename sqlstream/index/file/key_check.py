"""Finds sample keys that are missing or come twice, by 8 bytes a row in a file: hashes, then SQL for those that look equal."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.index.types.models import ROW, Column, quote
from sqlstream.index.types.values import decoder, has_several_forms
from sqlstream.storage.members.spilled import Spilled, are_unique

Fetch = Callable[[Sequence[int]], list[tuple[int, Any]]]


class KeyCheck:
    """Collects the keys of rows 0, 1, 2, … while they are written.

    Args:
        column: The key column's logical name.
        folder: Where hashes are written if they are many.
    """

    def __init__(self, column: str, folder: Path) -> None:
        self.column = column
        self._folder = folder
        self._hashes = Spilled("q", folder)
        self._num_rows = 0
        self._first_null: int | None = None

    def add(self, keys: Sequence[Any] | None, num_rows: int) -> None:
        """Take the stored keys of the next rows; None when these rows have no key column at all."""
        if self._first_null is None and (keys is None or None in keys):
            self._first_null = self._num_rows + (0 if keys is None else list(keys).index(None))
        if keys is not None and self._first_null is None:
            self._hashes.last.extend(map(hash, keys))
            self._hashes.spill()
        self._num_rows += num_rows

    def pass_over(self, num_rows: int) -> None:
        """Count rows whose keys are not looked at."""
        self._num_rows += num_rows

    def problem(self, connection: sqlite3.Connection, key: Column | None) -> str | None:
        """Return what is wrong with the keys, or None.

        Args:
            connection: Holds the table `rows` with these keys.
            key: The key column in it, with its final type; None: there is none.
        """
        if key is None:
            return no_key(self.column)
        if key.is_content:
            cure = f"source_options={{'index_members': [{self.column!r}]}}"
            return f"the index column {self.column!r} is content of the shards, which no row has: {cure} makes values of it"
        if self._first_null is not None:
            return f"row {self._first_null} has no value in the index column {self.column!r}"
        name_of, physical, hashes = _namer(key), quote(key.physical), self._hashes
        if name_of is not None and len(hashes):
            hashes = Spilled("q", self._folder)
            for (stored,) in connection.execute(f"SELECT {physical} FROM rows ORDER BY {ROW}"):
                hashes.last.append(hash(name_of(stored)))
                hashes.spill()

        def fetch(rows: Sequence[int]) -> list[tuple[int, Any]]:
            marks = ", ".join("?" * len(rows))
            found = connection.execute(f"SELECT {ROW}, {physical} FROM rows WHERE {ROW} IN ({marks})", rows).fetchall()
            return found if name_of is None else [(row, name_of(stored)) for row, stored in found]

        twice = None if are_unique(hashes) else find_duplicate(hashes[:], fetch)
        return (
            None
            if twice is None
            else f"rows {twice[0]} and {twice[1]} have the same value {twice[2]!r} in the index column {self.column!r}"
        )


def _namer(key: Column) -> Callable[[Any], str] | None:
    """Return what gives a stored key as samples are named by it, None where equal keys are stored as equal values.

    Files that have a column in another unit, scale or number type store one value in another form.
    """
    if not has_several_forms(key.field):
        return None
    decode = decoder(key)
    return str if decode is None else lambda stored: str(decode(stored))


def no_key(column: str) -> str:
    """Return what is wrong with a table without the key column."""
    return f"it has no index column {column!r}"


def find_duplicate(hashes: np.ndarray, fetch: Fetch) -> tuple[int, int, Any] | None:
    """Return two rows with one key, and the key; None if all differ.

    Args:
        hashes: A 64-bit hash of the key of each row.
        fetch: Returns (row, key) of the rows asked for.
    """
    order = np.argsort(hashes, kind="stable")
    equal = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    for at in equal:  # neighbours in a run of equal hashes: a run of two keys that alternate is found by its third row
        run = order[at : at + 1000][hashes[order[at : at + 1000]] == hashes[order[at]]]
        seen: dict[Any, int] = {}
        for row, key in sorted(fetch([int(r) for r in run])):
            if key in seen:
                return seen[key], row, key
            seen[key] = row
    return None
