"""The dataset: an index, a cache and an order behind the interface of `torch.utils.data`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sqlstream.cache.session import VerifyReads
from sqlstream.config import (
    AS_IT_IS,
    DEFAULT_PREFETCH,
    AsItIs,
    Buckets,
    IndexOptions,
    JoinOptions,
    LazyOptions,
    MemberForm,
    NewParts,
    OnCacheError,
    OnError,
    Packs,
    SampleOptions,
    ShardUnit,
    SourceOptions,
    StorageOptions,
    names_of,
    parse_bytes,
    parse_limit,
)
from sqlstream.errors import ConfigError
from sqlstream.index.weights import WeightsSpec
from sqlstream.sample_types import DataSampleType
from sqlstream.stream.iterated import IteratedDataset
from sqlstream.stream.opening import open_any
from sqlstream.stream.options import CacheOptions, DatasetOptions
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.refresh import refresh_rows
from sqlstream.stream.run.order_options import AUTO_BLOCKS, Layout, OrderOptions
from sqlstream.stream.run.reweighting import reweight
from sqlstream.stream.selected_rows import SelectedRows
from sqlstream.stream.transport.padding_collate import PaddingCollate
from sqlstream.transforms.base import Transform
from sqlstream.transforms.packs import PackTokens, collate_packs
from sqlstream.world import World


class StreamingDataset(SelectedRows, IteratedDataset):
    """Streams the rows of an index, with their remote objects on local disk, in one order on any number of ranks and workers.

    Iterate it (alone or in a DataLoader), or index it: `dataset[i]` is row i of the selection, unshuffled, or an error;
    `dataset[0:3]` and `dataset[[5, 7]]` are lists of them.

    Args:
        src: What to index: a table file (`.csv`, `.json`, `.jsonl`, `.parquet`, …), a wildcard, a `.txt` of paths, a directory
            of samples, shards (`.tar`), a database, a table in memory, rows that a function or an iterable gives, or a list of
            these (docs/index.md); local or `s3://`, `http(s)://`, …
        dst: Cache directory, node-local; several datasets and jobs may share it. None: the user's cache directory.
        data_type: For a directory source, which files make a sample (`'image'`, `'video'`, …); put into samples.
        name: Name in `cache stats`; default: the last three parts of `src`.
        shuffle_seed: None: as written; -1: random, agreed by all ranks; else the seed.
        shuffle_block_size: Rows that stay together, for shards: blocks of so many are shuffled, then the rows of
            `shuffle_window` blocks among themselves (docs/determinism.md). `'auto'`: row groups, where they have content, else
            none; None: none.
        shuffle_window: Blocks whose rows are mixed.
        transforms: Callables from sample to sample, or to several samples.
        predownload_transforms: The same, on the bare row, before its URLs are read.
        columns_to_download: Columns whose values are URLs or paths (samples hold local paths there), or content of Parquet
            and shards; None: all content.
        num_downloading_workers: Downloads at a time for each reading process; None: by object size and latency.
        prefetch: Samples planned ahead in each reading process; None: 256, within 1 GiB.
        num_downloading_retries: Tries of a download after the first one.
        none_to_empty_str: Missing values in text columns read as `''`.
        index_col_name: The column that names samples; its values must be there and unique. None: `index` where it is so,
            else the number of the row.
        cache_limit: Most bytes of objects on disk, for all processes together: a count, or `'10gb'`; None: no limit.
            `AS_IT_IS`: the limit in force in `dst`, which is then not changed; of a new directory half of the free space.
        max_size: At most this many samples.
        allow_missing_columns: Rows (or an index) without a downloaded column have None there, instead of failing.
        num_random_access_retries: Tries of `dataset[i]` after the first one when storage fails in a way that may pass.
        print_exceptions, print_traceback: Log every failed sample, and its traceback.
        unaligned_worker_index: Every worker draws its samples from a shuffle of its own (samples may repeat in an epoch).
        infinite_iteration: One iteration goes on over epochs without end.
        index_cols_to_keep: Columns of the index that samples have, beside the key and the downloaded ones; None: all.
        sql_query: `SELECT … FROM dataframe WHERE …` over the index, in SQLite's dialect.
        max_index_files_to_use: At most this many files of a wildcard, braces, or a file of paths; of several sources, of each.
        resolution: Ignored, as in `sds`.
        lazy_index_chunk_size: Leave the rows in their Parquet files, and fetch row groups when they are needed, neighbours
            together up to so many rows (docs/index.md); or in their shards (docs/shards.md). None: build the index whole first.
        lazy_index_num_threads, lazy_index_prefetch_factor: Chunks that a process has under way, and fetches ahead.
        min_num_pending_tasks_thresh: Accepted; our downloads are bounded by `prefetch`.
        storage_options: Backend settings, as fsspec users write them.
        where: One more condition on the rows, on the result of `sql_query` if that is given.
        source_options: How the source is read: `path_prefix`, `delimiter`, `encoding`, `label_column`, `on_source_change`,
            `sql_engine`, …: a `sqlstream.config.SourceOptions`, or a dict of its fields.
        allowed_roots: Local directories and URL prefixes that a remote index may name; others must be on servers.
        weights: How often rows come: an SQL expression over the selected rows, a column, or a number for each; None: equally.
        epoch_size: Samples of an epoch; None: as many as selected rows.
        batch_size: Samples of a rank's batch: with it, global batches are the same on any number of ranks and workers.
        drop_last: Leave out the last, incomplete global batch.
        on_error: `'replace'` a failing sample by another one, `'raise'`, or `'skip'` it.
        max_failure_ratio: Stop when more than this share of the samples fail.
        num_canonical_nodes: Fixed parts of the dataset that stay on their nodes in every epoch.
        world: The place of this process in its job; None: from torch.distributed or the launcher, when iteration starts.
        replication: Number of consecutive ranks that take the same samples (tensor, sequence or pipeline parallelism).
        seed_transforms: While a sample's transforms run, python's, numpy's and torch's global generators are seeded from (seed,
            epoch, position), and restored after; `sqlstream.transforms.rng(sample)` works either way.
        show_progress: Show a bar on a terminal while the index is built.
        eviction_policy: What a full cache evicts first: `'lru'`, `'fifo'`, `'lfu'`, `'belady'` (docs/cache.md); None: as it is.
        on_cache_error: With a broken cache, `'raise'`, or `'bypass'` it: read past it, to private files (docs/cache.md).
        retained_samples: Samples of a DataLoader worker whose paths stay valid; None: by `batch_size` (docs/dataset.md).
        min_free_bytes: Bytes of the cache's file system that stay free, whatever else fills it: a count, or `'10gb'`.
        index_limit: Most bytes of the index files in `dst`, downloads of tables included: a count, a text, `'auto'` (a tenth of
            the file system) or None (no limit). Unused indexes are removed first.
        cache_namespace: A text that parts what different users of one cache see under one URL (docs/cache.md).
        verify_reads: `'crc'`: compare each cached file with its checksum before its first use by a process (docs/cache.md).
        max_age: What came into the cache longer ago goes first, and is fetched again: seconds, or `'7d'` (docs/cache.md).
        providers: `{"asset": "module:function"}`: functions that turn the URLs of a scheme into bytes, a file or another URL
            (docs/storage.md).
        index_store: URL where nodes share built indexes, such as `'s3://bucket/indexes/'` (docs/index.md).
        refresh: `'epoch'`: look at the source again as each epoch begins; its rows of then are streamed (docs/dataset.md).
        join: Tables whose columns the rows get, by a name for each: `{'latents': 's3://…/latents.parquet'}` (docs/index.md).
        on: The column by which they are joined: the source and each table have it, and in a table no value comes twice.
        missing: Of a row without a partner in a table: `'raise'`, `'null'` (None in its columns), or `'drop'` the row.
        shards: What of remote shards is fetched: `'members'` (parts that samples want), `'whole'` shards, or `'auto'`.
        members: What samples have of parts of TAR and ZIP: `'bytes'`, or the `'path'` of a local file (docs/shards.md).
        batches: Which rows share a batch: `Buckets(by, into=…, global_batch_size=…)` for pictures of many sizes, texts of many
            lengths; or a sample: `Packs(length, capacity)` for sequences (docs/batches.md); None: any.

    Raises:
        ConfigError: An option is wrong.
        SourceError: The source cannot be indexed; the message names file, row or column.
        CacheDirectoryError: `dst` cannot be used.
    """

    _pipeline: Pipeline

    def __init__(
        self,
        src: Any,
        dst: str | os.PathLike[str] | None = None,
        data_type: str | None = None,
        name: str | None = None,
        shuffle_seed: int | None = None,
        transforms: Sequence[Transform] | None = None,
        predownload_transforms: Sequence[Transform] | None = None,
        columns_to_download: Sequence[str] | None = None,
        num_downloading_workers: int | None = None,
        prefetch: int | None = None,
        num_downloading_retries: int = 3,
        none_to_empty_str: bool = False,
        index_col_name: str | None = None,
        cache_limit: int | str | AsItIs | None = AS_IT_IS,
        max_size: int | None = None,
        resolution: object = None,  # noqa: ARG002 - sds has it, and ignores it
        allow_missing_columns: bool = False,
        num_random_access_retries: int = 5,
        print_exceptions: bool = False,
        print_traceback: bool = False,
        max_index_files_to_use: int | None = None,
        lazy_index_chunk_size: int | None = None,
        lazy_index_num_threads: int = 3,
        lazy_index_prefetch_factor: int = 3,
        sql_query: str | None = None,
        min_num_pending_tasks_thresh: int | None = None,  # noqa: ARG002 - our engine is bounded by prefetch
        unaligned_worker_index: bool = False,
        infinite_iteration: bool = False,
        index_cols_to_keep: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        where: str | None = None,
        source_options: SourceOptions | Mapping[str, Any] | None = None,
        allowed_roots: Sequence[str] = (),
        weights: WeightsSpec | None = None,
        epoch_size: int | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        on_error: OnError | str = OnError.REPLACE,
        max_failure_ratio: float = 0.1,
        num_canonical_nodes: int = 1,
        world: World | None = None,
        replication: int = 1,
        seed_transforms: bool = True,
        show_progress: bool = True,
        eviction_policy: str | None = None,
        on_cache_error: OnCacheError | str = OnCacheError.RAISE,
        min_free_bytes: int | str = 0,
        index_limit: int | str | None = "auto",
        cache_namespace: str | None = None,
        shuffle_block_size: int | str | None = AUTO_BLOCKS,
        shuffle_window: int = 64,
        retained_samples: int | None = None,
        verify_reads: VerifyReads | str = VerifyReads.NEVER,
        max_age: str | float | None = None,
        providers: Mapping[str, str] | None = None,
        index_store: str | None = None,
        join: Mapping[str, Any] | None = None,
        on: str | None = None,
        missing: str = "raise",
        refresh: str | None = None,
        shards: ShardUnit | str = ShardUnit.AUTO,
        members: MemberForm | str = MemberForm.BYTES,
        batches: Buckets | Packs | None = None,
    ) -> None:
        self.data_type = None if data_type is None else DataSampleType.from_str(data_type).value
        columns = names_of("columns_to_download", columns_to_download)
        roots = names_of("allowed_roots", allowed_roots, "local directories and URL prefixes")
        storage = StorageOptions(
            storage_options={} if storage_options is None else storage_options,
            num_retries=num_downloading_retries,
            num_threads="auto" if num_downloading_workers is None else num_downloading_workers,
            providers={} if providers is None else providers,
        )
        source = SourceOptions.of(source_options)
        lazy = LazyOptions.of(lazy_index_chunk_size, lazy_index_num_threads, lazy_index_prefetch_factor)
        options = DatasetOptions(
            name=name,
            show_progress=show_progress,
            index_store=index_store,
            refresh=refresh,
            transforms=() if transforms is None else transforms,
            predownload_transforms=() if predownload_transforms is None else predownload_transforms,
            storage=storage,
            index=IndexOptions(
                src=os.fspath(src) if isinstance(src, os.PathLike) else src,
                data_type=self.data_type,
                key_column=index_col_name,
                columns_to_download=columns,
                columns_to_keep=None if index_cols_to_keep is None else names_of("index_cols_to_keep", index_cols_to_keep),
                allow_missing_columns=allow_missing_columns,
                sql_query=sql_query,
                max_size=max_size,
                max_index_files=max_index_files_to_use,
                where=where,
                lazy=lazy,
                index_limit=index_limit,
                index_free_bytes=parse_bytes(min_free_bytes, "min_free_bytes") or 0,
                allowed_roots=roots,
                credential_hosts=storage.credential_hosts,
                join=JoinOptions.of(join, on, missing),
                **asdict(source),
            ),
            samples=SampleOptions(
                columns_to_download=columns,
                content_columns=None if columns_to_download is None else columns,
                shards=shards,
                members=members,
                allow_missing_columns=allow_missing_columns,
                none_to_empty_str=none_to_empty_str,
                data_type=self.data_type,
                on_error=on_error,
                max_failure_ratio=max_failure_ratio,
                allowed_roots=roots,
                prefetch=DEFAULT_PREFETCH if prefetch is None else prefetch,
                retained_samples=retained_samples,
                num_random_access_retries=num_random_access_retries,
                print_exceptions=print_exceptions,
                print_traceback=print_traceback,
                seed_transforms=seed_transforms,
                takes_new_parts=source.new_parts is NewParts.TAKE and columns_to_download is None,
            ),
            cache=CacheOptions(
                directory=dst,
                limit=parse_limit(cache_limit, "cache_limit"),
                eviction_policy=eviction_policy,
                on_error=on_cache_error,
                min_free_bytes=min_free_bytes,
                namespace=cache_namespace,
                verify_reads=verify_reads,
                max_age=max_age,
            ),
            order=OrderOptions(
                shuffle_seed=shuffle_seed,
                shuffle_block_size=shuffle_block_size,
                shuffle_window=shuffle_window,
                weights=weights,
                epoch_size=epoch_size,
                batch_size=batch_size,
                drop_last=drop_last,
                num_canonical_nodes=num_canonical_nodes,
                is_endless=infinite_iteration,
                is_unaligned=unaligned_worker_index,
                batches=batches,
                layout=Layout(world=world, replication=replication),
            ),
        )
        self._open(options, partial(open_any, options))

    # -- as a stream --------------------------------------------------------------------------------------------------

    def _check_plain_worker(self) -> None:
        if self._pipeline.options.refresh is not None:
            raise ConfigError(
                "refresh='epoch' has the trainer look at the source, before workers start: use StreamingDataLoader in place of "
                "the DataLoader, or num_workers=0"
            )

    def _check_batches_can_be_weighted(self) -> None:
        """Raise ConfigError if weights of rows in packs, or in buckets, cannot change from an epoch on."""
        order = self._pipeline.options.order
        if isinstance(order.planned_batches, Buckets) and order.num_canonical_nodes > 1:
            raise ConfigError(
                f"reweight() with Buckets and num_canonical_nodes={order.num_canonical_nodes} cannot be had: a bucket's "
                "weights are not divided into parts; leave it out"
            )
        for name, value in (
            ("epoch_size", order.epoch_size),
            ("num_canonical_nodes", order.num_canonical_nodes if order.num_canonical_nodes > 1 else None),
        ):
            if isinstance(order.planned_batches, Packs) and value is not None:
                raise ConfigError(
                    f"reweight() with Packs and {name}={value} cannot be had: the packs of a round of all rows are planned "
                    "together, and may be in several epochs, or on several nodes; leave it out"
                )

    def _default_collate(self) -> Callable[[list[Any]], Any] | None:
        batches = self._pipeline.options.order.batches
        if isinstance(batches, Packs) and isinstance(batches.pack_fn, PackTokens | None):
            return collate_packs
        return PaddingCollate() if isinstance(batches, Buckets) and batches.pads else None

    def _has_equal_epochs(self) -> bool:
        return self._pipeline.options.refresh is None and super()._has_equal_epochs()

    def _prepare(self) -> None:
        refresh_rows(self._pipeline, self._schedule)

    def reweight(self, weights: WeightsSpec | None, at_step: int | None = None, at_epoch: int | None = None) -> None:
        """Change how often rows come; call it on every rank, after the same step. States carry it.

        Args:
            weights: An SQL expression over the selected rows, a column, or a number for each row; None: all the same.
            at_step: From this step of the epoch under way on.
            at_epoch: From this epoch on. None, and no `at_step`: from the next one on, which with `infinite_iteration` may be
                planned already.

        Raises:
            StateError: That step, or epoch, is handed out or planned already; the message names the first possible one.
            ConfigError, QueryError: These are no weights; or the rows may change by `refresh`; or `batches` with `at_step`.
        """
        if self._pipeline.options.refresh is not None:
            raise ConfigError("reweight() changes the weights of rows that stay: leave refresh='epoch' out")
        if self._pipeline.options.order.batches is not None and at_step is not None:
            raise ConfigError(
                f"at_step={at_step} cannot be had with batches=: which batches an epoch has follows from its weights. Leave it "
                "out, then they hold from the next epoch on"
            )
        self._check_batches_can_be_weighted()
        reweight(self._schedule, weights, at_step, at_epoch, self._pipeline.options.samples.prefetch)
