"""From a row of the index to what must be fetched for it, and to the sample that transforms see."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from sqlstream.cache.acquire.holds import AnyHold
from sqlstream.cache.cache import Cache, local_file
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.model.refs import ListedObject, ObjectRef
from sqlstream.config import SampleOptions
from sqlstream.errors import AccessDeniedError, MissingFieldError, ObjectNotFoundError, SampleError
from sqlstream.index.types.origins import Origins
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, Allowed, Rules, is_below
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.urls import redact
from sqlstream.stream.chain.chain import Chain
from sqlstream.stream.run.shares import EpochShare
from sqlstream.transforms.base import Sample
from sqlstream.transforms.reading import lend

_Said: TypeAlias = dict[str, tuple[object, ListedObject]]
"""What a listing said of the objects of a row: by column, with the value that named the object."""


@dataclass(slots=True, eq=False)
class PlannedSample:
    """One sample on its way from a position to the trainer."""

    epoch: int
    position: int
    row_id: int
    sample: Sample
    """The row; downloaded columns are filled in when their objects are here."""
    refs: dict[str, ObjectRef]
    """Remote objects by the column that names them."""
    wanted: Sequence[ObjectRef] = ()
    """What must be in the cache before its sample can be made: its objects, or the stored sample that was found."""
    stored_refs: tuple[ObjectRef, ...] = ()
    """Where its sample is, or will be, stored: one for each `CacheTransform` of the chain."""
    found: int | None = None
    """Number of the stored sample that it starts from; None: it is made from its objects."""
    stored: Sample | None = None
    """The stored sample, once it is read."""
    hold: AnyHold | None = None
    error: Exception | None = None
    """Why it cannot become a sample; found while planning."""
    place: int = 0
    """Which of the rows asked for together it comes from; in a stream, which position of the share."""
    share: EpochShare | None = None
    """The share of an epoch that it belongs to; None: it was asked for by row."""
    is_last: bool = True
    """No other slot of its position follows."""
    is_single: bool = False
    """Transforms have made one sample of it."""
    access: list[AnyHold] | None = None
    """Holds that keep the paths of the access that asked for it; None: it is one of a stream."""

    def want(self) -> None:
        """Work out what it wants, now that its objects or what was found have changed."""
        self.wanted = tuple(self.refs.values()) if self.found is None else (self.stored_refs[self.found],)

    def with_own_text(self, error: Exception) -> Exception:
        """Return the error of one of its objects, with the row's own text where an object that is not there has another URL.

        A path `/mnt/x.jpg` in a remote table is read below the table's directory, which the URL alone does not explain.
        """
        if not isinstance(error, ObjectNotFoundError):
            return error
        for column, ref in self.refs.items():
            where = redact(ref.url)
            written = redact(str(self.sample.get(column))).partition("?")[0]  # a relative one may be signed, too
            if where == error.context.get("url") and written != where:
                text = f"{error} (row {self.row_id} has {written!r} in column {column!r})"
                named = ObjectNotFoundError(text, **error.context)
                named.__cause__ = error  # under its text the ledger has counted the download
                return named
        return error


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownObjects:
    """What is known of the objects of rows beside their URLs."""

    dataset: int | None
    """Id of their dataset in the ledger."""
    identity: Identity | None = None
    """What else identifies them; None: nothing."""
    listed: Callable[[Sequence[int]], Mapping[int, str]] | None = None
    """What listings said of the objects of some rows (`Index.listed`); None: nothing."""


@dataclass(frozen=True, slots=True)
class RowJudge:
    """What the rows of an index may name."""

    origins: Origins
    rules: Rules

    @property
    def allows_all(self) -> bool:
        """Whether the user wrote every row, and credentials go everywhere."""
        return self.origins.are_own and not self.rules.credential_hosts

    def judge(self, row_id: int, url: str, written: str) -> Allowed:
        """Return what is read for a row's URL, and how; `written` is the row's own text.

        Raises:
            AccessDeniedError: The row may not name it.
        """
        origins = self.origins
        return self.rules.judge(url, origins.of(row_id), named_by=lambda: origins.table_of(row_id), written=written)


class RowReader:
    """Makes slots of rows.

    Args:
        base_url: Where relative values of downloaded columns start.
        key_column: The column that names samples.
        options: What is downloaded, and how missing values read.
        predownload: Applied to each row before its URLs are read.
        judge: What the rows may name, by who wrote them.
        text_columns: Columns that hold text, for `none_to_empty_str`.
        known: What is known of the objects of rows beside their URLs.
    """

    def __init__(
        self,
        base_url: str,
        key_column: str,
        options: SampleOptions,
        predownload: Chain,
        *,
        judge: RowJudge,
        text_columns: Sequence[str],
        known: KnownObjects,
    ) -> None:
        self._base_url = base_url
        self._judge = None if judge.allows_all else judge
        self._key_column = key_column
        self._options = options
        self._columns = options.columns_to_download
        self._roots = options.allowed_roots
        self._predownload = predownload
        self._is_plain = predownload.is_empty
        self._dataset, self._identity, self._listed = known.dataset, known.identity, known.listed
        downloaded = set(options.columns_to_download)
        self._empty_columns = [c for c in text_columns if c not in downloaded] if options.none_to_empty_str else []

    def slots(
        self, rows: Sequence[Sample], row_ids: Sequence[int], positions: Sequence[int], epoch: int
    ) -> list[PlannedSample]:
        """Return the slots of rows: one of each; several, or none, if a predownload transform says so."""
        planned: list[PlannedSample] = []
        key_column, data_type = self._key_column, self._options.data_type
        said = {} if self._listed is None else self._said(rows, row_ids, self._listed(row_ids))
        for place, (row, row_id, position) in enumerate(zip(rows, row_ids, positions, strict=True)):
            for column in self._empty_columns:
                if row.get(column) is None:
                    row[column] = ""
            row["__sample_key__"] = str(row.get(key_column, row_id))
            row["__row__"] = row_id
            row["__epoch__"] = epoch
            if data_type is not None:
                row["__data_type__"] = data_type
            if not self._is_plain:
                self._plan(planned, row, said.get(row_id), row_id=row_id, epoch=epoch, position=position, place=place)
                continue
            try:
                refs = self._refs(row, row_id, said.get(row_id))
                planned.append(PlannedSample(epoch, position, row_id, row, refs, tuple(refs.values()), place=place))
            except (SampleError, AccessDeniedError) as error:
                planned.append(PlannedSample(epoch, position, row_id, row, {}, error=error, place=place))
        return planned

    def _said(self, rows: Sequence[Sample], row_ids: Sequence[int], listed: Mapping[int, str]) -> dict[int, _Said]:
        """Return what a listing said of the objects of rows, by row and column, with the value that names each."""
        said: dict[int, _Said] = {}
        for row, row_id in zip(rows, row_ids, strict=True):
            if (text := listed.get(row_id)) is not None:
                objects: dict[str, list[Any]] = json.loads(text)
                named = [column for column in self._columns if column in objects]
                said[row_id] = {column: (row.get(column), ListedObject._make(objects[column])) for column in named}
        return said

    def _plan(
        self,
        planned: list[PlannedSample],
        row: Sample,
        said: _Said | None,
        *,
        row_id: int,
        epoch: int,
        position: int,
        place: int,
    ) -> None:
        """Append the slots that predownload transforms make of one row."""
        num_before = len(planned)
        try:
            outcome = self._predownload.run(row, epoch, position)
            for sample in (outcome,) if isinstance(outcome, dict) else outcome:
                refs = self._refs(sample, row_id, said)
                planned.append(PlannedSample(epoch, position, row_id, sample, refs, tuple(refs.values()), place=place))
        except (SampleError, AccessDeniedError) as error:
            planned.append(PlannedSample(epoch, position, row_id, row, {}, error=error, place=place))
        for slot in planned[num_before:-1]:
            slot.is_last = False

    def _refs(self, sample: Sample, row_id: int, said: _Said | None) -> dict[str, ObjectRef]:
        """Return the remote objects of a sample by column; the paths of local ones are put into it."""
        refs: dict[str, ObjectRef] = {}
        roots, base_url = self._roots, self._base_url
        for column in self._columns:
            value = sample.get(column)
            if value is None or value == "":
                if not self._options.allow_missing_columns:
                    raise MissingFieldError(
                        f"row {row_id} (sample {sample['__sample_key__']!r}) has no value in column {column!r}: "
                        "mend the index, filter such rows with sql_query, or pass allow_missing_columns=True"
                    )
                sample[column] = None
                continue
            url = str(value)
            # An absolute path below an allowed root is that file; below a remote index it would else be a key of its store.
            if not (roots and any(is_below(url, root) for root in roots)):
                url = urls.join(base_url, url)
            access = OWN
            if self._judge is not None:
                url, access = self._judge.judge(row_id, url, str(value))
            if urls.is_remote(url):
                listed = None
                if said and column in said and said[column][0] == value:  # else a transform has named another object
                    listed = said[column][1]
                refs[column] = ObjectRef.of(url, listed=listed, dataset=self._dataset, identity=self._identity, access=access)
            else:
                sample[column] = str(urls.local_path(url))
        return refs

    def finish(self, slot: PlannedSample, cache: Cache) -> Sample:
        """Return the sample with the paths of its objects, which are here and pinned.

        Raises:
            ObjectNotFoundError: A local file is not there.
        """
        sample, refs, hold = slot.sample, slot.refs, slot.hold
        if isinstance(hold, ReadHold):
            lend(hold)
            sample.update(zip(refs, hold.paths))  # noqa: B905 (both are those of `slot.wanted`; a fifth slower)
        else:
            for column, ref in refs.items():
                sample[column] = cache.file_of(ref, hold)
        if len(refs) < len(self._columns):
            for column in self._columns:
                if column not in refs and sample.get(column) is not None:
                    local_file(sample[column])
        return sample
