"""The dataset: an index, a cache and an order behind the interface of `torch.utils.data`."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from sqlstream import distributed
from sqlstream.cache import Cache
from sqlstream.config import IndexOptions, OnError, SampleOptions, StorageOptions, check_at_least, default_cache_directory
from sqlstream.errors import ConfigError
from sqlstream.index.build import open_index
from sqlstream.index.store import Index
from sqlstream.order import Plan, Tail
from sqlstream.records import DataSampleType
from sqlstream.storage import urls
from sqlstream.stream.engine import Engine
from sqlstream.stream.epochs import EpochCounter
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.state import Progress, StreamState
from sqlstream.transforms.base import Sample, Transform
from sqlstream.world import World

logger = logging.getLogger(__name__)

AUTO_THREADS = 16
"""Downloads at a time for each reading process when `num_downloading_workers` is not given."""


class StreamingDataset(IterableDataset[Sample]):
    """Streams the rows of an index, with their remote objects on local disk, in one order on any number of ranks and workers.

    Iterate it (alone or in a DataLoader), or index it: `dataset[i]` is row i of the selection, unshuffled, or an error.
    Parameters have the names of `sds`.

    Args:
        src: What to index: a `.csv`, `.tsv`, `.json`, `.jsonl`, `.ndjson` or `.parquet` file, a wildcard over them, a `.txt` of
            their paths, or a directory of samples (with `data_type`); local or `s3://`, `gs://`, `http(s)://`, …
        dst: Cache directory, node-local; several datasets and jobs may share it. None: the user's cache directory.
        data_type: For a directory source, which files make a sample (`'image'`, `'video'`, …); put into samples.
        name: Name in `cache stats`; default: the last three parts of `src`.
        shuffle_seed: None: as written; -1: random, agreed by all ranks; else the seed.
        transforms: Callables from sample to sample, or to several samples.
        predownload_transforms: The same, on the bare row, before its URLs are read.
        columns_to_download: Columns whose values are URLs or paths; samples hold local paths there. May be empty.
        num_downloading_workers: Downloads at a time for each reading process; None: 16.
        prefetch: Samples planned ahead in each reading process; None: 64.
        num_downloading_retries: Tries of a download after the first one.
        none_to_empty_str: Missing values in text columns read as `''`.
        index_col_name: The column that names samples; its values must be unique.
        cache_limit: Most bytes of objects on disk, for all processes together: a count, or `'10gb'`; None: no limit.
        max_size: At most this many samples.
        allow_missing_columns: Rows (or an index) without a downloaded column have None there, instead of failing.
        num_random_access_retries: Tries of `dataset[i]` after the first one when storage fails.
        print_exceptions: Log every failed sample.
        print_traceback: Log its traceback.
        unaligned_worker_index: Every worker draws its samples from a shuffle of its own (samples may repeat in an epoch).
        infinite_iteration: One iteration goes on over epochs without end.
        index_cols_to_keep: Columns of the index that samples have, beside the key and the downloaded ones; None: all.
        sql_query: `SELECT … FROM dataframe WHERE …` over the index, in SQLite's dialect.
        max_index_files_to_use: At most this many files of a wildcard or list.
        resolution: Ignored, as in `sds`.
        lazy_index_chunk_size: Accepted, so that `sds` scripts run; an error is logged, since the index is built whole.
        lazy_index_num_threads: Accepted; it belongs to the lazy index.
        lazy_index_prefetch_factor: Accepted; it belongs to the lazy index.
        min_num_pending_tasks_thresh: Accepted; our downloads are bounded by `prefetch`.
        storage_options: Backend settings, as fsspec users write them.
        batch_size: Samples of a rank's batch: with it, global batches are the same on any number of ranks and workers.
        drop_last: Leave out the last, incomplete global batch.
        on_error: `'replace'` a failing sample by another one, `'raise'`, or `'skip'` it.
        max_failure_ratio: Stop when more than this share of the samples fail.
        num_canonical_nodes: Fixed parts of the dataset that stay on their nodes in every epoch.
        world: Where this process stands in the job; None: from torch.distributed or the launcher.
        show_progress: Show a bar on a terminal while the index is built.

    Raises:
        ConfigError: An option is wrong.
        SourceError: The source cannot be indexed; the message names file, row or column.
        CacheDirectoryError: `dst` cannot be used.
    """

    def __init__(
        self,
        src: str | os.PathLike[str],
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
        index_col_name: str = "index",
        cache_limit: int | str | None = "100mb",
        max_size: int | None = None,
        resolution: object = None,  # noqa: ARG002 - sds has it, and ignores it
        allow_missing_columns: bool = False,
        num_random_access_retries: int = 5,
        print_exceptions: bool = False,
        print_traceback: bool = False,
        max_index_files_to_use: int | None = None,
        lazy_index_chunk_size: int | None = None,
        lazy_index_num_threads: int = 3,  # noqa: ARG002 - belongs to the lazy index
        lazy_index_prefetch_factor: int = 3,  # noqa: ARG002 - belongs to the lazy index
        sql_query: str | None = None,
        min_num_pending_tasks_thresh: int | None = None,  # noqa: ARG002 - our engine is bounded by prefetch
        unaligned_worker_index: bool = False,
        infinite_iteration: bool = False,
        index_cols_to_keep: Sequence[str] | None = None,
        *,
        storage_options: Mapping[str, object] | None = None,
        batch_size: int | None = None,
        drop_last: bool = False,
        on_error: OnError | str = OnError.REPLACE,
        max_failure_ratio: float = 0.1,
        num_canonical_nodes: int = 1,
        world: World | None = None,
        show_progress: bool = True,
    ) -> None:
        if lazy_index_chunk_size is not None:
            logger.error(
                "lazy_index_chunk_size=%s: this version has no lazy index yet; the whole index is built first, once per node, "
                "and read from disk. Leave the argument out to silence this",
                lazy_index_chunk_size,
            )
        self.data_type = None if data_type is None else DataSampleType.from_str(data_type).value
        columns = names_of("columns_to_download", columns_to_download)
        defaults = SampleOptions()
        options = SampleOptions(
            columns_to_download=columns,
            allow_missing_columns=allow_missing_columns,
            none_to_empty_str=none_to_empty_str,
            data_type=self.data_type,
            on_error=check_on_error(on_error),
            max_failure_ratio=max_failure_ratio,
            prefetch=defaults.prefetch if prefetch is None else prefetch,
            num_random_access_retries=num_random_access_retries,
            print_exceptions=print_exceptions,
            print_traceback=print_traceback,
        )
        index_options = IndexOptions(
            src=os.fspath(src),
            data_type=self.data_type,
            key_column=index_col_name,
            columns_to_download=columns,
            columns_to_keep=None if index_cols_to_keep is None else names_of("index_cols_to_keep", index_cols_to_keep),
            allow_missing_columns=allow_missing_columns,
            sql_query=sql_query,
            max_size=max_size,
            max_index_files=max_index_files_to_use,
        )
        storage = StorageOptions(
            storage_options=dict(storage_options or {}),
            num_retries=num_downloading_retries,
            num_threads=AUTO_THREADS if num_downloading_workers is None else num_downloading_workers,
        )
        self.name = name or default_name(index_options.src)
        self.infinite_iteration = infinite_iteration
        self._unaligned_worker_index = unaligned_worker_index
        self._given_world = world
        cache = Cache(dst or default_cache_directory(), limit=cache_limit, storage_options=storage)
        try:
            self._pipeline = Pipeline(
                name=self.name,
                index=open_index(index_options, cache.path / "index", cache.fetcher, show_progress=show_progress),
                cache=cache,
                options=options,
                transforms=callables("transforms", transforms),
                predownload_transforms=callables("predownload_transforms", predownload_transforms),
            )
            seed = distributed.agree_on_seed(self.world) if shuffle_seed == -1 else shuffle_seed
            self._plan = Plan(
                num_samples=len(self._pipeline.index),
                seed=seed,
                batch_size=batch_size,
                tail=Tail.DROP if drop_last else Tail.FILL if infinite_iteration else Tail.SHORT,
                num_canonical_nodes=num_canonical_nodes,
            )
        except BaseException:
            cache.close()
            raise
        cache.rest()  # the helper has read the index; workers are about to be forked
        self._epochs = EpochCounter()
        self._progress = Progress()
        self._random_access: Engine | None = None

    # -- as a stream --------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Sample]:
        """Return the samples of the next epoch that are this rank's and this worker's."""
        info = get_worker_info()
        world = self.world if info is None else self.world.with_worker(info.id, info.num_workers)
        return self._iterate(world, self._epochs.start())

    def _iterate(self, world: World, epoch: int) -> Iterator[Sample]:
        plan, first_worker = self._plan, 0
        if self._unaligned_worker_index and plan.seed is not None:
            plan = replace(plan, seed=own_seed(plan.seed, world))
        with self._pipeline.engine() as engine:
            while True:
                consumed = self._progress.begin(epoch, world.world_size)
                partition = plan.partition(world, consumed, first_worker)
                if self.infinite_iteration and not partition.num_steps:
                    raise ConfigError(f"an epoch of {len(self)} samples has no step: lower batch_size, or drop_last=False")
                rows_at, replacements = partial(plan.rows_at, epoch), partial(plan.replacements, epoch)
                for sample in engine.stream(epoch, partition.blocks(), rows_at, replacements):
                    self._progress.num_yielded += 1
                    yield sample
                if not self.infinite_iteration:
                    return
                epoch, first_worker = epoch + 1, partition.next_worker

    # -- as a sequence ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of selected rows."""
        return self._plan.num_samples

    def __getitem__(self, index: int) -> Any:
        """Return the sample of selected row `index` (negative from the end), after transforms; a list if they make several.

        The paths in it stay valid for the next 64 accesses of this process.

        Raises:
            IndexError: There is no such row.
            SampleError, StorageError: It cannot be made; never another row's sample.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return the samples of several selected rows, in the order asked; their objects come together."""
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"index {index} is out of range: the dataset has {size} samples")
        if self._random_access is None:
            self._random_access = self._pipeline.make_engine(self._pipeline.options.retained_accesses)
        return self._random_access.rows([index % size for index in indices], self._epochs.next_epoch)

    # -- where it stands ----------------------------------------------------------------------------------------------

    @property
    def world(self) -> World:
        """Where this process stands in its job."""
        return self._given_world or distributed.read_world()

    @property
    def shuffle_seed(self) -> int | None:
        """The seed of the order; the drawn one for `shuffle_seed=-1`."""
        return self._plan.seed

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration will be."""
        return self._epochs.next_epoch

    @property
    def epoch_size(self) -> int:
        """Positions of an epoch."""
        return self._plan.num_samples

    @property
    def cache(self) -> Cache:
        """The cache that the objects go through."""
        return self._pipeline.cache

    @property
    def index(self) -> Index:
        """The index that the rows come from."""
        return self._pipeline.index

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self.set_progress(epoch, 0)

    def set_progress(self, epoch: int, sample_in_epoch: int) -> None:
        """Make the next iteration go on in `epoch` after `sample_in_epoch` samples of the whole job."""
        check_at_least("epoch", epoch, 0)
        check_at_least("sample_in_epoch", sample_in_epoch, 0)
        self._epochs.set_next(epoch)
        self._progress.resume_at(epoch, sample_in_epoch)

    def state_dict(self, num_samples: int | None = None) -> dict[str, object]:
        """Return where the run stands, JSON-able.

        Args:
            num_samples: Samples of the epoch that the whole job has consumed. Needed with DataLoader workers, which run
                ahead of the trainer; without, what this process has yielded counts.
        """
        epoch, consumed = self._progress.position(self.epoch)
        state = StreamState(
            epoch=epoch,
            sample_in_epoch=consumed if num_samples is None else num_samples,
            fingerprint=self.index.fingerprint,
            shuffle_seed=self.shuffle_seed,
        )
        return state.to_dict()

    def load_state_dict(self, state: Mapping[str, object], strict: bool = True) -> None:
        """Go on where `state` says.

        Raises:
            StateError: It is the state of another dataset, query or seed (`strict=False` insists).
        """
        loaded = StreamState.from_dict(state)
        if strict:
            loaded.check(StreamState.from_dict(self.state_dict()))
        self.set_progress(loaded.epoch, loaded.sample_in_epoch)

    def get_identifier_desc(self) -> str:
        """Return a line that names this dataset in logs."""
        return f"{self.name} ({len(self)} samples of {self.index.src})"

    # -- life ---------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give all pins back, end helper process and threads, close all files. Also at the end of a `with` block."""
        self._pipeline.close()

    def __enter__(self) -> StreamingDataset:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Pickle for a worker: it cannot ask torch.distributed for its place, so the trainer's goes along."""
        return {**self.__dict__, "_given_world": self.world, "_random_access": None}


