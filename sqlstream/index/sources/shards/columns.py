"""What a shard says of its samples, in columns: objects for each of a million parts take ten times the memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sqlstream.index.types import arrays
from sqlstream.storage.members import places
from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import SamplePart

_BLOCK = 1 << 12
"""Samples that are made at a time. Arbitrary."""
_NEW_PART = partial(tuple.__new__, SamplePart)  # without the checks of a call, which take as long as the rest

Column: TypeAlias = npt.NDArray[Any]
"""Whole numbers, of as many bytes as they need."""


class Texts(Sequence[str]):
    """Texts, in memory as Arrow has them.

    Args:
        chunks: Them.
    """

    def __init__(self, chunks: Sequence[pa.Array[Any]]) -> None:
        self._texts = pa.chunked_array(chunks, pa.string())

    @classmethod
    def of(cls, texts: Iterable[str]) -> Texts:
        """Return these texts, which are taken one by one."""
        return cls([*_chunks(texts)])

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        for chunk in self._texts.chunks:
            yield from chunk.to_pylist()  # type: ignore[misc]  # none is NULL

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Return one of them, or some."""
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        found: str = self._texts[at].as_py()
        return found

    def column(self, start: int, num_rows: int) -> pa.Array[Any]:
        """Return some of them as Arrow has them."""
        return self._texts.slice(start, num_rows).combine_chunks()


def _chunks(texts: Iterable[str]) -> Iterator[pa.Array[Any]]:
    some: list[str] = []
    for text in texts:
        some.append(text)
        if len(some) == _BLOCK:
            yield arrays.texts(some)
            some.clear()
    if some:
        yield arrays.texts(some)


