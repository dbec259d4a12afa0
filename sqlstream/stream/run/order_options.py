"""In which order rows come, and who takes them: as the user says, as a loader says, and as this process knows its job."""

from __future__ import annotations

import contextlib
import operator
import os
from dataclasses import dataclass, field

from torch.utils.data import get_worker_info

from sqlstream import distributed
from sqlstream.config import INT64_MAX, Buckets, Packs, check_at_least, flag_of
from sqlstream.errors import ConfigError
from sqlstream.index.weights import WeightsSpec
from sqlstream.order import MAX_SIZE, Tail
from sqlstream.order.order import check_seed
from sqlstream.world import World

TORCH_PREFETCH_FACTOR = 2
"""Batches that each worker of a DataLoader makes ahead, unless it is given another number."""

AUTO_BLOCKS = "auto"
"""`shuffle_block_size` of blocks that are what a source is read by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOptions:
    """How a loader takes samples."""

    batch_size: int
    """Samples of a rank's batch."""
    drop_last: bool
    """Leave out the last, incomplete global batch."""
    num_workers: int
    """Processes that make batches; 0: the trainer."""
    prefetch_factor: int
    """Batches that each worker makes ahead."""
    is_persistent: bool
    """Workers run several epochs: they prepare the next one while the last samples of one are taken."""
    are_whole: bool = False
    """The dataset gives whole batches, as its order has them."""
    follows_ranks: bool = False
    """`batch_size` is that of the order's batches on the ranks of now: it is another one on others."""
    num_held: int = 0
    """Batches that the trainer takes before they are asked for."""

    @property
    def num_under_way(self) -> int:
        """Samples of a worker that may be under way to the trainer: their paths stay valid."""
        return (self.prefetch_factor + 1 + self.num_held) * self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The place of this process in its job, as its trainer knows it."""

    world: World | None
    """None: read when it is needed, from torch.distributed or the launcher."""
    replication: int
    """Number of consecutive ranks that take the same samples."""
    original: World | None = None
    """Of a pickled copy: the place of the process that pickled it; None: this is no copy."""
    pid: int = 0
    """The process that unpickled it: workers that it forks are at its place, not at the one of the original."""

    def __post_init__(self) -> None:
        """Check the place, and ranges."""
        given: object = self.world
        if not isinstance(given, World | None):
            raise ConfigError(
                f"world={given!r} is no World: give World(rank=…, world_size=…), or leave it out: ranks are found"
            )
        object.__setattr__(self, "replication", check_at_least("replication", self.replication, 1))

    @property
    def whole(self) -> World:
        """The place among all ranks."""
        if self.world is not None:
            return self.world
        if self.original is not None and get_worker_info() is not None and self.pid == os.getpid():
            return self.original  # a worker that was spawned has no process group to ask
        return distributed.find_world() or self.original or World()

    @property
    def effective(self) -> World:
        """The place where ranks that take the same samples count as one."""
        return self.whole.replicated(self.replication)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with the place of this process, for its workers; a rank that is spawned with a copy has one of its own."""
        return _copy_of_layout, (self.world, self.replication, self.whole)


