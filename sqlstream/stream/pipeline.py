"""What every process of a dataset needs to make samples: index, cache, options, transforms; picklable."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any

import numpy.ma  # numpy brings it when it is first needed: `np.unique` would, in each worker
import numpy.random  # noqa: F401 - the same: torch's worker loop would
from torch.utils.data import get_worker_info

from sqlstream.cache import Cache
from sqlstream.cache.session import ShardWish
from sqlstream.config import DamagedShards, LazyOptions, Packs, SampleOptions, ShardUnit
from sqlstream.index.buckets import BucketTable
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.build.lazy_shards.index import LazyShardIndex
from sqlstream.index.build.shards import SamplePlace, ShardIndex
from sqlstream.index.file.index import Index
from sqlstream.index.lengths import LengthTable
from sqlstream.process import fork
from sqlstream.process.children import end_with_parent
from sqlstream.storage.members.mds.coders import ADDED
from sqlstream.stream.chain.global_rng import GlobalGenerators
from sqlstream.stream.engine.content.chunk_objects import ChunkObjects
from sqlstream.stream.engine.content.members import MemberReader
from sqlstream.stream.engine.content.parquet import ContentReader
from sqlstream.stream.engine.content.row_content import ContentSource
from sqlstream.stream.engine.engine import Engine
from sqlstream.stream.engine.lazy_rows import LazyRows
from sqlstream.stream.engine.packer import Packer
from sqlstream.stream.engine.row_reader import KnownObjects, RowReader
from sqlstream.stream.engine.row_source import IndexRows, RowSource
from sqlstream.stream.engine.slots import Recipe
from sqlstream.stream.engine.stored_samples import CachedChain
from sqlstream.stream.engine.units import choose_unit
from sqlstream.stream.engines import Engines
from sqlstream.stream.lenient_rows import LenientRows
from sqlstream.stream.opening import judge_of, shard_use_of, table_unit
from sqlstream.stream.options import DatasetOptions, default_name
from sqlstream.stream.orders import chunk_walk
from sqlstream.stream.run.order_options import BatchOptions
from sqlstream.stream.transport.handover import Handover
from sqlstream.transforms.base import Chain, Sample, Transform
from sqlstream.transforms.packs import PackTokens

PACK_STAGE = 2
"""Part of the keys of what a pack function draws: 0 is before the download, 1 after it."""
TEXT_TYPES = frozenset(("string", "large_string", "string_view"))
"""Arrow types in which `none_to_empty_str` puts ''."""


@dataclass(kw_only=True, eq=False)
class Pipeline:
    """The parts of a dataset that do not change while it is iterated, and the engines that this process has made of them."""

    options: DatasetOptions
    seed: int | None
    """Part of the key of every sample's randomness."""
    index: Index
    cache: Cache
    handover: InitVar[Handover | None]
    """Where DataLoader workers leave their pins as they end; None: there are no objects, or no descriptors left."""
    buckets: BucketTable | None = None
    """The bucket of each row; None: there are none."""
    lengths: LengthTable | None = None
    """The length of each row, where packs are made of them; None: there are none."""
    dataset_id: int | None = None
    """Id of the dataset in the ledger; asked for when samples are first made."""
    engines: Engines = field(init=False, compare=False)
    access_engine: Engine | None = field(default=None, compare=False)
    """The engine of random access; None: no row was asked for yet."""

    def __post_init__(self, handover: Handover | None) -> None:
        """Make no engine yet."""
        self.engines = Engines(caches=(self.cache,), handover=handover)
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Forget the parent's engine of random access: it knows nothing of a worker, which leaves its pins to the trainer."""
        self.access_engine = None

    @property
    def name(self) -> str:
        """The dataset's name in reports."""
        return self.options.name or default_name(self.index.src)

    def begin_accesses(self) -> Engine:
        """Return the engine of random access, which is made for the first one of this process."""
        self.cache.check_open()
        if get_worker_info() is not None:  # its loader iterates no dataset of ours
            end_with_parent()
        self.access_engine = self.engines.begin(self, self.options.samples.retained_accesses)
        return self.access_engine

    def make_engine(self, num_retained: int, note_given_up: Callable[[], None] | None) -> Engine:
        """Return an engine that keeps the paths of `num_retained` samples valid, noting when it gives one up beyond these."""
        return Engine([self.recipe], [self.cache], self.options.samples, num_retained=num_retained, note_given_up=note_given_up)

    def num_retained(self, batches: BatchOptions | None) -> int | None:
        """Return how many samples of a worker keep their paths valid; None: how many are under way is not known."""
        return self.options.num_retained(batches)

    def recipe(self, *, cache: Cache | None = None, last: Transform | None = None) -> Recipe:
        """Return how this process makes samples of the dataset.

        Args:
            cache: What its objects come through, another one of the same directory and settings; None: its own.
            last: A transform behind all others; None: there is none.
        """
        if self.dataset_id is None:
            self.dataset_id = self.cache.session.register(self.name, self.index.src, self.index.fingerprint)
        options = self.options.samples
        before_download = Chain(
            self.options.predownload_transforms,
            seed=self.seed,
            stage=0,
            generators=GlobalGenerators if options.seed_transforms else None,
            is_plain=not self.options.index.allow_pickle and not ADDED.names(),
        )
        reader = RowReader(
            self.index.key_column,
            options,
            before_download,
            judge=judge_of(self.index, options, self.cache),
            text_columns=[column.name for column in self.index.columns if column.type in TEXT_TYPES and not column.is_in_place],
            known=KnownObjects(
                dataset=self.dataset_id,
                identity=self.cache.identity,
                listed=self.index.listed if self.index.has_listing else None,
                named_members=self.index.named_members,
                in_place=frozenset(column.name for column in self.index.columns if column.is_in_place),
                in_shards=frozenset(self._columns_in_shards()),
            ),
        )
        transforms = self.options.transforms if last is None else (*self.options.transforms, last)
        chain = CachedChain(transforms, self.cache, options, seed=self.seed, dataset=self.dataset_id, previous=before_download)
        rows = self.rows()
        return Recipe(
            name=self.name,
            cache=self.cache if cache is None else cache,
            options=options,
            rows=rows,
            reader=reader,
            chain=chain,
            content=self._content(options, self.cache if cache is None else cache, rows),
            buckets=self.buckets,
            packer=self._packer(options, chain.rest),
        )

    def _packer(self, options: SampleOptions, previous: Chain) -> Packer | None:
        """Return what makes packs of the samples of a chain; None: there are none."""
        packs = self.options.order.batches
        if not isinstance(packs, Packs) or (self.lengths is None and packs.is_planned):
            return None
        pack_fn = packs.pack_fn or PackTokens()
        generators = GlobalGenerators if options.seed_transforms else None
        return Packer(
            packs=packs,
            lengths=self.lengths,
            chain=Chain((pack_fn,), seed=self.seed, stage=PACK_STAGE, generators=generators, previous=previous),
            tokens=pack_fn if isinstance(pack_fn, PackTokens) else None,
            is_shuffled=self.seed is not None,
        )

    def _columns_in_shards(self) -> Iterator[str]:
        """Yield the columns whose values lie in shards, or are parsed of these: their texts are no paths."""
        are_shards = isinstance(self.index, ShardIndex | LazyShardIndex)
        for column in self.index.columns:
            if column.is_member or (are_shards and column.is_in_place) or column.name in self.options.index.index_members:
                yield column.name

    def _content(self, options: SampleOptions, cache: Cache, rows: RowSource) -> ContentSource | None:
        """Return the reader of content that is not in the rows; None: they have all values.

        Args:
            options: Which columns are wanted.
            cache: What objects come through.
            rows: The rows of the index.
        """
        index = self.index
        if isinstance(index, RowGroupIndex):
            return ContentReader(index, ChunkObjects(self.cache, self.dataset_id), options)
        if isinstance(index, ShardIndex):
            read = index.rows_with_places
        elif isinstance(index, LazyShardIndex):
            index.has_new_parts = options.takes_new_parts
            read = partial(_rows_with_places, rows, index)
        else:
            return None
        return MemberReader(index, read, self.dataset_id, cache.identity, options, self._shard_unit, cache.session)

    def _shard_unit(self, epoch: int) -> ShardUnit:
        """Return in what unit remote shards are fetched in an epoch."""
        assert isinstance(self.index, ShardIndex | LazyShardIndex)
        wished, use = ShardUnit(self.options.samples.shards), shard_use_of(self.options, self.index)
        if self.dataset_id is None:
            return choose_unit(wished, use, None).unit
        wish = ShardWish(self.dataset_id, f"{wished.value} {use}", epoch)
        return self.cache.session.shard_unit(wish, partial(choose_unit, wished, use)).unit

    def rows(self) -> RowSource:
        """Return the rows of the index, for this process."""
        index = self.index
        if not isinstance(index, LazyIndex):
            return IndexRows(index)
        walk = None
        if isinstance(index, LazyShardIndex):
            walk = chunk_walk(
                index,
                self.options.order,
                table_unit(self.options, shard_use_of(self.options, index), self.cache, are_commands=index.has_commands),
            )
            index.keep_tables(2 * walk.window)
        given = self.options.index
        leaves_out = given.missing_shards.leaves_out or given.damaged_shards is not DamagedShards.RAISE
        kind = LenientRows if isinstance(index, LazyShardIndex) and leaves_out else LazyRows
        return kind(index, self.cache, self.options.index.lazy or LazyOptions(chunk_rows=1), self.dataset_id, walk)

    def renew(self, index: Index, lengths: LengthTable | None) -> None:
        """Take the rows of another index from now on: accesses by row at once, iterations that are under way never."""
        old, self.index, self.lengths, self.dataset_id = self.index, index, lengths, None
        if self.access_engine is not None:
            self.access_engine.renew([self.recipe])
        if not self.engines.iterations:  # else they read it to their end
            old.close()

    def close(self) -> None:
        """Release all pins, and close cache and index."""
        self.engines.close()
        self.cache.close()
        self.index.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which makes its own engines."""
        return {**self.__dict__, "access_engine": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        fork.call_in_child(self, fork.Stage.MEMORY)


def _rows_with_places(rows: RowSource, index: LazyShardIndex, row_ids: Sequence[int]) -> tuple[list[Sample], list[SamplePlace]]:
    """Return rows of shards whose tables are read when they are needed, and where the content of each is."""
    return rows.rows(row_ids), index.places_of(row_ids)
