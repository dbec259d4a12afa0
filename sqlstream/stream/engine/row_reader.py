"""From rows to slots: what each names, and what of that is an object of the cache."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from sqlstream.cache.session import ListedObject, ObjectParts, ObjectRef
from sqlstream.config import SampleOptions
from sqlstream.errors import MissingFieldError, SampleError, StorageError
from sqlstream.index.named.members import NamedMember, NamedMembers
from sqlstream.index.types.origins import RowJudge
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, Access, is_below
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.urls import shown
from sqlstream.stream.engine.slots import PlannedSample
from sqlstream.transforms.base import Chain, Sample
from sqlstream.transforms.content import is_content, is_struct

if TYPE_CHECKING:
    from sqlstream.stream.engine.slots import Recipe

_Listing: TypeAlias = dict[str, tuple[object, ListedObject]]
"""The entries of a listing for the objects of a row: by column, with the value that named the object."""
_MAX_ARCHIVES = 4096
"""Archives that a process knows at a time; others are looked up again. Arbitrary."""
_NO_MEMBERS: Mapping[str, NamedMember] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownObjects:
    """Facts about the objects of rows beside their URLs."""

    dataset: int | None
    """Id of their dataset in the ledger."""
    identity: Identity | None = None
    """Options that identify them, beside the URL; None: none."""
    in_place: frozenset[str] = frozenset()
    """Columns whose content stays in Parquet files: there is nothing to be downloaded for it."""
    in_shards: frozenset[str] = frozenset()
    """Columns whose content lies in shards: they name no object."""
    listed: Callable[[Sequence[int]], Mapping[int, str]] | None = None
    """Returns entries of listings for the objects of some rows (`Index.listed`); None: there was no listing."""
    named_members: NamedMembers | None = None
    """Members of archives that rows name; None: they name none."""


class RowReader:
    """Makes slots of rows.

    Args:
        key_column: The column that names samples; None: the number of the row does.
        options: What is downloaded, and how missing values read.
        predownload: Applied to each row before its URLs are read.
        judge: Judges what the rows may name, by the table that they come from.
        text_columns: Columns that hold text, for `none_to_empty_str`.
        known: Facts about the objects of rows beside their URLs.
    """

    def __init__(
        self,
        key_column: str | None,
        options: SampleOptions,
        predownload: Chain,
        *,
        judge: RowJudge,
        text_columns: Sequence[str],
        known: KnownObjects,
    ) -> None:
        self._base_url = judge.base_url
        self._located = judge.located
        self._judge = None if judge.allows_all else judge
        self._key_column = key_column
        self._options = options
        self._columns = tuple(name for name in options.columns_to_download if name not in known.in_shards)
        self.num_columns = len(self._columns)
        """Columns that name objects."""
        self._roots = options.allowed_roots
        self._predownload = predownload
        self._is_plain = predownload.is_empty
        self._dataset, self._identity, self._in_place = known.dataset, known.identity, known.in_place
        self._named = known.named_members
        self._parts = None if self._named is None else self._named.parts
        self._archives: dict[tuple[int, Access], ObjectParts] = {}
        """What names the members of the archives that came last, by number."""
        self.listed = known.listed
        """Returns entries of listings (`KnownObjects.listed`)."""
        downloaded = set(self._columns)
        self._empty_columns = [c for c in text_columns if c not in downloaded] if options.none_to_empty_str else []

    def slots(
        self, rows: Sequence[Sample], row_ids: Sequence[int], positions: Sequence[int], epochs: Sequence[int], recipe: Recipe
    ) -> list[PlannedSample]:
        """Return the slots of rows: one of each; several, or none, if a predownload transform says so."""
        planned: list[PlannedSample] = []
        key_column, data_type = self._key_column, self._options.data_type
        entries = {} if self.listed is None else self._entries(rows, row_ids, self.listed(row_ids))
        members = {} if self._named is None else self._named.of(row_ids)
        for place, (row, row_id, position, epoch) in enumerate(zip(rows, row_ids, positions, epochs, strict=True)):
            for column in self._empty_columns:
                if row.get(column) is None:
                    row[column] = ""
            key = None if key_column is None else row.get(key_column)
            row["__sample_key__"] = str(row_id if key is None else key)  # keys of a lazy index may be missing
            row["__row__"] = row_id
            row["__epoch__"] = epoch
            if data_type is not None:
                row["__data_type__"] = data_type
            num_before = len(planned)
            try:
                outcome = row if self._is_plain else self._predownload.run(row, (self._predownload.seed, epoch, position))
                for sample in (outcome,) if isinstance(outcome, dict) else outcome:
                    refs = self._refs(sample, row_id, entries.get(row_id), members.get(row_id, _NO_MEMBERS))
                    planned.append(PlannedSample(epoch, position, row_id, sample, refs, recipe, (*refs.values(),), None, place))
            except (SampleError, StorageError) as error:
                planned.append(PlannedSample(epoch, position, row_id, row, {}, recipe, (), error, place))
            if len(planned) - num_before > 1:
                for slot in planned[num_before:-1]:
                    slot.is_last = False
        return planned

    def _entries(self, rows: Sequence[Sample], row_ids: Sequence[int], listed: Mapping[int, str]) -> dict[int, _Listing]:
        """Return the entries of listings for the objects of rows, by row and column, with the value that names each."""
        entries: dict[int, _Listing] = {}
        for row, row_id in zip(rows, row_ids, strict=True):
            if (text := listed.get(row_id)) is not None:
                objects: dict[str, list[Any]] = json.loads(text)
                named = [column for column in self._columns if column in objects]
                entries[row_id] = {column: (row.get(column), ListedObject._make(objects[column])) for column in named}
        return entries

    def _refs(
        self, sample: Sample, row_id: int, entries: _Listing | None, members: Mapping[str, NamedMember]
    ) -> dict[str, ObjectRef]:
        """Return the remote objects of a sample by column; the paths of local ones are put into it.

        A column that holds content itself, as bytes or in a struct with bytes, names no object.
        """
        refs: dict[str, ObjectRef] = {}
        identity, judge = self._identity, self._judge
        # Starts of URLs that are as they stand in the row, and named without a prefix: those of nearly all remote objects.
        plain = identity.plain if identity is not None and self._parts is None and not members else ()
        for column in self._columns:
            value = sample.get(column)
            if is_plain := type(value) is str and value.startswith(plain) and "::" not in value:
                url = value
            else:
                if type(value) is not str and value is not None:
                    if is_content(value):
                        continue
                    if is_struct(value):
                        value = value["path"]
                if value is None or value == "":
                    if column not in self._in_place:
                        self._note_missing(sample, row_id, column)
                    continue
                named = self._url_or_member(sample, row_id, column, _text_of(sample, row_id, column, value), members)
                if isinstance(named, ObjectRef):
                    refs[column] = named
                    continue
                url = named
            access = OWN
            if judge is not None:
                url, access = judge.judge(row_id, column if self._is_plain else None, url, str(value))
            if is_plain or urls.is_remote(url):
                entry = None if entries is None else entries.get(column)
                listed = entry[1] if entry is not None and entry[0] == value else None  # a transform may name another object
                refs[column] = ObjectRef.of(url, listed=listed, dataset=self._dataset, identity=identity, access=access)
            else:
                sample[column] = urls.local_name(url)
        return refs

    def _url_or_member(
        self, sample: Sample, row_id: int, column: str, url: str, members: Mapping[str, NamedMember]
    ) -> str | ObjectRef:
        """Return the URL or path that a row's text names, or the member of an archive."""
        roots = self._roots
        may_be_member = "::" in url or column in members or self._parts is not None
        if may_be_member and (ref := self._member(sample, row_id, column, url, members.get(column))) is not None:
            return ref
        if url[0].isspace() and urls.is_remote(url.lstrip()):
            raise SampleError(
                f"row {row_id} (sample {sample['__sample_key__']!r}) has {shown(url.lstrip())!r} in column {column!r} "
                f"with a blank before it, so it is no URL: mend the table, or compute a column: trim({column}) AS …"
            )
        # An absolute path below an allowed root is that file; below a remote index it would else be a key of its store.
        if roots and any(is_below(url, root) for root in roots):
            return url
        return urls.join(self._base_url, url)

    def _note_missing(self, sample: Sample, row_id: int, column: str) -> None:
        """Put None into a sample that names no object, if that may be."""
        if not self._options.allow_missing_columns:
            raise MissingFieldError(
                f"row {row_id} (sample {sample['__sample_key__']!r}) has no value in column {column!r}: "
                "mend the index, filter such rows with sql_query, or pass allow_missing_columns=True"
            )
        sample[column] = None

    def _has_parts(self, sample: Sample) -> bool:
        """Return whether a row says which part of its object it has."""
        return self._parts is not None and any(sample.get(name) is not None for name in self._parts)

    def _member(self, sample: Sample, row_id: int, column: str, text: str, found: NamedMember | None) -> ObjectRef | None:
        """Return the member of an archive that a value names, as an object; None: it names none.

        Raises:
            SampleError: No row of the index named this member.
            SourceChangedError: Its archive is local, and is not what was indexed.
        """
        chain, named = urls.chain_of(text), self._named
        if chain is None and not self._has_parts(sample):
            return None
        if named is None or found is None or found.written != named.written(sample, text):
            raise SampleError(
                f"row {row_id} (sample {sample['__sample_key__']!r}) names {shown(text)!r} in column {column!r}, a part of an "
                "archive that was not found with the index: compute such values in sql_query (SELECT *, 'zip://' || … AS "
                f"{column} FROM dataframe), not in predownload_transforms, and leave lazy_index_chunk_size out"
            )
        url, access = self._located(row_id, column if self._is_plain else None, text if chain is None else chain.outer)
        parts = self._parts_of(named, found.archive, url, access)
        return parts.file(found.span, "" if chain is None else urls.extension(text), found.record)

    def _parts_of(self, named: NamedMembers, number: int, url: str, access: Access) -> ObjectParts:
        """Return what names the members of an archive.

        Raises:
            SourceChangedError: It is local, and not what was indexed.
        """
        if (known := self._archives.get((number, access))) is not None:
            return known
        archive, is_remote = named.archive(number), urls.is_remote(url)
        if not is_remote:
            named.check_unchanged(archive, url)
        if len(self._archives) >= _MAX_ARCHIVES:
            self._archives.clear()
        parts = self._archives[number, access] = ObjectParts(
            url,
            archive.size_bytes,
            etag=archive.etag,
            version=archive.etag or archive.content,
            dataset=self._dataset,
            identity=self._identity,
            access=access,
        )
        return parts

    def check_local(self, slot: PlannedSample) -> None:
        """Check that the local files are there that a sample names.

        Raises:
            ObjectNotFoundError: One is not.
        """
        for column in self._columns:
            value = slot.sample.get(column)
            if isinstance(value, str) and column not in slot.refs and not os.path.isfile(value):
                urls.found_path(value)


def _text_of(sample: Sample, row_id: int, column: str, value: object) -> str:
    """Return the text that a value names its object by.

    Raises:
        SampleError: It holds several values.
    """
    if isinstance(value, list | tuple | dict):
        raise SampleError(
            f"row {row_id} (sample {sample['__sample_key__']!r}) has a {type(value).__name__} in column {column!r}, which "
            "names no file: take one value of it in predownload_transforms, or leave the column out of columns_to_download, "
            "and samples have it as it is"
        )
    return str(value)