def default_name(src: str) -> str:
    """Return the last three parts of `src`, joined by '-', without extension, as in `sds`."""
    bare = urls.redact(src).rstrip("/")
    parts = [part for part in bare.partition("://")[2].split("/") or [bare] if part] or [
        part for part in bare.split("/") if part
    ]
    return "-".join(parts[-3:]).removesuffix(urls.extension(bare)) or "dataset"


def names_of(option: str, names: Sequence[str] | None) -> tuple[str, ...]:
    """Return column names as a tuple.

    Raises:
        ConfigError: A single text was given, whose letters would be taken for names.
    """
    if isinstance(names, str):
        raise ConfigError(f"{option}={names!r} is a text: give a list of column names, [{names!r}]")
    return tuple(names or ())


def callables(option: str, transforms: Sequence[Transform] | None) -> list[Transform]:
    """Return transforms as a list.

    Raises:
        ConfigError: One of them cannot be called.
    """
    if callable(transforms):
        raise ConfigError(f"{option}={transforms!r} is a single transform: give a list of them")
    for number, transform in enumerate(transforms or ()):
        if not callable(transform):
            raise ConfigError(f"{option}[{number}]={transform!r} is not callable: give callables from sample to sample")
    return list(transforms or ())


def own_seed(seed: int, world: World) -> int:
    """Return a seed of this worker's own (`unaligned_worker_index`)."""
    number = world.rank * world.num_workers + world.worker
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest(), "little")


def check_on_error(value: OnError | str) -> OnError:
    """Return what to do with failing samples.

    Raises:
        ConfigError: An unknown word.
    """
    try:
        return OnError(value)
    except ValueError:
        raise ConfigError(f"on_error={value!r} is unknown: give one of {', '.join(OnError)}") from None
