"""From the samples of the rows of a position to packs, each of which is one sample."""

from __future__ import annotations

import logging
import operator
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from sqlstream.config import OnLong, Packs
from sqlstream.errors import ConfigError, SampleError, TransformError, text_of
from sqlstream.index.lengths import LengthTable
from sqlstream.order import pack_window
from sqlstream.transforms.base import Chain, Sample
from sqlstream.transforms.packs import LENGTH, PARTS, ROWS, SPAN, PackTokens, is_sequence
from sqlstream.transforms.stream_name import STREAM

logger = logging.getLogger(__name__)

SHOWN = 8
"""Rows that the name of a pack has in messages."""
SEQUENCES = ("input_ids", "labels", "position_ids", "document_ids")
"""Fields of what a pack function gives that have a value for each one of the pack, as trainers name them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packer:
    """Makes the samples of packs: one of the rows of a position, or some of a window of rows that are measured here."""

    packs: Packs
    lengths: LengthTable | None
    """How long the rows are; None: that shows when they are made."""
    chain: Chain
    """The pack function, as the only transform: its random numbers depend on the place of the pack."""
    tokens: PackTokens | None
    """The pack function, where it can say of a single row what is wrong with it."""
    is_shuffled: bool
    """The packs of a window come in another order than their rows."""
    _has_told: list[bool] = field(default_factory=list, init=False, repr=False)
    """Not empty: it was said that rows are left out."""

    def part(self, sample: Sample, row: int, length: int, part: int) -> Sample:
        """Return the sample of a row as a part of a pack.

        Args:
            sample: The sample, after its transforms.
            row: The row, whose number transforms may have left out.
            length: Length of the row, as the index has it.
            part: Which part of a row that is longer than a pack.

        Raises:
            SampleError: It is not as long as the index says, or has no length.
            ConfigError: It is longer than a pack, and that is an error.
        """
        sample.setdefault("__row__", row)
        if self.lengths is None:
            sample[LENGTH] = self._measured(sample)
        else:
            start = part * self.packs.capacity
            sample[SPAN], sample[LENGTH] = (start, min(length, start + self.packs.capacity)), length
        if self.tokens is not None:
            self.tokens.check(sample)
        return sample

    def groups(self, parts: Sequence[Sample], key: tuple[int, int]) -> list[list[Sample]]:
        """Return the parts of each pack that is made of the rows of a position.

        Args:
            parts: The samples of these rows, as `part` has returned them.
            key: Epoch and position, on which the order of the packs depends.
        """
        if self.lengths is not None:
            return [list(parts)] if parts else []
        packs, capacity, on_long = self.packs, self.packs.capacity, OnLong(self.packs.on_long)
        lengths = [part[LENGTH] for part in parts]
        if on_long is OnLong.DROP and not self._has_told:
            self._tell_of_long(parts, lengths)
        seed = (self.chain.seed, *key) if self.is_shuffled else None
        groups = []
        for pack in pack_window(lengths, capacity, packs.max_rows, on_long, seed):
            group = []
            for row, part in pack:
                sample, start = parts[row] if lengths[row] <= capacity else dict(parts[row]), part * capacity
                sample[SPAN] = (start, min(lengths[row], start + capacity))
                group.append(sample)
            groups.append(group)
        return groups

    def pack(self, parts: Sequence[Sample], epoch: int, position: int) -> Sample:
        """Return the sample of a pack.

        Args:
            parts: Those of its rows.
            epoch: The epoch.
            position: A number that no other pack of the epoch has; with the epoch it seeds the generators of the pack.

        Raises:
            TransformError: The pack function failed, or gave no sample, or one of other rows, or one that is too long.
        """
        rows = [sample["__row__"] for sample in parts]
        pack: Sample = {
            PARTS: list(parts),
            ROWS: rows.copy(),
            "__epoch__": epoch,
            "__sample_key__": f"pack of rows {', '.join(str(sample['__row__']) for sample in parts[:SHOWN])}"
            + (", …" if len(parts) > SHOWN else ""),
            "capacity": self.packs.capacity,
        }
        if STREAM in parts[0]:
            pack[STREAM] = parts[0][STREAM]
        name = pack["__sample_key__"]
        outcome = self.chain.run(pack, (self.chain.seed, epoch, position))
        if not isinstance(outcome, dict):
            raise TransformError(f"the pack function gave several samples for {name}: a pack becomes one sample")
        if self.tokens is None:
            if STREAM in parts[0]:
                outcome.setdefault(STREAM, parts[0][STREAM])
            _check_made(outcome, rows, name, self.packs.capacity)
        return outcome

    def _measured(self, sample: Sample) -> int:
        """Return how long a row is whose length the index does not know.

        Raises:
            SampleError: It has no length.
            ConfigError: It is longer than a pack, and that is an error.
        """
        packs, row = self.packs, sample["__row__"]
        measure = packs.length if callable(packs.length) else getattr(packs.pack_fn or PackTokens(), "length_of", None)
        assert callable(measure), "`Packs` has looked"
        try:
            found = measure(sample)
            length = operator.index(found)
        except SampleError:
            raise
        except Exception as error:
            raise SampleError(f"row {row} has no length: {measure!r} raised {text_of(error)}") from error
        if length < 1:
            raise SampleError(f"row {row} has length {length}: leave empty rows out with where=, or by a transform")
        if length > packs.capacity and packs.on_long is OnLong.RAISE:
            raise ConfigError(
                f"row {row} has length {length}, and a pack {packs.capacity}: give Packs on_long='drop', 'truncate' or "
                "'split', or a larger capacity"
            )
        return length

    def _tell_of_long(self, parts: Sequence[Sample], lengths: Sequence[int]) -> None:
        """Log once that rows are left out."""
        long = [at for at, length in enumerate(lengths) if length > self.packs.capacity]
        if long:
            self._has_told.append(True)
            logger.warning(
                "packs of %d leave out rows that are longer, such as row %s with %d; this is said once",
                *(self.packs.capacity, parts[long[0]]["__row__"], lengths[long[0]]),
            )


def _check_made(made: Sample, rows: Sequence[int], name: str, capacity: int) -> None:
    """Check what a function of the user's own has made of a pack, as far as its fields say it.

    Args:
        made: The sample.
        rows: Rows of the pack; one that is in several parts, or weighs as much, is there several times.
        name: What names the pack.
        capacity: Values of a pack at most.

    Raises:
        TransformError: It has other rows, or more values than a pack, or parts that are none.
    """
    if ROWS in made:
        found: Counter[int] = Counter(made[ROWS])
        given = Counter(rows)
        if found != given:
            missing, twice = sorted((given - found).elements()), sorted((found - given).elements())
            said = [f"leaves out {missing[:SHOWN]}"] * bool(missing) + [f"has {twice[:SHOWN]} too often"] * bool(twice)
            raise TransformError(
                f"the pack function gave {ROWS} that {' and '.join(said)} for {name}: let it keep each of the rows that it is "
                "given, or leave rows out with where="
            )
    sizes = {one: len(made[one]) for one in SEQUENCES if is_sequence(made.get(one))}
    for one, size in sizes.items():
        if size > capacity:
            raise TransformError(
                f"the pack function gave {size} values in {one!r} for {name}, and a pack has at most {capacity}: let length= "
                "count all that it adds to a row, or give a larger capacity"
            )
    if "cu_seqlens" in made:
        end = next(iter(sizes.values()), None)
        if not _are_bounds(made["cu_seqlens"], end, capacity):
            raise TransformError(
                f"the pack function gave cu_seqlens={reprlib.repr(made['cu_seqlens'])} for {name}: they begin with 0, never "
                f"fall, and end with the number of values, {f'at most {capacity}' if end is None else end}"
            )


def _are_bounds(given: object, end: int | None, capacity: int) -> bool:
    """Return whether these are the bounds of parts that end at `end`; None: at any value up to the capacity."""
    if not is_sequence(given):
        return False
    bounds = np.asarray(given)  # [P + 1]
    if not len(bounds) or bounds[0] != 0 or (np.diff(bounds) < 0).any():
        return False
    return bool(bounds[-1] <= capacity) if end is None else bool(bounds[-1] == end)
