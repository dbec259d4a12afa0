"""A dataset as the rows that are selected of a table: how many there are, and the sample of any of them, by its number."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Self, SupportsIndex, TypedDict, Unpack

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import get_worker_info

from sqlstream.cache import Cache
from sqlstream.cache.session import FailureRecord
from sqlstream.config import MemberForm, check_at_least
from sqlstream.errors import ConfigError, EmptySelectionError, SqlStreamError
from sqlstream.index.build.narrow import narrowed
from sqlstream.index.file.index import Index
from sqlstream.index.query import query_rows
from sqlstream.index.splits import plan_splits
from sqlstream.index.types.arrow import schema_of, table_of
from sqlstream.index.weights import weights_of_part
from sqlstream.storage.base.urls import is_remote
from sqlstream.stream.engine.row_source import RowSource
from sqlstream.stream.frameworks.plain_loader import warn_of_length, warn_of_ranks
from sqlstream.stream.options import DatasetOptions
from sqlstream.stream.orders import open_order, open_schedule, warn_of_reading_again
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.order_options import OrderOptions
from sqlstream.stream.run.schedule import Schedule
from sqlstream.stream.transport.handover import Handover
from sqlstream.transforms.base import Transform
from sqlstream.world import World


class ViewOrder(TypedDict, total=False):
    """What the order of a view may have otherwise: parameters of the constructor of a dataset."""

    shuffle_seed: int | None
    batch_size: int | None
    drop_last: bool
    infinite_iteration: bool
    world: World | None


class SelectedRows:
    """What a `StreamingDataset` is beside a stream: rows in the order of the index, whatever the order of the stream is."""

    name: str
    """Name in reports."""
    _pipeline: Pipeline
    _schedule: Schedule

    def __len__(self) -> int:
        """Return the number of selected rows; UnknownLengthError while a lazy index does not know how many its filter keeps.

        These are the rows of all ranks: `num_steps` counts the batches of one.
        """
        given = self._pipeline.engines.warnings
        warn_of_ranks(lambda: self._schedule.world, given)
        num_rows = len(self.index)
        warn_of_length(num_rows, self._schedule, given)
        return num_rows

    def __getitem__(self, index: Any) -> Any:
        """Return the sample of selected row `index` (negative from the end), after transforms; a list if they make several.

        A slice, or a list, range or array of numbers, gives the list of their samples, whose objects are acquired together. The
        paths in a sample stay valid for the next 64 accesses of this process.

        Raises:
            TypeError: `index` is neither a whole number nor several of them.
            IndexError: There is no such row.
            SampleError, StorageError: It cannot be made; never another row's sample.
        """
        if type(index) is not int:  # most accesses are
            if isinstance(index, slice):
                return self._sliced(index)
            if isinstance(index, list | range) or (isinstance(index, np.ndarray | torch.Tensor) and index.ndim == 1):
                return self.__getitems__(_without_mask(index))
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """Return the samples of several selected rows, in the order asked; their objects are acquired together."""
        engine = self._pipeline.access_engine or self._pipeline.begin_accesses()
        return engine.rows(indices, int(self._schedule.counter.next_epoch))

    def _sliced(self, rows: slice) -> list[Any]:
        index = self.index
        was_known = index.known_length is not None
        try:
            return self.__getitems__(_numbers_of(rows, index))
        except IndexError:
            if was_known or index.known_length is None:
                raise
        return self.__getitems__(_numbers_of(rows, index))  # a lazy index has counted its rows on the way

    @property
    def index(self) -> Index:
        """The index that the rows come from."""
        return self._pipeline.index

    # -- looking at the rows ------------------------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of a row, in the source's order."""
        return tuple(column.name for column in self.index.columns)

    @property
    def schema(self) -> pa.Schema:
        """The columns of a row with their types; those of JSON values are text."""
        return schema_of(self.index.columns, physical=False)

    def head(self, num_rows: int = 5) -> pa.Table:
        """Return the first selected rows as a table, as SQL sees them: without content that stays in its files.

        Nothing is downloaded but, of a lazy index, their chunks.

        Args:
            num_rows: At most so many.
        """
        num_rows = check_at_least("num_rows", num_rows, 1)
        self.cache.check_open()
        rows = self._pipeline.rows()
        try:
            stored = rows.stored_rows(_first_ids(rows, num_rows))
        finally:
            rows.close()
        return table_of([column.field for column in self.index.sql_columns], stored)

    def query(self, sql: str) -> pa.Table:
        """Return the result of a SELECT on the selected rows: `SELECT label, count(*) AS n FROM dataframe GROUP BY label`.

        It runs in the sandbox that filters run in, and its columns have the source's types where they hold its values.

        Args:
            sql: The query, in the dialect of `sql_query`; the rows are `dataframe`, or `samples`.

        Raises:
            QueryError: It does not run, is not allowed, or takes too long.
            ConfigError: The index is lazy: its rows are not here.
        """
        self.cache.check_open()
        return query_rows(self.index, _sql_of("sql", sql), self._pipeline.options.index, self.cache.path / "index")

    # -- some of the rows ---------------------------------------------------------------------------------------------

    def select(self, where: str) -> Self:
        """Return a dataset of the selected rows that fulfil a condition, with the same options, on the same cache.

        With `refresh="epoch"` it keeps the rows of now: it is made of an index, and not of the source.
        It is a dataset of its own: each is closed by itself, has its own order and its own state, and goes on at its start.

        Args:
            where: The condition, in SQL: `score > 6 AND label = 'cat'`.

        Raises:
            QueryError: It does not run, or keeps no row.
            ConfigError: The index is lazy, and its number of rows is limited already.
        """
        return self._narrowed(where=_sql_of("where", where))

    def take(self, num_rows: int) -> Self:
        """Return a dataset of the first selected rows, all of them if they are fewer; see `select`.

        Args:
            num_rows: At most so many.
        """
        check_at_least("num_rows", num_rows, 1)
        return self._narrowed(num_rows=int(num_rows))

    def split(self, *, seed: int = 0, **shares: float) -> dict[str, Self]:
        """Return datasets that share the selected rows, by name; see `select`.

        A hash of its key, without a key column of its number, says where a row belongs: it stays there when others come.

        Args:
            seed: Another seed makes other splits.
            shares: The share of each, `val=0.1`. What is left of 1 is `train`.

        Raises:
            ConfigError: The shares are not between 0 and 1, add up to more than 1, or leave a split without a row.

        Example:
            >>> parts = dataset.split(val=0.25)
            >>> len(parts["train"]) + len(parts["val"]) == len(dataset)
            True
        """
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
            raise ConfigError(f"seed={seed!r} is no whole number: give one, the same for the same splits")
        made: dict[str, Self] = {}
        engine = self._pipeline.options.index.sql_engine
        try:
            for part in plan_splits(shares):
                try:
                    made[part.name] = self._narrowed(where=part.condition(self.index, seed, engine))
                except EmptySelectionError as error:
                    rows = f"none of the {len(self.index)} rows"
                    raise ConfigError(f"split {part.name!r} has {rows}: give it a larger share than {part.share:g}") from error
        except BaseException:
            for dataset in made.values():
                dataset.close()
            raise
        return made

    def _narrowed(self, *, where: str | None = None, num_rows: int | None = None) -> Self:
        """Return a dataset of some of the rows; of a subclass it has the same attributes."""
        self.cache.check_open()
        index, seed, options, cache = self.index, self._pipeline.seed, self._pipeline.options, self.cache
        directory, show_progress = cache.path / "index", options.show_progress
        part = narrowed(index, options.index, directory, where=where, num_rows=num_rows, show_progress=show_progress)
        try:
            weights = options.order.weights
            order = replace(
                options.order,
                shuffle_seed=seed,  # a random one is drawn once
                weights=None if weights is None else weights_of_part(weights, index, part),
            )
            same_cache = replace(options.cache, directory=cache.path, limit=cache.limit_bytes)
            made = type(self).__new__(type(self))
            made.__dict__.update(self.__dict__)
            made._open(replace(options, order=order, cache=same_cache, refresh=None), lambda _: part)
        except BaseException:
            part.close()
            raise
        return made

    def view(self, transforms: Sequence[Transform] | None = None, **order: Unpack[ViewOrder]) -> Self:
        """Return a dataset of the same rows in the same order, or another one, with the same transforms, or others.

        It has this one's index and cache, so that closing one closes both; its epochs and its state are its own.

        Args:
            transforms: Those of its samples; None: as they are.
            order: What is another one: parameters of the constructor.

        Raises:
            ConfigError: The rows are looked at again by `refresh`, or their buckets are an order of their own; or something
                else than the order is asked to be another one.
        """
        known = ViewOrder.__annotations__
        if unknown := sorted(order.keys() - known.keys()):
            raise ConfigError(
                f"view() cannot have another {', '.join(unknown)}: it takes transforms, and {', '.join(known)}. Make another "
                "dataset"
            )
        self.cache.check_open()
        pipeline, index = self._pipeline, self.index
        before = pipeline.options
        if before.refresh is not None or before.order.batches is not None:
            option = "refresh" if before.refresh is not None else "batches"
            raise ConfigError(f"view() is of rows in an order of their own, and the dataset was given {option}=: leave it out")
        changed = replace(before.order, **_changes_of(before.order, pipeline.seed, order))
        options = replace(before, order=changed, transforms=before.transforms if transforms is None else transforms)
        seed = changed.agreed_seed()
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        made._schedule = open_schedule(changed, seed, index, self.cache.path / "index", None)
        handover = pipeline.engines.handover
        made._pipeline = Pipeline(options=options, seed=seed, index=index, cache=self.cache, handover=handover)
        return made

    def _open(self, options: DatasetOptions, open_rows: Callable[[Cache], Index]) -> None:
        """Open cache, index and order.

        Args:
            options: All of them.
            open_rows: Opens the index.
        """
        cache = options.cache.open(options.storage)
        columns = options.samples.columns_to_download if get_worker_info() is None else None
        try:
            seed = options.order.agreed_seed()
            if columns and is_remote(str(options.index.src)):
                cache.session.expect_forks(1)  # before the index is read, which wants a helper, too
            index = open_rows(cache)
            if columns and _names_remote_objects(index, columns):
                cache.session.expect_forks(index.known_length)
            warn_of_reading_again(options, index)
            self._schedule, buckets, lengths = open_order(options, seed, index, cache.path / "index")
        except BaseException:
            cache.close()
            raise
        gives_paths = options.samples.columns_to_download or options.samples.members is MemberForm.PATH
        handover = Handover.new() if gives_paths else None
        named = options.naming_source(index.src)
        tables: dict[str, Any] = {"buckets": buckets, "lengths": lengths}
        self._pipeline = Pipeline(options=named, seed=seed, index=index, cache=cache, handover=handover, **tables)
        self.name = self._pipeline.name

    @property
    def cache(self) -> Cache:
        """The cache that the objects go through."""
        return self._pipeline.cache

    def get_identifier_desc(self) -> str:
        """Return a line that names this dataset in logs."""
        known = self.index.known_length
        return f"{self.name} ({'an unknown number of' if known is None else known} samples of {self.index.src})"

    def failures(self) -> list[FailureRecord]:
        """Return what failed in this cache, in any process: URLs that could not be downloaded, rows that made no sample.

        Each names row, URL, global step (in its epoch), error, count and time; the most frequent first.
        """
        return self.cache.failures()

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pins back, end helper process and threads, close all files. Also at the end of a `with` block."""
        self._pipeline.close()

    def __repr__(self) -> str:
        """Return name, rows, source, columns, seed and cache directory; nothing is read."""
        seed = self._schedule.identity.shuffle_seed
        order = "" if seed is None else f"; shuffle_seed={seed}"
        closed = "; closed" if self.cache.is_closed else ""
        return f"{type(self).__name__}({self.name}: {self.index.summary}{order}; cache {self.cache.path}{closed})"


def _changes_of(order: OrderOptions, seed: int | None, given: ViewOrder) -> dict[str, Any]:
    """Return the fields of the options of an order that are others in a view; a random seed was drawn already."""
    fields: dict[str, Any] = {"shuffle_seed": seed, **given}
    if "infinite_iteration" in fields:
        fields["is_endless"] = fields.pop("infinite_iteration")
    if "world" in fields:
        fields["layout"] = replace(order.layout, world=fields.pop("world"))
    return fields


def _names_remote_objects(index: Index, columns: Sequence[str]) -> bool:
    """Return whether the first row names an object that is not on this machine; of a lazy index, whether its source is none."""
    if not index.known_length:
        return index.known_length is None and is_remote(index.base_url)
    try:
        (row,) = index.rows(index.row_ids(np.zeros(1, dtype=np.int64)).tolist())
        return any(is_remote(index.resolve(value)) for name in columns if isinstance(value := row.get(name), str))
    except SqlStreamError:  # an error of that row shows when it is read
        return False


def _first_ids(rows: RowSource, num_rows: int) -> list[int]:
    """Return the ids of the first selected rows."""
    try:
        return rows.ids_at(range(num_rows if rows.known_length is None else min(num_rows, rows.known_length)))
    except IndexError:  # a lazy index has counted all of its rows by now, and has fewer
        return rows.ids_at(range(len(rows)))


def _sql_of(option: str, text: str) -> str:
    """Return a user's SQL.

    Raises:
        ConfigError: It is no text.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{option}={text!r} is no text: give it as SQL")
    return text


