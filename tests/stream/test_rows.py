"""Whether a sample still names a file of the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlstream.stream.rows import holds_path

DIRECTORY = "/cache/data/"
FILE = f"{DIRECTORY}ab/abc.jpg"


class Text(str):
    """A text of another type."""


@pytest.mark.parametrize("value", [FILE, Text(FILE), Path(FILE), [1, FILE], (FILE,), {"x": {"y": FILE}}])
def test_a_path_in_a_sample_is_found_however_it_is_wrapped(value: Any) -> None:
    assert holds_path({"row": 1, "data": b"", "found": value, "text": "a"}, DIRECTORY)
    assert holds_path(value, DIRECTORY)


@pytest.mark.parametrize("value", ["", "/other/abc.jpg", Text("a"), Path("/other"), b"/cache/data/", None, 1, [], {"x": (1,)}])
def test_what_names_no_file_of_the_cache_keeps_none(value: Any) -> None:
    assert not holds_path({"row": 1, "data": b"", "found": value, "text": "a"}, DIRECTORY)
    assert not holds_path(value, DIRECTORY)
