from __future__ import annotations

import re
from pathlib import Path

from sqlstream.config import StorageOptions
from sqlstream.storage.base.settings import known_keys

PAGE = Path(__file__).parents[2] / "docs" / "storage.md"


def documented() -> set[str]:
    """Every key in the first column of a table under `storage_options, key by key`."""
    section = PAGE.read_text().split("## `storage_options`", 1)[1].split("\n## ", 1)[0]
    cells = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
    return {key for cell in cells for key in re.findall(r"`([a-z0-9_]+)`", cell)}


def test_every_key_of_storage_options_is_documented_and_no_other() -> None:
    assert documented() == known_keys()


def test_the_defaults_on_the_page_are_those_of_the_code() -> None:
    text, options = PAGE.read_text(), StorageOptions()
    for key, value in (
        ("connect_timeout", options.connect_timeout_seconds),
        ("read_timeout", options.read_timeout_seconds),
        ("timeout", options.total_timeout_seconds),
    ):
        assert re.search(rf"^\| `{key}` \|[^|]*; {value:.0f}\b", text, re.MULTILINE), key
