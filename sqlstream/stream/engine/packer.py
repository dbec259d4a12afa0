"""From the samples of a pack's rows to one sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlstream.config import Packs
from sqlstream.errors import TransformError
from sqlstream.index.lengths import LengthTable
from sqlstream.transforms.base import Chain, Sample
from sqlstream.transforms.packs import LENGTH, PARTS, ROWS, SPAN, PackTokens
from sqlstream.transforms.stream_name import STREAM

SHOWN = 8
"""Rows that the name of a pack has in messages."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Packer:
    """Makes the samples of packs."""

    packs: Packs
    lengths: LengthTable
    """How long the rows are."""
    chain: Chain
    """The pack function, as the only transform: its random numbers depend on the place of the pack."""
    tokens: PackTokens | None
    """The pack function, where it can say of a single row what is wrong with it."""

    def part(self, sample: Sample, length: int, part: int) -> Sample:
        """Return the sample of a row as a part of a pack.

        Args:
            sample: The sample, after its transforms.
            length: Length of the row, as the index has it.
            part: Which part of a row that is longer than a pack.

        Raises:
            SampleError: It is not as long as the index says.
        """
        start = part * self.packs.capacity
        sample[SPAN], sample[LENGTH] = (start, min(length, start + self.packs.capacity)), length
        if self.tokens is not None:
            self.tokens.check(sample)
        return sample

    def pack(self, parts: Sequence[Sample], epoch: int, position: int) -> Sample:
        """Return the sample of a pack.

        Args:
            parts: Those of its rows.
            epoch: The epoch.
            position: A number that no other pack of the epoch has; with the epoch it seeds the generators of the pack.

        Raises:
            TransformError: The pack function failed, or gave no sample.
        """
        pack: Sample = {
            PARTS: list(parts),
            ROWS: [sample["__row__"] for sample in parts],
            "__epoch__": epoch,
            "__sample_key__": f"pack of rows {', '.join(str(sample['__row__']) for sample in parts[:SHOWN])}"
            + (", …" if len(parts) > SHOWN else ""),
            "capacity": self.packs.capacity,
        }
        if STREAM in parts[0]:
            pack[STREAM] = parts[0][STREAM]
        outcome = self.chain.run(pack, (self.chain.seed, epoch, position))
        if not isinstance(outcome, dict):
            raise TransformError(
                f"the pack function gave several samples for {pack['__sample_key__']}: a pack becomes one sample"
            )
        return outcome
