"""Writes what a dataset streams: filtered, weighted and shuffled as it is, with its objects taken through the cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sqlstream.errors import EncodeError
from sqlstream.stream.dataset import StreamingDataset
from sqlstream.write import SourcePoint
from sqlstream.write.base.writer import SampleWriter

_LOG = logging.getLogger(__name__)
MakesSamples = Callable[[int, Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""From a position of the epoch and its sample to what is written of it."""


class WrittenRows(NamedTuple):
    """What `write_dataset` did."""

    num_written: int
    """Samples written, those of a resumed writing included."""
    num_left_out: int
    """Positions whose sample could not be read or written, as far as this process saw."""


def share_of(num_positions: int, part: tuple[int, int] | None) -> range:
    """Return the positions of part i of n: neighbours, and all together each position once.

    Example:
        >>> [share_of(10, (number, 3)) for number in range(3)]
        [range(0, 3), range(3, 6), range(6, 10)]
    """
    number, total = part or (0, 1)
    return range(number * num_positions // total, (number + 1) * num_positions // total)


def write_dataset(
    dataset: StreamingDataset,
    writer: SampleWriter[Any],
    make: MakesSamples,
    *,
    part: tuple[int, int] | None = None,
    may_skip: bool = False,
) -> WrittenRows:
    """Write the first epoch of a dataset, or a part of it; a writer that is resumed goes on where it ended.

    Args:
        dataset: Of one process: its `world` has one rank. Its `on_error` is `'raise'`, or `'skip'` with `may_skip`.
        writer: Takes the samples. It is not finished.
        make: Makes what is written of each sample.
        part: (i, n): only part i of n.
        may_skip: Leave out samples that cannot be read or written.

    Raises:
        EncodeError: A sample cannot be written, unless `may_skip`.
    """
    share = share_of(dataset.epoch_size, part)
    position, num_taken = writer.point or SourcePoint(share.start)
    num_left_out = 0
    for at, sample in _positions(dataset, position, share.stop, may_skip=may_skip):
        num_left_out += at - position
        position = at + 1
        made = make(at, sample)
        for number, output in enumerate(made):
            if number < num_taken:
                continue
            point = SourcePoint(position) if number == len(made) - 1 else SourcePoint(at, number + 1)
            try:
                writer.write_up_to(point, output)
            except EncodeError as error:
                if not may_skip:
                    key = f"{sample['__sample_key__']!r}, " if "__sample_key__" in sample else ""  # transforms may drop it
                    raise EncodeError(f"{error}; the sample is {key}at position {at}", **error.context) from error
                num_left_out += 1
                _LOG.warning("position %d is left out: %s", at, error)
        num_taken = 0
    return WrittenRows(writer.num_samples, num_left_out + max(0, share.stop - position))


def _positions(dataset: StreamingDataset, start: int, stop: int, *, may_skip: bool) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield positions with their samples; those that are skipped do not come."""
    if start >= stop:
        return
    dataset.set_progress(0, start)
    position = start
    for sample in dataset:
        if may_skip:  # a tenth of a millisecond, and only the state knows what was passed over
            state = dataset.state_dict()
            position = (dataset.epoch_size if state["epoch"] else int(str(state["sample_in_epoch"]))) - 1
            if position >= stop:
                return
        yield position, sample
        position += 1
        if position >= stop:
            return