def _copy_of_layout(world: World | None, replication: int, original: World) -> Layout:
    return Layout(world=world, replication=replication, original=original, pid=os.getpid())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OrderOptions:
    """In which order rows come, how often, and which process takes them."""

    shuffle_seed: int | None = None
    """Seed of the order; None: as written; -1: random, agreed by all ranks."""
    shuffle_block_size: int | str | None = AUTO_BLOCKS
    """Rows of a block that stay together; `'auto'`: those of the row groups of content in Parquet, and else a whole shuffle;
    None: a whole shuffle of all. A lazy index has its chunks."""
    shuffle_window: int = 64
    """Blocks whose rows are shuffled together."""
    weights: WeightsSpec | None = None
    """How often rows come; None: equally."""
    epoch_size: int | None = None
    """Samples of an epoch; None: as many as selected rows."""
    batch_size: int | None = None
    """Samples of a rank's batch; None: a loader says it, or nothing does."""
    drop_last: bool = False
    """Leave out the last, incomplete global batch."""
    num_canonical_nodes: int = 1
    """Fixed parts of the dataset that stay on their nodes in every epoch."""
    is_endless: bool = False
    """One iteration goes on over epochs without end."""
    is_unaligned: bool = False
    """Every worker has a shuffle of its own."""
    batches: Buckets | Packs | None = None
    """Which rows share a batch, or a sample; None: any, and each is a sample."""
    layout: Layout = field(default_factory=lambda: Layout(world=None, replication=1))
    """The place of this process in its job."""

    def __post_init__(self) -> None:
        """Check the numbers, and that blocks have a seed."""
        object.__setattr__(self, "shuffle_seed", _whole_seed(self.shuffle_seed))
        for name, most in (("epoch_size", MAX_SIZE), ("batch_size", INT64_MAX), ("num_canonical_nodes", INT64_MAX)):
            if (number := getattr(self, name)) is not None:
                object.__setattr__(self, name, check_at_least(name, number, 1, most))
        for field_name, name in (
            ("drop_last", "drop_last"),
            ("is_endless", "infinite_iteration"),
            ("is_unaligned", "unaligned_worker_index"),
        ):
            object.__setattr__(self, field_name, flag_of(name, getattr(self, field_name)))
        self._check_batches()
        if isinstance(self.shuffle_block_size, str):
            if self.shuffle_block_size != AUTO_BLOCKS:
                raise ConfigError(
                    f"shuffle_block_size={self.shuffle_block_size!r} is unknown: give a number of rows, 'auto' or None"
                )
            object.__setattr__(self, "shuffle_window", check_at_least("shuffle_window", self.shuffle_window, 1))
        elif self.shuffle_block_size is not None:
            for name in ("shuffle_block_size", "shuffle_window"):
                object.__setattr__(self, name, check_at_least(name, getattr(self, name), 1))
            if self.shuffle_seed is None:
                raise ConfigError(
                    f"shuffle_block_size={self.shuffle_block_size} shuffles nothing without a seed: give shuffle_seed"
                )

    def _check_batches(self) -> None:
        """Raise ConfigError for options that do not go with `batches`."""
        if self.batches is None:
            return
        if not isinstance(self.batches, Buckets | Packs):
            raise ConfigError(f"batches={self.batches!r} says no batches: give Buckets(by, …) or Packs(length, capacity)")
        blocks = AUTO_BLOCKS if self.planned_batches is None else self.shuffle_block_size
        for name, value, left_out in (
            ("shuffle_block_size", blocks, AUTO_BLOCKS),
            ("unaligned_worker_index", self.is_unaligned, False),
        ):
            if value not in (left_out, None):
                raise ConfigError(f"{name}={value!r} cannot be had with batches=: leave one of them out")

    @property
    def has_auto_blocks(self) -> bool:
        """Blocks are what a source is read by, if it has such: batches by bucket take rows of all of it."""
        return self.shuffle_block_size == AUTO_BLOCKS and self.planned_batches is None

    @property
    def planned_batches(self) -> Buckets | Packs | None:
        """Batches, or packs, that take rows of all of the index, by counts of it; None: rows come in another order."""
        return None if isinstance(self.batches, Packs) and not self.batches.is_planned else self.batches

    @property
    def window_packs(self) -> Packs | None:
        """Packs of rows that are measured when they are made, a window of them at a time; None: there are none."""
        return self.batches if isinstance(self.batches, Packs) and not self.batches.is_planned else None

    @property
    def is_packed(self) -> bool:
        """Rows share a sample."""
        return isinstance(self.batches, Packs)

    @property
    def tail(self) -> Tail:
        """What becomes of an incomplete last step."""
        return Tail.DROP if self.drop_last else Tail.FILL if self.is_endless else Tail.SHORT

    def agreed_seed(self) -> int | None:
        """Return the seed of the order; a random one is the same on all ranks."""
        return distributed.agree_on_seed(self.layout.whole) if self.shuffle_seed == -1 else self.shuffle_seed


def _whole_seed(seed: int | None) -> int | None:
    if seed is None:
        return None
    if not isinstance(seed, bool):
        with contextlib.suppress(TypeError):
            whole = operator.index(seed)
            check_seed(None if whole == -1 else whole)
            return whole
    raise ConfigError(f"shuffle_seed={seed!r} is no whole number: give None, -1 for a random seed, or 0 to 2**64 - 1")
