"""What a shard says of its samples, in columns: objects for each of a million parts take ten times the memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from sqlstream.index.types import arrays
from sqlstream.storage.members import places
from sqlstream.storage.members.entries import Span
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.spilled import SPILL_VALUES, Spilled, SpilledBytes

_BLOCK = 1 << 12
"""Samples that are made at a time. Arbitrary."""
_NEW_PART = partial(tuple.__new__, SamplePart)  # without the checks of a call, which take as long as the rest

Column: TypeAlias = npt.NDArray[Any]
"""Whole numbers, of as many bytes as they need."""


class Texts(Sequence[str]):
    """Texts, encoded one behind another.

    Args:
        folder: Where those are written that memory should not hold; None: it holds all.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._ends, self._data = Spilled("q", folder), SpilledBytes(folder)
        self._ends.last.append(0)

    @classmethod
    def of(cls, texts: Iterable[str], folder: Path | None = None) -> Texts:
        """Return these texts, which are taken one by one."""
        found = cls(folder)
        ends, data = found._ends, found._data
        for text in texts:
            data.last += text.encode()
            ends.last.append(len(data))
            if len(ends.last) > SPILL_VALUES:
                ends.spill()
                data.spill()
        return found

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __iter__(self) -> Iterator[str]:
        for start in range(0, len(self), _BLOCK):
            yield from self[start : start + _BLOCK]

    @overload
    def __getitem__(self, at: int) -> str: ...

    @overload
    def __getitem__(self, at: slice) -> list[str]: ...

    def __getitem__(self, at: int | slice) -> str | list[str]:
        """Return one of them, or some that follow each other."""
        if not isinstance(at, slice):
            number = range(len(self))[at]
            return self[number : number + 1][0]
        start, stop, step = at.indices(len(self))
        assert step == 1, "texts are taken in their order"
        return self.column(start, max(0, stop - start)).to_pylist()  # type: ignore[return-value]  # none is NULL

    def column(self, start: int, num_rows: int) -> pa.Array[Any]:
        """Return some of them as Arrow has them."""
        start = min(start, len(self))
        ends = self._ends[start : start + num_rows + 1]  # [n + 1]
        return arrays.joined_texts(self._data.read(int(ends[0]), int(ends[-1])), ends - ends[0])


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
        starts: Column | Spilled,
        columns: Column | Spilled,
        offsets: Column | Spilled,
        sizes: Column | Spilled,
        facts: Sequence[Column | Spilled] = (),
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
        found = np.zeros(len(self.names), np.int64)  # [num_names]
        for start in range(0, len(self._columns), SPILL_VALUES):
            some = slice(start, start + SPILL_VALUES)
            np.add.at(found, self._columns[some], np.maximum(self._sizes[some], 1).astype(np.int64))
        return dict(zip(self.names, found.tolist(), strict=True))

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
        found = np.flatnonzero(self._columns[some] == self.names.index(name))  # [found]
        rows = np.searchsorted(ends, found + some.start, side="right") - 1  # [found]
        values, is_missing = np.zeros(len(ends) - 1, np.int64), np.ones(len(ends) - 1, bool)  # [n] each
        values[rows] = (self._sizes if fact is None else self._facts[fact])[some][found]
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
            sizes = self._sizes[start : start + _BLOCK]  # [some]
            there = np.flatnonzero(sizes)  # [parts]
            offsets = self._offsets[start : start + _BLOCK][there].astype(np.int64)  # [parts]
            stops = offsets + sizes[there]  # [parts]
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
        folder: Where parts are written that memory should not hold; None: it holds all.
    """

    def __init__(self, facts: str = "", folder: Path | None = None) -> None:
        self._numbers: dict[str, int] = {}
        self._starts, self._parts = Spilled("q", folder), [Spilled(kind, folder) for kind in ("I", "q", "q", *facts)]
        self._columns, self._offsets, self._sizes, *self._facts = self._parts
        self._starts.last.append(0)

    def add(self, name: str, offset: int, size: int, *facts: int) -> None:
        """Take a part of the sample that is not ended yet."""
        self._columns.last.append(self._numbers.setdefault(name, len(self._numbers)))
        self._offsets.last.append(offset)
        self._sizes.last.append(size)
        for known, fact in zip(self._facts, facts, strict=True):
            known.last.append(fact)

    def end_sample(self) -> None:
        """End a sample; the next part is another's."""
        self._starts.last.append(len(self._columns))
        if len(self._columns.last) >= SPILL_VALUES:
            self._starts.spill()
            for column in self._parts:
                column.spill()

    def built(self) -> SampleParts:
        """Return what came, of samples that were ended."""
        return SampleParts([*self._numbers], self._starts, self._columns, self._offsets, self._sizes, self._facts)