class SampleParts(Sequence[Mapping[str, SamplePart]]):
    """The parts of samples, by the name of their column; the `column` of a part is the place of that in `names`.

    Args:
        names: Columns, in the order of their first appearance.
        starts: The first part of each sample, and the end: [num_samples + 1].
        columns: The column of each part, as its place in `names`: [num_parts].
        offsets: Its first byte: [num_parts].
        sizes: Its bytes: [num_parts].
        facts: What else its format needs, each as a column: [num_parts].
    """

    def __init__(
        self,
        names: Sequence[str],
        starts: Column,
        columns: Column,
        offsets: Column,
        sizes: Column,
        facts: Sequence[Column] = (),
    ) -> None:
        self.names = tuple(names)
        self._starts, self._columns, self._offsets, self._sizes, self._facts = starts, columns, offsets, sizes, tuple(facts)

    @classmethod
    def of(cls, samples: Iterable[Mapping[str, SamplePart]]) -> SampleParts:
        """Return the parts of samples, all of which have as many facts."""
        builder: PartsBuilder | None = None
        num_empty = 0
        for parts in samples:
            num_empty += not parts and builder is None
            for name, part in parts.items():
                if builder is None:
                    builder = PartsBuilder("Q" * len(part.facts))
                    for _ in range(num_empty):
                        builder.end_sample()
                builder.add(name, part.offset, part.size, *part.facts)
            if builder is not None:
                builder.end_sample()
        if builder is None:
            nothing = np.zeros(0, np.int64)  # [0]
            return cls((), np.zeros(num_empty + 1, np.int64), nothing, nothing, nothing)
        return builder.built()

    @classmethod
    def single(cls, name: str, offsets: Column, sizes: Column) -> SampleParts:
        """Return the parts of samples that have one each, all of one column."""
        return cls([name], np.arange(len(offsets) + 1), np.zeros(len(offsets), np.uint8), offsets, sizes)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __iter__(self) -> Iterator[dict[str, SamplePart]]:
        for start in range(0, len(self), _BLOCK):
            yield from self[start : start + _BLOCK]

    @overload
    def __getitem__(self, at: int) -> dict[str, SamplePart]: ...

    @overload
    def __getitem__(self, at: slice) -> list[dict[str, SamplePart]]: ...

    def __getitem__(self, at: int | slice) -> dict[str, SamplePart] | list[dict[str, SamplePart]]:
        """Return the parts of a sample, or of some that follow each other."""
        if not isinstance(at, slice):
            number = range(len(self))[at]
            return self[number : number + 1][0]
        start, stop, step = at.indices(len(self))
        assert step == 1, "samples are taken in their order"
        names = self.names
        return [{names[part[0]]: part for part in parts} for parts in self._parts(start, stop, np.arange(len(names)))]

    def column_bytes(self) -> dict[str, int]:
        """Return the bytes of all parts, by their columns; a part of no bytes counts as one."""
        found = {}
        for number, name in enumerate(self.names):
            sizes = self._sizes[self._columns == number]  # [parts]
            found[name] = int(sizes.sum(dtype=np.int64)) + int(np.count_nonzero(sizes == 0))
        return found

    def sizes(self, name: str, fact: int | None, start: int, stop: int) -> pa.Array[Any]:
        """Return the size of one part of each of some samples, NULL where it is not there.

        Args:
            name: Its column.
            fact: Which fact of it is the size; None: its bytes are.
            start: The first of the samples.
            stop: Their end.
        """
        ends = self._starts[start : stop + 1]  # [n + 1]
        some = slice(int(ends[0]), int(ends[-1]))
        found = np.flatnonzero(self._columns[some] == self.names.index(name)) + some.start  # [found]
        rows = np.searchsorted(ends, found, side="right") - 1  # [found]
        values, is_missing = np.zeros(len(ends) - 1, np.int64), np.ones(len(ends) - 1, bool)  # [n] each
        values[rows] = (self._sizes if fact is None else self._facts[fact])[found]
        is_missing[rows] = False
        return arrays.numbers(values, is_missing)

    def spans(self) -> Iterator[list[Span]]:
        """Yield the bytes of the parts of each sample, but of those that have none."""
        for start in range(0, len(self), _BLOCK):
            ends = self._starts[start : start + _BLOCK + 1]  # [n + 1]
            some = slice(int(ends[0]), int(ends[-1]))
            bounds, offsets, sizes = (ends - ends[0]).tolist(), self._offsets[some].astype(np.int64), self._sizes[some]
            spans = [*zip(offsets.tolist(), (offsets + sizes).tolist(), strict=True)]
            if sizes.all():
                yield from [spans[first:last] for first, last in pairwise(bounds)]
            else:
                yield from [[(at, end) for at, end in spans[first:last] if at < end] for first, last in pairwise(bounds)]

    def are_in_order(self) -> bool:
        """Return whether each part is known to lie behind all parts before it."""
        end = 0
        for start in range(0, len(self._sizes), _BLOCK):
            there = np.flatnonzero(self._sizes[start : start + _BLOCK]) + start  # [parts]
            offsets = self._offsets[there].astype(np.int64)  # [parts]
            stops = offsets + self._sizes[there]  # [parts]
            if there.size and (offsets[0] < end or (offsets[1:] < stops[:-1]).any()):
                return False
            end = int(stops[-1]) if there.size else end
        return True

    def packed(self, entries: Iterable[Sequence[Span]], numbers: Mapping[str, int]) -> Iterator[bytes]:
        """Yield where samples lie, as an index file has it.

        Args:
            entries: The objects of the cache that hold each sample.
            numbers: The columns that are kept, with their numbers in the index.
        """
        to = np.array([numbers.get(name, -1) for name in self.names], np.int64)  # [num_names]
        blocks = (self._parts(start, start + _BLOCK, to) for start in range(0, len(self), _BLOCK))
        return map(places.pack, entries, chain.from_iterable(blocks))

    def _parts(self, start: int, stop: int, to: Column) -> Iterator[list[SamplePart]]:
        """Return the parts of some samples.

        Args:
            start: The first of the samples.
            stop: Their end.
            to: What stands for each column; -1: its parts are left out.
        """
        ends = self._starts[start : stop + 1]  # [n + 1]
        some = slice(int(ends[0]), int(ends[-1]))
        bounds = ends - ends[0]  # [n + 1]
        fields = [to[self._columns[some]], self._offsets[some], self._sizes[some], *(fact[some] for fact in self._facts)]
        is_kept = fields[0] >= 0  # [parts]
        if not is_kept.all():
            fields = [field[is_kept] for field in fields]
            bounds = np.concatenate(([0], np.cumsum(is_kept)))[bounds]  # [n + 1]
        numbers, offsets, sizes, *facts = (field.tolist() for field in fields)
        tails = zip(*facts, strict=True) if facts else repeat((), len(numbers))
        parts = [*map(_NEW_PART, zip(numbers, offsets, sizes, tails, strict=True))]
        return (parts[first:last] for first, last in pairwise(bounds.tolist()))


class PartsBuilder:
    """Makes `SampleParts` of parts that come one by one.

    Args:
        facts: How `array` keeps each fact of a part.
    """

    def __init__(self, facts: str = "") -> None:
        self._numbers: dict[str, int] = {}
        self._starts, self._columns, self._offsets, self._sizes = array("q", [0]), array("I"), array("q"), array("q")
        self._facts = [array(kind) for kind in facts]

    def add(self, name: str, offset: int, size: int, *facts: int) -> None:
        """Take a part of the sample that is not ended yet."""
        self._columns.append(self._numbers.setdefault(name, len(self._numbers)))
        self._offsets.append(offset)
        self._sizes.append(size)
        for known, fact in zip(self._facts, facts, strict=True):
            known.append(fact)

    def end_sample(self) -> None:
        """End a sample; the next part is another's."""
        self._starts.append(len(self._columns))

    def built(self) -> SampleParts:
        """Return what came, of samples that were ended."""
        starts, columns, offsets, sizes = map(column_of, (self._starts, self._columns, self._offsets, self._sizes))
        num_parts = self._starts[-1]
        facts = [column_of(fact)[:num_parts] for fact in self._facts]
        return SampleParts([*self._numbers], starts, columns[:num_parts], offsets[:num_parts], sizes[:num_parts], facts)


def column_of(numbers: array[int]) -> Column:
    """Return numbers as a column, without a copy."""
    return np.frombuffer(numbers, numbers.typecode) if numbers else np.zeros(0, numbers.typecode)  # [n]
