"""Streams whose rows share batches by bucket: what a mixture asks of them."""

from __future__ import annotations

from sqlstream.errors import ConfigError
from sqlstream.order import BucketLanes, Order, OrderOfBatches


def check_batched(name: str, order: Order, global_batch: int | None, cure: str) -> None:
    """Check that the batches of a stream are those of the mixture.

    Args:
        name: Name of the stream.
        order: Its order; one without batches of its own is fine.
        global_batch: Samples of all ranks in a step of the stream; None: not known yet.
        cure: How it is given.

    Raises:
        ConfigError: They are others.
    """
    if isinstance(order, BucketLanes):
        raise ConfigError(
            f"stream {name!r} has batches= with sync='lane', and a step of a mixture gives all ranks one stream and bucket: "
            "give its Buckets sync='step' and global_batch_size="
        )
    if not isinstance(order, OrderOfBatches):
        return
    if not order.is_even:
        raise ConfigError(
            f"stream {name!r} has batches= of several sizes, and a stream of a mixture has one: give its Buckets "
            "global_batch_size=, one for all buckets; a stream for each size is fine"
        )
    if global_batch not in (None, 0, order.step_size):
        raise ConfigError(
            f"stream {name!r} has batches= of {order.step_size} samples, and takes {global_batch} in a step: give both the "
            f"same, by global_batch_size= of its Buckets and {cure}"
        )
