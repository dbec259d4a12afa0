"""Names of sources and of cache directories that are no text, or no path."""

from __future__ import annotations

import glob
import os
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, ObjectNotFoundError, SourceError
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


@pytest.mark.parametrize("folder", ["run[1]", "lr=*?"])
def test_marks_in_the_name_of_the_working_directory_are_no_wildcard(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / folder / "k=1"
    place.mkdir(parents=True)
    (place / "t.csv").write_text("n,image\n7,a.png\n")
    (place / "a.png").write_bytes(b"a")
    monkeypatch.chdir(tmp_path / folder)
    pattern = f"{glob.escape(str(tmp_path / folder))}/k=1/../k=*/*.csv"
    for src in ("k=1/*.csv", "./k=1/../**/t.csv", pattern):
        with StreamingDataset(src, tmp_path / "cache", columns_to_download=[], show_progress=False) as dataset:
            assert [(sample["n"], sample.get("k", 1)) for sample in dataset] == [(7, 1)]
            assert Path(dataset.index.base_url) == (place if src.startswith("k=1") else tmp_path / folder)
    with pytest.raises(ObjectNotFoundError, match=r"k=1/u\.csv does not exist"):
        StreamingDataset("k=1/u.csv", tmp_path / "cache", show_progress=False)


@pytest.mark.parametrize("mark", ["#", "?", "%3F"])
def test_shards_lie_in_folders_of_any_name(mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, first in ((f"a{mark}1", 0), ("b", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"s{mark}.tar").write_bytes(tar_of(samples(first, 2)))
    keys = [key for first in (0, 2) for key, _ in samples(first, 2)]
    with StreamingDataset(f"{tmp_path}/*/*.tar", tmp_path / "cache", show_progress=False) as dataset:
        assert [sample["__key__"] for sample in dataset] == keys
    monkeypatch.chdir(tmp_path / f"a{mark}1")
    for src in (f"s{mark}.tar", f"{tmp_path}/a{mark}1/s{mark}.tar"):
        with StreamingDataset(src, tmp_path / "cache", show_progress=False) as dataset:
            assert [sample["__key__"] for sample in dataset] == keys[:2]
