"""Which index of a cache directory a command is about."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sqlstream.errors import ConfigError
from sqlstream.storage.base import urls

if TYPE_CHECKING:
    from sqlstream.index.types.models import IndexInfo


def find_indexes(dst: str) -> list[IndexInfo]:
    """Return the indexes of a cache directory, at least one.

    Raises:
        ConfigError: There is none.
    """
    from sqlstream.index.info import list_indexes

    infos = list_indexes(Path(dst) / "index")
    if not infos:
        raise no_index(dst)
    return infos


def no_index(dst: str) -> ConfigError:
    """Return the error of a directory without an index; a source may be named in its place, with its password."""
    shown = urls.redact(dst)
    return ConfigError(f"{shown} holds no index: check the path, or build one with `sqlstream index build SRC {shown}`")


def choose_index(dst: str, beginning: str | None) -> Path:
    """Return the index file whose fingerprint begins so; the only one if nothing is given.

    A selection is positions in an index file; queries run on all rows, so only files can be chosen.

    Raises:
        ConfigError: None, or several.
    """
    infos = find_indexes(dst)
    files = {Path(info.path).stem: Path(info.path) for info in infos if not info.is_lazy}
    if not files:
        raise ConfigError(
            f"{dst} holds lazy indexes only, whose rows are in {infos[0].src}: build one with `sqlstream index build SRC {dst}`"
        )
    chosen = [name for name in files if name.startswith(beginning or "")]
    if len(chosen) != 1:
        problem = "there are several" if beginning is None else f"--index={beginning!r} fits {len(chosen)} of them"
        raise ConfigError(f"which index of {dst}? {problem}: give --index with the start of one of {', '.join(files)}")
    return files[chosen[0]]
