"""A table that changes while a run goes on, and a dataset that looks at it again as each epoch begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sqlstream import StreamingDataset


def write(path: Path, *names: str, **columns: Sequence[object]) -> Path:
    """Write a table of a row for each name; another number of names is another size, so another version."""
    rows = [
        ",".join(["index", *columns]),
        *(",".join([name, *map(str, rest)]) for name, *rest in zip(names, *columns.values(), strict=True)),
    ]
    path.write_text("\n".join(rows) + "\n")
    return path


def opened(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    own = {"columns_to_download": [], "show_progress": False, "cache_limit": None, "refresh": "epoch"}
    return StreamingDataset(src, folder / "cache", **{**own, **options})


def names(samples: Any) -> list[str]:
    return [sample["index"] for sample in samples]
