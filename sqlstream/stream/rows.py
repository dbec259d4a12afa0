"""From a row of the index to what must be fetched for it, and to the sample that transforms see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch

from sqlstream.cache.cache import Cache, local_file
from sqlstream.cache.holds import AnyHold
from sqlstream.cache.keys import ObjectRef
from sqlstream.cache.light_hold import LightHold
from sqlstream.config import SampleOptions
from sqlstream.errors import AccessDeniedError, MissingFieldError, SampleError
from sqlstream.storage import urls
from sqlstream.storage.policy import check_allowed, is_below
from sqlstream.stream.chain import Chain
from sqlstream.stream.shares import EpochShare
from sqlstream.transforms.base import Sample
from sqlstream.transforms.reading import lend

_NO_PATHS = frozenset((bytes, int, float, bool, NoneType, torch.Tensor))
"""What most columns hold, and transforms make; asked for first, since every value of every sample is looked at."""
_CONTAINERS = (dict, list, tuple)


@dataclass(slots=True, eq=False)
class Slot:
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

    def want(self) -> None:
        """Work out what it wants, now that its objects or what was found have changed."""
        self.wanted = tuple(self.refs.values()) if self.found is None else (self.stored_refs[self.found],)


class RowReader:
    """Makes slots of rows.

    Args:
        base_url: Where relative values of downloaded columns start.
        key_column: The column that names samples.
        options: What is downloaded, and how missing values read.
        predownload: Applied to each row before its URLs are read.
        index_url: Where the rows come from: a remote index may not name local files.
        text_columns: Columns that hold text, for `none_to_empty_str`.
        dataset: Id of the dataset in the ledger.
    """

    def __init__(
        self,
        base_url: str,
        key_column: str,
        options: SampleOptions,
        predownload: Chain,
        *,
        index_url: str,
        text_columns: Sequence[str],
        dataset: int | None,
    ) -> None:
        self._base_url = base_url
        self._index_url = index_url
        self._is_trusted = not urls.is_remote(index_url)
        self._key_column = key_column
        self._options = options
        self._columns = options.columns_to_download
        self._roots = options.allowed_roots
        self._predownload = predownload
        self._is_plain = predownload.is_empty
        self._dataset = dataset
        downloaded = set(options.columns_to_download)
        self._empty_columns = [c for c in text_columns if c not in downloaded] if options.none_to_empty_str else []

    def slots(self, rows: Sequence[Sample], row_ids: Sequence[int], positions: Sequence[int], epoch: int) -> list[Slot]:
        """Return the slots of rows: one of each; several, or none, if a predownload transform says so."""
        planned: list[Slot] = []
        key_column, data_type = self._key_column, self._options.data_type
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
                self._plan(planned, row, row_id=row_id, epoch=epoch, position=position, place=place)
                continue
            try:
                refs = self._refs(row, row_id)
                planned.append(Slot(epoch, position, row_id, row, refs, tuple(refs.values()), place=place))
            except (SampleError, AccessDeniedError) as error:
                planned.append(Slot(epoch, position, row_id, row, {}, error=error, place=place))
        return planned

    def _plan(self, planned: list[Slot], row: Sample, *, row_id: int, epoch: int, position: int, place: int) -> None:
        """Append the slots that predownload transforms make of one row."""
        num_before = len(planned)
        try:
            outcome = self._predownload.run(row, epoch, position)
            for sample in (outcome,) if isinstance(outcome, dict) else outcome:
                refs = self._refs(sample, row_id)
                planned.append(Slot(epoch, position, row_id, sample, refs, tuple(refs.values()), place=place))
        except (SampleError, AccessDeniedError) as error:
            planned.append(Slot(epoch, position, row_id, row, {}, error=error, place=place))
        for slot in planned[num_before:-1]:
            slot.is_last = False

    def _refs(self, sample: Sample, row_id: int) -> dict[str, ObjectRef]:
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
            if not self._is_trusted:
                check_allowed(url, index_url=self._index_url, allowed_roots=roots)
            if urls.is_remote(url):
                refs[column] = ObjectRef.of(url, dataset=self._dataset)
            else:
                sample[column] = str(urls.local_path(url))
        return refs

    def finish(self, slot: Slot, cache: Cache) -> Sample:
        """Return the sample with the paths of its objects, which are here and pinned.

        Raises:
            ObjectNotFoundError: A local file is not there.
        """
        sample, refs, hold = slot.sample, slot.refs, slot.hold
        if isinstance(hold, LightHold):
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


def holds_path(value: Any, directory: str) -> bool:
    """Return whether a value of a sample is, or contains, a path below `directory`."""
    kind = type(value)
    if kind in _NO_PATHS:
        return False
    if kind is str:
        return bool(value.startswith(directory))
    if isinstance(value, _CONTAINERS):
        for item in value.values() if isinstance(value, dict) else value[:64]:
            kind = type(item)  # most fields of most samples end here: without a call, at a fifth of the time
            if kind is str:
                if item.startswith(directory):
                    return True
            elif kind not in _NO_PATHS and holds_path(item, directory):
                return True
        return False
    return (hasattr(value, "__fspath__") or isinstance(value, str)) and str(value).startswith(directory)
