"""Cuts samples into shards of a format, and stores them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, Self, TypeVar

from sqlstream.errors import ConfigError, EncodeError, OutputExistsError, StorageError
from sqlstream.progress import progress
from sqlstream.write.base.disk import is_of_the_disk, temporary_error
from sqlstream.write.base.journal import SourcePoint, StoredShard
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.output import FinishedShard, Output

Item = TypeVar("Item")
"""An encoded sample, as a format has it."""
Item_contra = TypeVar("Item_contra", contravariant=True)


class PartFiles(Protocol):
    """Gives files of a shard their paths until they are stored."""

    def part_path(self, name: str) -> Path:
        """Return where the file of that name is written."""


class ShardDraft(Protocol[Item_contra]):
    """A shard that is being written."""

    @property
    def num_samples(self) -> int:
        """Samples in it."""

    def takes(self, item: Item_contra) -> bool:
        """Return whether there is room for a sample; one without samples is not asked.

        Raises:
            EncodeError: It may not follow those that are there.
        """

    def add(self, item: Item_contra) -> None:
        """Add a sample."""

    def finish(self) -> FinishedShard:
        """Complete its part files."""

    def discard(self) -> None:
        """Give it up: close what is open."""


class WriteFormat(Protocol[Item]):
    """A format of shards."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the bytes, as JSON: a resumed writing must have the same."""

    @property
    def index_names(self) -> Sequence[str]:
        """Names of the files of its index."""

    def encode(self, sample: Mapping[str, Any]) -> Item:
        """Encode a sample.

        Raises:
            EncodeError: It cannot be.
        """

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over what stored shards say, before the first sample."""

    def start(self, number: int, files: PartFiles) -> ShardDraft[Item]:
        """Begin a shard."""

    def index(self, shards: Sequence[StoredShard]) -> Mapping[str, bytes]:
        """Return the files of the index, in the order in which they are stored."""


class SampleWriter(Generic[Item]):
    """Writes samples into shards of one format, in order. A context manager: leaving it finishes, an exception leaves no index.

    `with` a writer whose `options` say `resume`, the first `num_samples` samples are stored already: go on behind them.

    Args:
        write_format: The format.
        out: A directory, a URL, or both.
        options: How it is stored.

    Raises:
        OutputExistsError: Something is there.
    """

    def __init__(self, write_format: WriteFormat[Item], out: Out, options: WriteOptions) -> None:
        if not isinstance(options, WriteOptions):
            raise ConfigError(f"options={options!r} are no WriteOptions: give WriteOptions(exist_ok=True), say")
        self._format = write_format
        settings = {**write_format.settings, "part": options.part, "source": options.source}
        self._output = Output(out, options, settings, write_format.index_names)
        try:
            stored = self._output.open(write_format.index([]))
            write_format.adopt(stored)
        except BaseException as error:
            self._output.abandon()
            self._check_disk(error)
            raise
        self.num_samples = sum(shard.num_samples for shard in stored)
        """Samples written; at first those that are stored already."""
        self.point = stored[-1].point if stored else None
        """Where the source goes on behind the last sample, as `write_up_to` was given it."""
        self._number = len(stored)
        self._draft: ShardDraft[Item] | None = None
        self._is_open, self._is_torn = True, False
        self._exit = contextlib.ExitStack()
        self._bar = self._exit.enter_context(progress(None, " samples", "writing", show=options.show_progress))
        self._bar.update(self.num_samples)

    @property
    def place(self) -> str:
        """Where the dataset goes, without credentials."""
        return str(self._output.place)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample; waits while too many shards are on their way.

        Args:
            sample: As the format takes it.

        Raises:
            EncodeError: It cannot be written; it is left out, and the next one may be written.
            StorageError: An earlier shard could not be stored.
        """
        self.write_up_to(None, sample)

    def write_up_to(self, point: SourcePoint | None, sample: Mapping[str, Any]) -> None:
        """Add a sample of a source that leaves out samples, or makes several of one.

        Args:
            point: Where the source goes on behind it; None: with its next sample.
            sample: As the format takes it.

        Raises:
            EncodeError: It cannot be written; it is left out, and the next one may be written.
            StorageError: An earlier shard could not be stored.
        """
        self._check_open()
        if not isinstance(sample, Mapping):
            raise EncodeError(f"a sample is a dict of names and values, and not of type {type(sample).__name__}")
        item = self._format.encode(sample)
        try:
            if self._draft is not None and not self._draft.takes(item):
                self._flush()
            self._is_torn = True  # until the sample is in it as a whole
            if self._draft is None:
                self._draft = self._format.start(self._number, self._output)
            self._draft.add(item)
        except OSError as error:
            self._check_disk(error)
            raise
        self._is_torn = False
        self.point = point
        self.num_samples += 1
        self._bar.update(1)

    def finish(self) -> None:
        """Store what is left, then the index. A second time it does nothing.

        Raises:
            StorageError: A shard or the index could not be stored: there is no index, and the writing can be resumed.
        """
        if not self._is_open:
            return
        self._check_open()
        try:
            if self._draft is not None:
                self._flush()
            self._is_open = False
            self._output.finish(self._format.index, self._store_beside)
        except BaseException as error:
            self.cancel()
            self._check_disk(error)
            raise
        finally:
            self._exit.close()

    def _store_beside(self) -> None:
        """Store what comes behind the index; most formats have nothing."""

    def cancel(self) -> None:
        """End early: full shards are stored, so that the writing can be resumed, and no index is made."""
        self._is_open = False
        try:
            if self._draft is not None:
                with contextlib.suppress(OSError):  # what it still has in memory is thrown away: the disk may be full
                    self._draft.discard()
                self._draft = None
        finally:
            self._exit.close()
            self._output.abandon()

    def _flush(self) -> None:
        assert self._draft is not None
        self._is_torn = True
        shard = self._draft.finish()
        self._draft = None
        self._output.store(self._number, shard, self.point)
        self._number += 1
        self._is_torn = False

    def _check_disk(self, error: BaseException) -> None:
        """Raise StorageError where an error is one of the disk: it says where that is, and that what is there is not lost.

        Raises:
            OutputExistsError: A directory has the name of a file.
        """
        if isinstance(error, IsADirectoryError):
            name = error.filename2 or error.filename
            raise OutputExistsError(f"{name} is a directory, in the place of a file: remove it, or write elsewhere") from error
        if isinstance(error, OSError) and is_of_the_disk(error):
            if self._output.place.local is None:
                raise temporary_error(f"shards of {self.place} wait there for their upload", error) from error
            raise StorageError(
                f"{self.place} cannot be written ({error}): free space there, or look at that disk's health and rights, and "
                "resume; full shards are stored",
                errno=error.errno,
            ) from error

    def _check_open(self) -> None:
        if not self._is_open:
            raise ConfigError(f"the writer of {self.place} has finished: open another one")
        if self._is_torn:
            raise ConfigError(f"the writer of {self.place} failed within a shard: cancel it, and resume with another one")

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Finish; where the body raised, end early."""
        if kind is None:
            self.finish()
        elif self._is_open:
            self.cancel()
