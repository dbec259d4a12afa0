"""Rows that are Python dicts, as JSON files give them: types that hold for the whole file, then Arrow batches.

Arrow's own JSON reader takes types from the first block, reads dates out of text, and gives every object the keys of all
others. Here text stays text, and lists and objects are kept as JSON, so they come back exactly as they were.
"""

from __future__ import annotations

import json
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn

import pyarrow as pa

from sqlstream.errors import SchemaError, SourceError
from sqlstream.index.types.models import ENCODING, JSON
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.values import MAX_EXACT_INTEGER

logger = logging.getLogger(__name__)

MAYBE_HUGE = re.compile(r"[0-9.][eE]\+?[0-9]{3}|[0-9]{300}")
"""What every text has that holds a number too large for a float."""
CURE = "If it was cut short while it was written or copied, write it again"
_ROWS = 4096
_NONE = type(None)
_NO_UNICODE = "holds half a surrogate pair, which is no Unicode: mend it"


class Record(NamedTuple):
    """One row and where it is."""

    place: str
    """For errors: 'line 3', 'element 3'."""
    values: dict[str, Any]
    huge: tuple[str, ...] = ()
    """Numbers in it that no float holds, as they are written."""

    def holds_infinity(self, name: str) -> bool:
        """Return whether the value of a column is infinite, or has a part that is."""
        value = self.values[name]
        return not isinstance(value, str) and "Infinity" in json.dumps(value)


class JsonRecords(ABC):
    """Base of the JSON formats; a subclass says how to walk through a file."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._schema: pa.Schema = pa.schema([])
        self.huge: list[str] = []
        """Numbers of the record under way that no float holds, as they are written."""

    @abstractmethod
    def records(self) -> Iterator[Record]:
        """Yield the rows in order.

        Raises:
            SourceError: Names the place that is no JSON, or no object.
        """

    def schema(self) -> pa.Schema:
        """Return the columns; reads the file once."""
        columns: dict[str, _Kinds] = {}
        huge: list[Record] = []
        for rows in batched(self.records(), _ROWS):
            huge += [row for row in rows if row.huge and any(map(row.holds_infinity, row.values))]  # else a key came twice
            for name in dict.fromkeys(chain.from_iterable(row.values for row in rows)):
                if name not in columns and _has_surrogates(name):
                    place = next(row.place for row in rows if name in row.values)
                    raise SourceError(f"{self._name}, {place}: the key {name!r} {_NO_UNICODE}")
                columns.setdefault(name, _Kinds()).add([row.values.get(name) for row in rows], rows)
        self._schema = pa.schema([self._decide(name, kinds) for name, kinds in columns.items()])
        if huge:
            first, count = huge[0], sum(len(row.huge) for row in huge)
            logger.warning(
                "%s, %s: column %r has %.40s, which no float holds, so this is infinite (%d more values are too large)",
                self._name, first.place, next(filter(first.holds_infinity, first.values)), first.huge[0], count - 1,
            )  # fmt: skip
        return self._schema

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows; `schema` comes first."""
        fields = [self._schema.field(name) for name in names]
        for rows in batched(self.records(), _ROWS):
            arrays = [self._array(field, [row.values.get(field.name) for row in rows], rows) for field in fields]
            yield pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))

    def parse(self, text: str) -> Any:
        """Return the value of a JSON text; what no float holds is noted for `record`."""
        return json.loads(text, parse_float=self.parse_float) if MAYBE_HUGE.search(text) else json.loads(text)

    def parse_float(self, text: str) -> float:
        """Return a number; what no float holds is noted for `record`."""
        number = float(text)
        if math.isinf(number):
            self.huge.append(text)
        return number

    def record(self, value: object, place: str) -> Record:
        """Return the JSON value that was parsed last as a row.

        Raises:
            SourceError: It is no object.
        """
        if not isinstance(value, dict):
            raise SourceError(f"{self._name}, {place}: a JSON {type(value).__name__}, not an object: give one object a row")
        huge = tuple(self.huge)
        self.huge.clear()
        return Record(place, value, huge)

    def _array(self, field: pa.Field[Any], values: list[Any], rows: Sequence[Record]) -> Any:
        if field.metadata:
            values = [None if v is None else json.dumps(v) for v in values]
        load_pandas()
        try:
            return pa.array(values, field.type)
        except UnicodeEncodeError:
            at = next(i for i, v in enumerate(values) if isinstance(v, str) and _has_surrogates(v))
            raise SourceError(f"{self._name}, {rows[at].place}: the text in {field.name!r} {_NO_UNICODE}") from None

    def _decide(self, name: str, kinds: _Kinds) -> pa.Field[Any]:
        seen = set(kinds.first) - {_NONE}
        if seen & {list, dict}:
            return pa.field(name, pa.string(), metadata={ENCODING: JSON})
        if seen == {int}:
            if kinds.least >= -(2**63) and kinds.most < 2**63:
                return pa.field(name, pa.int64())
            if kinds.least >= 0 and kinds.most < 2**64:
                return pa.field(name, pa.uint64())
            raise SchemaError(f"{self._name}: column {name!r} holds integers that 64 bits cannot: write them as text")
        if seen == {int, float} and max(-kinds.least, kinds.most) > MAX_EXACT_INTEGER:
            self._refuse(name, kinds, "integers above 2^53 would lose digits beside numbers with a point")
        if seen <= {int, float} and seen:
            return pa.field(name, pa.float64())
        if len(seen) > 1:
            self._refuse(name, kinds, "a column has one type")
        return pa.field(name, {str: pa.string(), bool: pa.bool_()}[seen.pop()] if seen else pa.null())

    def _refuse(self, name: str, kinds: _Kinds, why: str) -> NoReturn:
        found = " and ".join(f"{kind.__name__} ({place})" for kind, place in kinds.first.items() if kind is not _NONE)
        raise SchemaError(f"{self._name}: column {name!r} holds {found}; {why}: write all its values as text, or as one type")


class _Kinds:
    """What a column's values are so far."""

    def __init__(self) -> None:
        self.first: dict[type, str] = {}
        """Python type → place of its first value."""
        self.least, self.most = 0, 0

    def add(self, values: list[Any], rows: Sequence[Record]) -> None:
        kinds = dict.fromkeys(map(type, values)).keys()  # in order of appearance
        for kind in [kind for kind in kinds if kind not in self.first]:
            self.first[kind] = next(row.place for row, value in zip(rows, values, strict=True) if type(value) is kind)
        if int in kinds:
            whole = values if len(kinds) == 1 else [value for value in values if type(value) is int]
            self.least, self.most = min(self.least, *whole), max(self.most, *whole)


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def batched(rows: Iterable[Record], count: int) -> Iterator[list[Record]]:
    """Yield lists of `count` rows, the last one shorter."""
    iterator = iter(rows)
    while batch := list(islice(iterator, count)):
        yield batch
