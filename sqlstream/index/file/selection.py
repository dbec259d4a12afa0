"""The files of a selection: which rows of an index file fulfil a query, in its order."""

from __future__ import annotations

import json
from pathlib import Path

from sqlstream.errors import IndexDatabaseError
from sqlstream.index.file.intact import check_plain
from sqlstream.index.types.models import FORMAT_VERSION, SelectionInfo


def positions_path(directory: Path, fingerprint: str) -> Path:
    """Return the file of a selection's row ids."""
    return directory / f"{fingerprint}.positions.npy"


def selection_path(directory: Path, fingerprint: str) -> Path:
    """Return the file that says what a selection is; it is written last, so a selection without it is none."""
    return directory / f"{fingerprint}.selection.json"


def selection_files(directory: Path, selection: SelectionInfo) -> tuple[Path, Path]:
    """Return the files that make a selection beside its index file."""
    return positions_path(directory, selection.fingerprint), selection_path(directory, selection.fingerprint)


def read_selection(path: Path) -> SelectionInfo | None:
    """Return what a selection file says, or None when there is none (or another sqlstream's)."""
    check_plain(path)
    try:
        fields = json.loads(path.read_text())
        return SelectionInfo(**fields) if fields.get("format_version") == FORMAT_VERSION else None
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, AttributeError) as error:
        raise IndexDatabaseError(f"{path} cannot be read ({error}): remove it, it is built again") from error
