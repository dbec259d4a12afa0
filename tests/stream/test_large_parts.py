"""Samples of MDS that are large: their values are read one by one, and no value that is not wanted."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import DecodeError, SourceChangedError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.write import MdsWriter

NUM_SAMPLES, LARGE = 6, 300_000
COLUMNS = {"array": "ndarray:float32:64", "image": "bytes", "label": "int", "text": "str"}


def sample_of(number: int) -> dict[str, Any]:
    picture = np.random.default_rng(number).bytes(LARGE + number)
    return {"array": np.full(64, number, np.float32), "image": picture, "label": number - 2, "text": "é" * number}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of large samples."""
    with MdsWriter(str(tmp_path / "mds"), columns=COLUMNS, size_limit=1 << 20) as writer:
        for number in range(NUM_SAMPLES):
            writer.write(sample_of(number))
    return tmp_path / "mds"


def opened(src: str | Path, tmp_path: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(src, tmp_path / "cache", show_progress=False, on_error="raise", cache_limit=None, **options)


def check_all(dataset: StreamingDataset) -> None:
    for number in range(NUM_SAMPLES):
        found, wanted = dataset[number], sample_of(number)
        assert found["array"].tolist() == wanted.pop("array").tolist()
        assert {name: found[name] for name in wanted} == wanted
        assert type(found["image"]) is bytes


@pytest.mark.parametrize("unit", ["members", "whole"])
def test_they_are_the_same_in_both_units_as_locally(folder: Path, unit: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects |= {f"/m/{path.name}": path.read_bytes() for path in folder.iterdir()}
    for src in (folder, f"{server.url}/m/"):
        with opened(src, tmp_path, shards=unit) as dataset:
            check_all(dataset)
            check_all(dataset)  # those that are here already


def test_without_decoding_each_column_has_its_bytes(folder: Path, tmp_path: Path) -> None:
    with opened(folder, tmp_path, source_options={"decode": False}) as dataset:
        for number in range(NUM_SAMPLES):
            found, there = dataset[number], sample_of(number)
            assert found["image"] == there["image"]
            assert found["label"] == struct.pack("<q", there["label"])
            assert found["text"] == there["text"].encode()


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return how many bytes of files this process has read by their place."""
    sizes: list[int] = []
    read = os.pread

    def counted(descriptor: int, size: int, offset: int) -> bytes:
        data = read(descriptor, size, offset)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    return lambda: sum(sizes)


def test_what_is_not_wanted_is_not_read(folder: Path, tmp_path: Path, num_read: Callable[[], int]) -> None:
    with opened(folder, tmp_path, columns_to_download=["label", "text"]) as dataset:
        before = num_read()
        labels = [dataset[number]["label"] for number in range(NUM_SAMPLES)]
        assert num_read() - before < 1000
    assert labels == [sample_of(number)["label"] for number in range(NUM_SAMPLES)]
    with opened(folder, tmp_path) as dataset:
        before = num_read()
        dataset[0]
        assert LARGE < num_read() - before < LARGE + 1000  # once


def first_sample(shard: Path) -> int:
    """Return where the first sample of a shard begins."""
    return int(struct.unpack("<I", shard.read_bytes()[4:8])[0])


def test_a_damaged_sample_is_named(folder: Path, tmp_path: Path) -> None:
    shard = folder / "shard.00000.mds"
    start, status = first_sample(shard), shard.stat()
    with shard.open("r+b") as file:
        file.seek(start)
        file.write(struct.pack("<I", LARGE + 1))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with opened(folder, tmp_path) as dataset, pytest.raises(DecodeError, match=r"shard\.00000\.mds.*row 0"):
        dataset[0]


@pytest.mark.parametrize("how", ["cut", "written to"])
def test_a_shard_that_changes_while_it_is_open_is_an_error_that_says_so(folder: Path, how: str, tmp_path: Path) -> None:
    shard = folder / "shard.00000.mds"
    with opened(folder, tmp_path) as dataset:
        dataset[0]
        if how == "cut":
            os.truncate(shard, first_sample(shard) + 200_000)
        else:
            with shard.open("r+b") as file:
                file.seek(first_sample(shard))
                file.write(bytes(8))
        with pytest.raises(SourceChangedError, match=r"shard\.00000\.mds"):
            dataset[0]