def _numbers_of(rows: slice, index: Index) -> range:
    """Return the numbers of the rows of a slice; while a lazy index does not know its length, as if there were enough.

    Raises:
        TypeError: Its bounds are no whole numbers.
        UnknownLengthError: It ends where the rows end, or counts from there, and how many there are is not known.
    """
    bounds = (rows.start, rows.stop, rows.step)
    if not all(bound is None or hasattr(bound, "__index__") for bound in bounds):
        shown = ":".join("" if bound is None else repr(bound) for bound in bounds[: 2 if rows.step is None else 3])
        raise TypeError(f"dataset[{shown}]: the bounds of a slice are whole numbers, such as dataset[0:3]")
    if index.known_length is None and rows.stop is not None and rows.stop >= 0 and (rows.start or 0) >= 0:
        return range(*rows.indices(max(rows.start or 0, rows.stop)))
    return range(*rows.indices(len(index)))


def _without_mask(numbers: Any) -> Any:
    """Return what are numbers of rows, and not, as numpy and torch allow it, True or False for each row.

    Raises:
        TypeError: It is a mask.
    """
    is_mask = "bool" in str(numbers.dtype) if hasattr(numbers, "dtype") else any(type(one) is bool for one in numbers)
    if is_mask:
        raise TypeError(
            f"dataset[{reprlib.repr(numbers)}]: True and False are no numbers of rows: give the numbers, or choose rows by a "
            "condition with dataset.select()"
        )
    return numbers
