"""Names of sources and of cache directories that are no text, or no path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, SourceError
from tests.stream.shards import samples, tar_of

NO_TEXT = os.fsdecode(b"caf\xe9")


def test_a_cache_may_lie_in_a_directory_whose_name_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n\n1\n2\n")
    for _ in range(2):  # built, and found
        with StreamingDataset(f"{tmp_path}/t.csv", tmp_path / NO_TEXT, columns_to_download=[], show_progress=False) as dataset:
            assert [sample["n"] for sample in dataset] == [1, 2]


@pytest.mark.parametrize("src", [f"{NO_TEXT}.tar", "*.tar"])
def test_a_source_whose_name_is_no_text_is_an_error_with_the_cure(src: str, tmp_path: Path) -> None:
    (tmp_path / f"{NO_TEXT}.tar").write_bytes(tar_of(samples(0, 2)))
    with pytest.raises(SourceError, match=r"caf\\udce9\.tar' is not UTF-8: rename it"):
        StreamingDataset(f"{tmp_path}/{src}", tmp_path / "cache", show_progress=False)


def test_a_nul_is_in_no_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="src has a NUL in it"):
        StreamingDataset(f"{tmp_path}/a\0b.csv", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"the cache directory .* has a NUL in it: give another one"):
        StreamingDataset(f"{tmp_path}/t.csv", f"{tmp_path}/a\0b")
