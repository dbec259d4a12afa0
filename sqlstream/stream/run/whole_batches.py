"""From the samples of a process to its batches, where the order says which samples share one."""

from __future__ import annotations

from collections.abc import Iterator

from sqlstream.order import Partition
from sqlstream.stream.run.shares import EpochShare, ShareProgress
from sqlstream.transforms.base import Sample

BATCH_WEIGHT = "__batch_weight__"
"""What the mean of the sample's batch weighs in that of its step, where the batches of a step differ in size. It is put into
samples that are made: transforms, and what they have stored, belong to no step."""


def whole_batches(samples: Iterator[Sample], progress: ShareProgress) -> Iterator[list[Sample]]:
    """Yield the samples of each batch together; while one is out, `progress` is at its end.

    A position may give no sample, or several: a batch then has fewer, or more, and none of another bucket. One without a sample
    is left out.

    Args:
        samples: The samples of the share, in its order.
        progress: Moved on with each of them.
    """
    batch: list[Sample] = []
    share, stop = progress.share, -1
    for sample in samples:
        taken = progress.taken
        if taken < stop and progress.share is share:
            batch.append(sample)
            continue
        if taken > stop or (progress.offset and taken == stop) or progress.share is not share:  # the batch behind is over
            if batch:
                with progress.at(share, _after(share.partition, stop)):
                    yield _weighed(batch, share, stop)
                batch = []
            share = progress.share
            stop = _partition(share.partition).end_of_batch(taken if progress.offset else taken - 1)
        batch.append(sample)
        if taken == stop and not progress.offset:
            with progress.at(share, _after(share.partition, stop)):
                yield _weighed(batch, share, stop)
            batch = []
    if batch:
        yield _weighed(batch, share, stop)


def _weighed(batch: list[Sample], share: EpochShare, stop: int) -> list[Sample]:
    """Return the batch before a place of a share; with lanes its samples say what it weighs."""
    batches = share.steps.batches
    if batches is not None and batches.num_lanes is not None:
        weight = batches.weight_at(share.epoch, int(share.partition.positions(stop - 1, stop)[0]))
        for sample in batch:
            sample[BATCH_WEIGHT] = weight
    return batch


def _after(partition: object, stop: int) -> int:
    return _partition(partition).next_place(stop)


def _partition(partition: object) -> Partition:
    assert isinstance(partition, Partition), "the shares of a run that has epochs"
    return partition
