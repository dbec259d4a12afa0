"""The steps of `tarfile_to_samples`, as scripts with one of their own import them (timm, OpenCLIP, diffusers), and `utils`."""

from __future__ import annotations

import gzip
import io
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import sqlstream.compat.webdataset as wds
from sqlstream.compat.webdataset.filters import _shuffle
from sqlstream.compat.webdataset.tariterators import (
    base_plus_ext,
    group_by_keys,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from sqlstream.errors import DamagedShardError
from sqlstream.testing.servers import FaultyHttpServer
from tests.compat.webdataset.kit import KEYS, NUM_ROWS, number_of, numbered
from tests.stream.shards import tar_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

PARTS = {"jpg": b"j" * 600, "cls": b"1"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "cache"))


def grouped(data: Iterable[dict[str, Any]], handler: Any = None) -> Iterator[dict[str, Any]]:
    """As OpenCLIP has it: an extension that comes again begins another sample, and is no error."""
    sample: dict[str, Any] | None = None
    for file in data:
        key, extension = base_plus_ext(file["fname"])
        if key is None or extension is None:
            continue
        if sample is None or key != sample["__key__"] or extension.lower() in sample:
            if sample is not None and valid_sample(sample):
                yield sample
            sample = {"__key__": key, "__url__": file["__url__"]}
        sample[extension.lower()] = file["data"]
    if sample is not None and valid_sample(sample):
        yield sample


def to_samples(shards: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    streams = url_opener(shards, handler=wds.warn_and_continue)
    return grouped(tar_file_expander(streams, handler=wds.warn_and_continue, eof_value=None))


def by_steps(urls: Iterable[str], handler: Callable[[Exception], Any] = wds.reraise_exception) -> list[dict[str, Any]]:
    shards = ({"url": str(url)} for url in urls)
    return [*group_by_keys(tar_file_expander(url_opener(shards, handler=handler), handler=handler), handler=handler)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_reader_of_the_user_takes_each_sample_once(num_workers: int, tmp_path: Path) -> None:
    stages = wds.SimpleShardList(numbered(tmp_path / "s")), wds.split_by_node, wds.split_by_worker, to_samples
    pipeline = wds.DataPipeline(*stages, wds.shuffle(10), wds.map(number_of), wds.batched(5, collation_fn=None))
    taken = [number for batch in DataLoader(pipeline, batch_size=None, num_workers=num_workers) for number in batch]
    assert sorted(torch.as_tensor(taken).tolist()) == list(range(NUM_ROWS))


def test_the_steps_give_the_samples_of_the_stage(tmp_path: Path) -> None:
    path, packed = tmp_path / "a.tar", tmp_path / "a.tar.gz"
    path.write_bytes(tar_of([("d/a", PARTS), ("b", {"JPG": b"2"}), ("c", {"seg.png": b"3"})]))
    packed.write_bytes(gzip.compress(path.read_bytes()))
    samples = by_steps([str(path)])
    assert [sample | {"__local_path__": str(path)} for sample in samples] == list(
        wds.tarfile_samples(iter([{"url": str(path)}]))
    )
    assert samples[:2] == [
        {"__key__": "d/a", "__url__": str(path), **PARTS},
        {"__key__": "b", "__url__": str(path), "jpg": b"2"},
    ]
    assert [sample["__key__"] for sample in by_steps([str(packed)])] == ["d/a", "b", "c"]
    with path.open("rb") as file:
        assert [some["fname"] for some in tar_file_iterator(file)] == ["d/a.jpg", "d/a.cls", "b.JPG", "c.seg.png"]


class Pipe(io.RawIOBase):
    """A file that cannot seek."""

    def __init__(self, data: bytes) -> None:
        self._file = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)


def test_an_archive_that_cannot_seek_is_read() -> None:
    data = tar_of([("a", PARTS)])
    for some in (data, gzip.compress(data)):
        assert {file["fname"]: file["data"] for file in tar_file_iterator(Pipe(some))} == {  # type: ignore[arg-type]
            "a.jpg": PARTS["jpg"],
            "a.cls": b"1",
        }


def test_shards_of_a_store_are_read_through_the_cache() -> None:
    with FaultyHttpServer() as server:
        server.objects["/a.tar"] = tar_of([("a", PARTS), ("b", PARTS)])
        for _ in range(2):
            assert [sample["__key__"] for sample in by_steps([f"{server.url}/a.tar"])] == ["a", "b"]
        assert len(server.requests("/a.tar")) == 1


def test_a_handler_decides_on_what_cannot_be_read_and_a_sample_that_is_cut_is_none(tmp_path: Path) -> None:
    whole, cut, empty = tmp_path / "a.tar", tmp_path / "cut.tar", tmp_path / "empty.tar"
    whole.write_bytes(tar_of([("z", PARTS)]))
    cut.write_bytes(tar_of([("a", PARTS), ("b", PARTS), ("c", PARTS)])[: 2 * 2560 + 1536 + 100])  # within c.cls
    empty.write_bytes(tar_of([]))
    shards = [str(cut), str(tmp_path / "nope.tar"), str(empty), str(whole)]
    assert [sample["__key__"] for sample in by_steps(shards, wds.ignore_and_continue)] == ["a", "b", "z"]
    assert [sample["__key__"] for sample in by_steps(shards, wds.ignore_and_stop)] == ["a", "b"]
    stage = wds.tarfile_to_samples(handler=wds.ignore_and_continue)
    assert [sample["__key__"] for sample in stage(iter([{"url": some} for some in shards]))] == ["a", "b", "z"]
    with pytest.raises(DamagedShardError):
        by_steps(shards)
    with pytest.raises(FileNotFoundError, match="nope"):
        by_steps(shards[1:])


def test_files_that_a_sample_has_twice_are_an_error_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([("a", {"jpg": b"1"}), ("a", {"jpg": b"2", "cls": b"3"})]))
    with pytest.raises(ValueError, match=r"'a.jpg' of .*a.tar has the extension 'jpg', which its sample has already"):
        by_steps([str(path)])
    (sample,) = by_steps([str(path)], wds.ignore_and_continue)
    assert (sample["jpg"], sample["cls"]) == (b"1", b"3")


def test_a_buffer_gives_the_order_of_its_generator() -> None:
    found = list(_shuffle(iter(range(30)), 10, 5, random.Random(3)))
    assert found == list(wds.shuffle(10, 5, random.Random(3))(iter(range(30))))
    assert sorted(found) == list(range(30)) != found


def test_places_and_seeds_are_those_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (*wds.utils.pytorch_worker_info(), wds.utils.pytorch_worker_seed()) == (0, 1, 0, 1, 0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (*wds.utils.pytorch_worker_info(), wds.utils.pytorch_worker_seed()) == (1, 4, 0, 1, 1000)
    assert wds.utils.make_seed(1, 2, 3) == (1 * 31 + 2) * 31 + 3
    assert wds.utils.identity(KEYS) is KEYS
    assert issubclass(wds.utils.PipelineStage, wds.PipelineStage)
