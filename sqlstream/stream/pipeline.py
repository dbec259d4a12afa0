"""What every process of a dataset needs to make samples: index, cache, options, transforms; picklable."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch.utils.data import get_worker_info

from sqlstream.cache import Cache
from sqlstream.config import SampleOptions
from sqlstream.index.store import Index
from sqlstream.stream.engine import Engine
from sqlstream.stream.rows import RowReader
from sqlstream.transforms.base import Transform

TEXT_TYPES = frozenset(("string", "large_string", "string_view"))
"""Arrow types in which `none_to_empty_str` puts ''."""


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """The parts of a dataset that do not change while it is iterated."""

    name: str
    index: Index
    cache: Cache
    options: SampleOptions
    transforms: Sequence[Transform]
    predownload_transforms: Sequence[Transform]
    dataset_id: int | None = None
    """Id of the dataset in the ledger; asked for when samples are first made."""
    num_iterating: int = field(default=0, compare=False)

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        """Give an engine for one iteration; at its end nothing of it stays behind in the trainer's process.

        In a DataLoader worker the helper stays for the next epoch, and the paths that are under way to the trainer stay pinned.
        """
        is_worker = get_worker_info() is not None
        engine = self.make_engine(self.options.retained_samples)
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
            with self.cache.store.ledger.transaction() as tx:
                self.dataset_id = tx.add_dataset(self.name, self.index.src, self.index.fingerprint)
        reader = RowReader(
            self.index.resolve,
            self.index.key_column,
            self.options,
            self.predownload_transforms,
            text_columns=[column.name for column in self.index.columns if column.type in TEXT_TYPES],
            dataset=self.dataset_id,
        )
        return Engine(self.index, self.cache, reader, self.transforms, self.options, num_retained=num_retained)

    def close(self) -> None:
        """Give everything back."""
        self.cache.close()
        self.index.close()
