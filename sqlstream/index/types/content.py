"""What a table holds, and which of its rows are selected, wherever it lies: what a state compares.

Two indexes of equal content give the same sample for each row number, so a state of one is a state of the other. Path, server,
size and time stamp of the source are no part of it: they are part of the name of the index file, which is built again for each.
"""

from __future__ import annotations

import marshal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from json import dumps
from typing import Any, NamedTuple

_MAX_QUERY = 1000  # characters that a state keeps of a query; arbitrary, it is read by a person
_MARSHAL_VERSION = 2  # flat values, floats as 8 bytes: no later version of Python may write it otherwise, see tests/index
_MARSHAL_HEADER = 5  # type and length of a list: what follows is the same in whatever batches the values come


class ColumnType(NamedTuple):
    """A column, as `index info` shows it."""

    name: str
    type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """Columns, rows and values of a table, and what selects rows of it."""

    columns: tuple[ColumnType, ...]
    """In their order."""
    num_rows: int
    values: str
    """Digest of the values of all rows in their order, paths and URLs as the table has them; of a lazy index of its footers.
    Where content stays in place, of the other values and of footers, behind the word `in_place`."""
    query: str | None = None
    """What selects rows, in SQL; of a long one the start, and a digest."""
    engine: str | None = None
    """In whose dialect the query is; None: there is no query."""
    max_size: int | None = None
    """Only the first so many rows that the query gives."""
    chunk_rows: int | None = None
    """`lazy_index_chunk_size`, which the order goes by; None: the index has the rows."""

    @classmethod
    def from_dict(cls, found: object) -> Content:
        """Return the content that `to_dict` gave, also after JSON.

        Raises:
            ValueError: It is none.
        """
        if not isinstance(found, Mapping) or set(found) != {field.name for field in fields(cls)}:
            raise ValueError(f"no dict of {', '.join(field.name for field in fields(cls))}")
        columns = found["columns"]
        try:
            typed = tuple(ColumnType(str(name), str(kind)) for name, kind in columns)
        except (TypeError, ValueError):
            raise ValueError(f"no content: its columns are {columns!r}, and no names and types") from None
        return cls(**{**found, "columns": typed})

    def to_dict(self) -> dict[str, object]:
        """Return it as plain values."""
        return {**asdict(self), "columns": [list(column) for column in self.columns]}

    @property
    def is_in_place(self) -> bool:
        """Some of its columns stay in their files: `values` goes by the footers of these, too."""
        return " " in self.values

    def differences(self, other: Content) -> list[str]:
        """Return what `other` has otherwise than this one, in words; nothing if they are equal."""
        found = [*_different_columns(self.columns, other.columns)]
        if self.num_rows != other.num_rows:
            found.append(f"the number of rows (it was {self.num_rows}, and is {other.num_rows})")
        if self.chunk_rows != other.chunk_rows:
            found.append(f"lazy_index_chunk_size (it was {self.chunk_rows}, and is {other.chunk_rows})")
        if not found and self.values != other.values:
            what = (
                "the values of the rows, or their order"
                if self.chunk_rows is None
                else "the footers of its Parquet files, or its shards"
            )
            found.append(f"{what} (it has as many rows, and the same columns)")
        for name, shown in (("query", "the query"), ("engine", "sql_engine"), ("max_size", "max_size")):
            theirs, ours = getattr(self, name), getattr(other, name)
            if theirs != ours:
                found.append(f"{shown} (it was {theirs!r}, and is {ours!r})")
        return found


def named_query(query: str | None) -> str | None:
    """Return a query as a state has it: a long one is told apart by its digest."""
    if query is None or len(query) <= _MAX_QUERY:
        return query
    return f"{query[:100]}… ({len(query)} characters, {blake2b(query.encode(errors='replace'), digest_size=16).hexdigest()})"


def _different_columns(theirs: Sequence[ColumnType], ours: Sequence[ColumnType]) -> list[str]:
    before, now = dict(theirs), dict(ours)
    found = [f"column {name!r} (it is gone)" for name in before if name not in now]
    found += [f"column {name!r} (it is new)" for name in now if name not in before]
    both = [name for name in before if name in now]
    found += [f"column {name!r} (it was {before[name]}, and is {now[name]})" for name in both if before[name] != now[name]]
    return found or ([] if list(before) == list(now) else ["the order of its columns"])


class RunningContent:
    """The digest of the values of a table, made as its rows come, one source file after the other.

    Each file has a digest of its own, and the digest of the table goes on from that of the files before it: an index that grows
    needs no old row for it.

    Args:
        before: The digest of the files that are there already; None: it is not known, and never will be.
    """

    def __init__(self, before: str | None = "") -> None:
        self._before = before
        self._part: Any = None
        """The hash of the file begun last."""
        self._stands_for_rows = False

    def begin(self, names: Sequence[str]) -> None:
        """Begin the next file, with these columns."""
        self._end()
        self._part = blake2b(dumps(list(names)).encode(), digest_size=16)
        self._stands_for_rows = False

    def add(self, names: Sequence[str], values: list[Any]) -> None:
        """Take in stored values, row by row."""
        if self._part is None:  # a table that is computed has no files
            self.begin(names)
        self._part.update(memoryview(marshal.dumps(values, _MARSHAL_VERSION))[_MARSHAL_HEADER:])

    def add_elsewhere(self, content: bytes) -> None:
        """Take in what stands for the rows of the file, which stay where they are."""
        self._part.update(content)
        self._stands_for_rows = True

    def pass_over(self) -> None:
        """Note that the file has rows which are not taken in; without something that stands for them nothing is known."""
        if not self._stands_for_rows:
            self._before = None

    def digest(self) -> str | None:
        """Return the digest of all; None: it is not known."""
        self._end()
        return self._before

    def _end(self) -> None:
        if self._part is not None and self._before is not None:
            self._before = blake2b(self._before.encode() + self._part.digest(), digest_size=16).hexdigest()
        self._part = None
