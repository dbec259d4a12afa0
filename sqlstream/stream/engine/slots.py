"""Slots: samples between their positions and the trainer, and how those of a dataset are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sqlstream.cache import Cache
from sqlstream.cache.session import AnyHold, CacheSession, ObjectRef
from sqlstream.config import SampleOptions
from sqlstream.errors import (
    AccessDeniedError,
    DamagedMemberError,
    ObjectChangedError,
    ObjectNotFoundError,
    SourceChangedError,
    StorageError,
)
from sqlstream.index.buckets import BucketTable
from sqlstream.storage.base.urls import redact, shown
from sqlstream.stream.engine.row_source import RowSource
from sqlstream.stream.run.shares import EpochShare
from sqlstream.transforms.base import BUCKET, Sample

if TYPE_CHECKING:
    from sqlstream.stream.engine.content.row_content import ContentSource, SampleContent
    from sqlstream.stream.engine.packer import Packer
    from sqlstream.stream.engine.row_reader import RowReader
    from sqlstream.stream.engine.stored_samples import CachedChain


@dataclass(eq=False)
class PlannedSample:
    """One sample between its position and the trainer.

    What is not given as it is made is a value of the class until it is set: a window makes many, and few set all of it.
    """

    epoch: int
    """Epoch of its dataset; with the position it seeds its generators."""
    position: int
    """Position in that epoch."""
    row_id: int
    sample: Sample
    """The row; downloaded columns are filled in when their objects are here."""
    refs: dict[str, ObjectRef]
    """Remote objects by the column that names them."""
    recipe: Recipe
    """How it is made."""
    wanted: Sequence[ObjectRef] = ()
    """Objects that must be in the cache before the sample is made: those of the row, or the stored sample that was found."""
    stored_refs: tuple[ObjectRef, ...] = field(default=(), init=False)
    """Objects as which the sample is, or will be, stored: one for each `CacheTransform` of the chain."""
    found: int | None = field(default=None, init=False)
    """Number of the stored sample that it starts from; None: it is made from its objects."""
    stored: Sample | None = field(default=None, init=False)
    """The stored sample, once it is read."""
    next_use: int | None = field(default=None, init=False)
    """After how many further uses of the cache, counted from this one, its objects are used again; None: not known."""
    hold: AnyHold | None = field(default=None, init=False)
    error: Exception | None = None
    """The error of planning; then there is no sample."""
    place: int = 0
    """Place of its row among those that were asked for together; in a stream, place of its position in the share."""
    share: EpochShare | None = field(default=None, init=False)
    """The share of an epoch that it belongs to; None: it was asked for by row."""
    share_position: int = field(default=0, init=False)
    """Position in the epoch of the share; of a mixture it is another than `position`."""
    draw: int = field(default=0, init=False)
    """Number among the draws of that position."""
    part: int = field(default=0, init=False)
    """Number of the part of its row that a pack takes."""
    length: int = field(default=0, init=False)
    """Length of its row, as the index has it; 0: there are no packs."""
    is_last: bool = field(default=True, init=False)
    """No other slot of its position follows."""
    is_single: bool = field(default=False, init=False)
    """Transforms have made exactly one sample of it."""
    content: SampleContent | None = field(default=None, init=False)
    """Where the content is that stays in a Parquet file or a shard; None: it has none."""
    access: list[AnyHold] | None = field(default=None, init=False)
    """Holds that keep the paths of the access that asked for it; None: it is one of a stream."""

    @property
    def content_refs(self) -> tuple[ObjectRef, ...]:
        """The objects that its content is read from."""
        return () if self.content is None else self.content.refs

    @property
    def has_shared_content(self) -> bool:
        """Its content is read from what other samples of its block are read from, too; a stored sample is not."""
        return self.found is None and self.content is not None and self.content.is_shared

    def want(self) -> None:
        """Set what it wants, after a change of its objects or of the stored sample that was found."""
        if self.found is not None:
            self.wanted = (self.stored_refs[self.found],)
        else:
            refs = self.content_refs
            self.wanted = (*self.refs.values(), *refs) if self.refs else refs

    def look_up(self) -> None:
        """Find out anew what it wants, after that could not be held."""
        if self.content is not None:
            self.content.look_up()
            self.want()
        self.recipe.chain.look_up([self])

    def fill(self) -> None:
        """Put into the sample what its objects, which are held, give: paths, and content that is not in its row."""
        if self.refs and self.hold is not None:
            self.sample.update(zip(self.refs, self.hold.paths, strict=False))
        if self.content is not None:
            hold = self.content.fill(self.sample, self.hold, len(self.refs))
            if hold is not self.hold and hold is not None:
                self.hold = hold
                self.sample.update(zip(self.refs, hold.paths, strict=False))

    def with_own_text(self, error: Exception) -> Exception:
        """Return the error of one of its objects, with the row's own text where an object that cannot be had has another URL.

        A path `/mnt/x.jpg` in a remote table is read below the table's directory, which the URL alone does not explain.
        """
        where = error.context.get("url") if isinstance(error, StorageError) else None
        of_shards = [*self.content_refs, *(ref for ref in self.refs.values() if ref.span is not None)]
        if isinstance(error, ObjectChangedError) and any(redact(ref.url) == where for ref in of_shards):
            changed = SourceChangedError(f"{where} changed since it was indexed: open the dataset again")
            if self.content is not None:
                self.content.note_changed()
            changed.__cause__ = error  # no other row stands in for those of another version
            return changed
        if isinstance(error, DamagedMemberError):
            which = f"row {self.row_id}, sample {self.sample.get('__sample_key__')!r}"
            damaged = DamagedMemberError(f"{error} ({which})", **error.context)
            damaged.__cause__ = error
            return damaged
        if not isinstance(error, ObjectNotFoundError | AccessDeniedError):
            return error
        for column, ref in self.refs.items():
            where = redact(ref.url)
            value = self.sample.get(column)
            written = shown(value) if isinstance(value, str) else where  # of a part of a shard it is the size
            if where == error.context.get("url") and (written != where or written != written.strip()):
                text = f"{error} (row {self.row_id} has {written!r} in column {column!r})"
                named = type(error)(text, **error.context)
                named.__cause__ = error  # under its text the ledger has counted the download
                return named
        return error


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recipe:
    """How the samples of one dataset are made; the slots of a window may have several recipes, one for each stream."""

    name: str
    """Name of the dataset, in the report of failures."""
    cache: Cache
    """What its objects come through."""
    options: SampleOptions
    """What becomes of samples that fail."""
    rows: RowSource
    reader: RowReader
    """From rows to slots."""
    chain: CachedChain
    """The transforms of every sample."""
    content: ContentSource | None = None
    """Content that stays in Parquet files or shards; None: the rows have all values."""
    buckets: BucketTable | None = None
    """The bucket of each row, which its sample gets as `__bucket__`; None: there are none."""
    packer: Packer | None = None
    """What makes one sample of the rows of a position; None: each has one row."""
    session: CacheSession = field(init=False)
    """What holds its objects."""
    num_columns: int = field(init=False)
    """Columns that name objects."""
    has_points: bool = field(init=False)
    """The chain stores samples."""

    def __post_init__(self) -> None:
        """Ask cache, reader and chain once, not for every sample."""
        object.__setattr__(self, "session", self.cache.session)
        object.__setattr__(self, "num_columns", self.reader.num_columns)
        object.__setattr__(self, "has_points", self.chain.has_points)

    def slots(self, row_ids: Sequence[int], positions: Sequence[int], epochs: Sequence[int]) -> list[PlannedSample]:
        """Return the slots of rows by id, in the order asked; `place` is that of a slot's row among them.

        Args:
            row_ids: The rows.
            positions: Position of each in its dataset.
            epochs: Epoch of each; both seed its generators.
        """
        content = self.content
        rows, prepared = (self.rows.rows(row_ids), None) if content is None else content.read(row_ids)
        if self.buckets is not None:
            for row, bucket in zip(rows, self.buckets.values_of(row_ids), strict=True):
                row[BUCKET] = bucket
        planned = self.reader.slots(rows, row_ids, positions, epochs, self)
        if self.packer is not None and self.packer.lengths is not None:
            lengths = self.packer.lengths.numbers_of(row_ids)
            for slot in planned:
                slot.length = lengths[slot.place]
        if content is not None:
            content.plan(planned, prepared)
        if self.has_points:
            self.chain.look_up(planned)
        if self.reader.listed is not None or (content is not None and content.names_versions):
            self._drop_other_versions(planned)
        return planned

    def _drop_other_versions(self, planned: Sequence[PlannedSample]) -> None:
        """Remove objects from the cache that are there in another version than their listing, or index, names.

        They are fetched again.
        """
        listed = [ref for slot in planned for ref in slot.wanted if ref.is_listed]
        in_use = self.session.drop_other_versions(listed) if listed else ()
        for slot in planned if in_use else ():
            if any(ref.key in in_use for ref in slot.wanted):
                where = ", ".join(redact(ref.url) for ref in slot.wanted if ref.key in in_use)
                slot.wanted, slot.error = (
                    (),
                    ObjectChangedError(
                        f"{where} is in the cache in another version than its listing names, and that one is in use: "
                        "close the dataset that uses it, or give another dst"
                    ),
                )
