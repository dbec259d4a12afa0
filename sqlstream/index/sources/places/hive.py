"""Hive partitions: `…/year=2024/label=cat/part-0.parquet` gives every row of the file `year` 2024 and `label` 'cat'. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import unquote

_NULL = "__HIVE_DEFAULT_PARTITION__"
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")


def partitions(paths: Sequence[str], root: str) -> list[dict[str, str | int | None]]:
    """Return the constants of each file; a column is a number where that holds for all files.

    Args:
        paths: URLs or paths of the files.
        root: What they have in common; partitions are looked for below it.

    Example:
        >>> partitions(["d/year=2024/x=a%20b/0.csv", "d/year=2025/x=7/0.csv"], "d/")
        [{'year': 2024, 'x': 'a b'}, {'year': 2025, 'x': '7'}]
    """
    found = [_texts(path.removeprefix(root)) for path in paths]
    texts: dict[str, list[str]] = {}
    for one in found:
        for name, text in one.items():
            if text is not None:
                texts.setdefault(name, []).append(text)
    numbers = {name for name, seen in texts.items() if all(map(_WHOLE.fullmatch, seen))}
    return [{name: int(text) if text is not None and name in numbers else text for name, text in one.items()} for one in found]


def _texts(path: str) -> dict[str, str | None]:
    pairs = [folder.partition("=") for folder in path.split("/")[:-1]]
    return {unquote(name): None if text == _NULL else unquote(text) for name, sign, text in pairs if sign and name}
