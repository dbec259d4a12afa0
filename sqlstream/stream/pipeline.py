"""What every process of a dataset needs to make samples: index, cache, options, transforms; picklable."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import get_worker_info

from sqlstream.cache import Cache
from sqlstream.config import LazyOptions, SampleOptions
from sqlstream.index.lazy import LazyIndex
from sqlstream.index.store import Index
from sqlstream.storage import urls
from sqlstream.stream.cached import CachedChain
from sqlstream.stream.chain import Chain
from sqlstream.stream.engine import Engine
from sqlstream.stream.lazy_rows import LazyRows
from sqlstream.stream.row_source import IndexRows, RowSource
from sqlstream.stream.rows import RowReader
from sqlstream.transforms.base import Transform

SEVERAL_SOURCES = " + "
"""What stands between the sources of one index in `Index.src`."""
TEXT_TYPES = frozenset(("string", "large_string", "string_view"))
"""Arrow types in which `none_to_empty_str` puts ''."""


@dataclass(kw_only=True)
class Pipeline:
    """The parts of a dataset that do not change while it is iterated."""

    name: str
    index: Index
    cache: Cache
    options: SampleOptions
    seed: int | None
    """Part of the key of every sample's randomness."""
    transforms: Sequence[Transform]
    predownload_transforms: Sequence[Transform]
    lazy: LazyOptions | None = None
    """How chunks of a lazy index are fetched."""
    dataset_id: int | None = None
    """Id of the dataset in the ledger; asked for when samples are first made."""
    num_iterating: int = field(default=0, compare=False)
    worker_engine: Engine | None = field(default=None, compare=False)
    """A DataLoader worker's engine: it outlives an iteration, with what it has prepared for the next one."""

    @contextlib.contextmanager
    def engine(self, ranks_on_node: int) -> Iterator[Engine]:
        """Give an engine for one iteration; at its end nothing of it stays behind in the trainer's process.

        In a DataLoader worker the helper stays for the next epoch, and the paths that are under way to the trainer stay pinned.

        Args:
            ranks_on_node: Trainer processes of this node: they and their workers share the cache's limit.
        """
        info = get_worker_info()
        is_worker = info is not None
        if info is not None:
            self.cache.store.acquirer.num_expected = info.num_workers * ranks_on_node
            self.cache.fetcher.share_node(info.num_workers * ranks_on_node)
            if self.worker_engine is None:
                gc.freeze()  # what the trainer left us is no garbage; to look at all of it takes 0.1 s and copies 45 MB (m)
        engine = self.worker_engine or self.make_engine(self.options.retained_samples)
        if is_worker:
            self.worker_engine = engine
        self.num_iterating += 1
        try:
            yield engine
        finally:
            self.num_iterating -= 1
            engine.close(release_kept=not is_worker)
            if not is_worker and not self.num_iterating:
                self.cache.rest()

    def make_engine(self, num_retained: int) -> Engine:
        """Return an engine that keeps the paths of `num_retained` samples valid."""
        if self.dataset_id is None:
            with self.cache.store.acquirer.bypass.tolerated(), self.cache.store.ledger.transaction() as tx:
                self.dataset_id = tx.add_dataset(self.name, self.index.src, self.index.fingerprint)
        reader = RowReader(
            self.index.base_url,
            self.index.key_column,
            self.options,
            Chain(self.predownload_transforms, seed=self.seed, stage=0, seeds_globals=self.options.seed_transforms),
            index_url=least_trusted(self.index.src),
            text_columns=[column.name for column in self.index.columns if column.type in TEXT_TYPES],
            dataset=self.dataset_id,
        )
        chain = CachedChain(self.transforms, self.cache, self.options, seed=self.seed, dataset=self.dataset_id)
        return Engine(self._rows(), self.cache, reader, chain, self.options, name=self.name, num_retained=num_retained)

    def _rows(self) -> RowSource:
        if isinstance(self.index, LazyIndex):
            return LazyRows(self.index, self.cache, self.lazy or LazyOptions(chunk_rows=1), self.dataset_id)
        return IndexRows(self.index)

    def close(self) -> None:
        """Give everything back."""
        self.cache.close()
        self.index.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker, which makes its own engine."""
        return {**self.__dict__, "worker_engine": None, "num_iterating": 0}


def least_trusted(src: str) -> str:
    """Return the part of `src` that decides what rows may name: a remote one, if there is any."""
    return next((part for part in src.split(SEVERAL_SOURCES) if urls.is_remote(part)), src)
