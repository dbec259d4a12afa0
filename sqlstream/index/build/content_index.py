"""Indexes of which some columns stay in the files of the source: what their readers have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np

from sqlstream.index.file.index import BESIDE, Index
from sqlstream.index.types.models import Column
from sqlstream.order.permute import Int64Array

_ROWS_AT_A_TIME = 65_536


class ContentFiles(Protocol):
    """The files of a source that content stays in. Picklable."""

    @property
    def are_remote(self) -> bool:
        """Some files are not on this machine."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        ...


class ContentIndex(Index, ABC):
    """An index of which some columns stay in the files of its source.

    Args:
        path: The file with all other columns, and with what says where content is.
        files: Where content is.
        options: What else an index takes.
    """

    def __init__(self, path: Path, *, files: Any, **options: Any) -> None:
        super().__init__(path, **options)
        self._files: ContentFiles = files

    @classmethod
    def of(cls, index: Index, files: ContentFiles) -> Self:
        """Return an index as one whose content is read."""
        state = index.__getstate__()
        beside = {name: state.pop(name) for name in BESIDE}
        made = cls(**{**state, "files": files})
        vars(made).update(beside)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "files": self._files}

    def like(self, index: Index) -> Self:
        """Return other rows of the same source with the content that they have."""
        return self.of(index, self._files)

    @property
    def content_columns(self) -> tuple[Column, ...]:
        """The columns whose content stays in its files."""
        return tuple(column for column in self.columns if column.is_in_place)

    @abstractmethod
    def chunks_of(self, row_ids: Sequence[int]) -> Int64Array:
        """Return for each row the number of what its content is read from, -1 for nothing, and its place there: [n, 2]."""

    def block_bounds(self) -> Int64Array:
        """Return where runs of selected rows begin whose content lies together, and the end of the last: [num_runs + 1]."""
        found, last = [np.zeros(1, np.int64)], None
        for start in range(0, len(self), _ROWS_AT_A_TIME):
            row_ids = self.row_ids(np.arange(start, min(start + _ROWS_AT_A_TIME, len(self))))
            chunks = self.chunks_of(row_ids.tolist())[:, 0]  # [n]
            found.append(start + np.flatnonzero(np.diff(chunks, prepend=chunks[0] if last is None else last)))
            last = chunks[-1]
        return np.append(np.concatenate(found), len(self))

    @property
    def is_remote(self) -> bool:
        """Some content is not on this machine."""
        return self._files.are_remote

    @property
    def num_bytes(self) -> int:
        """Size of its files, which is about that of the content."""
        return self._files.num_bytes
