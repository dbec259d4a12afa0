"""How many requests the table of a remote shard takes."""

from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream.index.sources.base.byte_source import RemoteBytes
from sqlstream.index.sources.shards.layout import Scratch, Walks
from sqlstream.index.sources.shards.reading import AheadBytes, LocalShard
from sqlstream.index.sources.shards.tar_shard import TarShard
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo
from tests.stream.shards import tar_of


class Remote:
    """One object, of which ranges are read and counted."""

    def __init__(self, data: bytes) -> None:
        self.data, self.num_requests = data, 0

    def with_access(self, access: Access) -> Remote:
        return self

    def get_ranges(
        self,
        url: str,
        ranges: Sequence[tuple[int, int]],
        size_bytes: int | None = None,
    ) -> builtins.list[bytes]:
        self.num_requests += len(ranges)
        return [self.data[start:stop] for start, stop in ranges]

    def head(self, url: str) -> ObjectInfo:
        raise NotImplementedError

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        raise NotImplementedError

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("num_members", "num_bytes", "most"), [(2_000, 5_000, 10), (500, 44_000, 12), (5, 3_000_000, 6)], ids=str
)
def test_headers_of_small_members_come_in_blocks_and_those_of_large_ones_alone(
    num_members: int, num_bytes: int, most: int, tmp_path: Path
) -> None:
    remote = Remote(tar_of([(f"{number:05}", {"jpg": bytes(num_bytes)}) for number in range(num_members)]))
    file = SourceFile(url="http://host/s.tar", size_bytes=len(remote.data), etag="1")
    samples = TarShard().samples(file, remote, Scratch(tmp_path.joinpath))
    assert [parts["jpg"].size for parts in samples.parts] == [num_bytes] * num_members
    assert remote.num_requests <= most


@pytest.mark.parametrize(("num_bytes", "most"), [(44_000, 3), (3_000_000, 6)])
def test_a_shard_is_taken_to_be_like_those_before_it_and_one_that_is_not_costs_no_more_requests(
    num_bytes: int, most: int, tmp_path: Path
) -> None:
    scratch = Scratch(tmp_path.joinpath, walks=Walks())
    small = Remote(tar_of([(f"{number:05}", {"jpg": bytes(5_000)}) for number in range(100)]))
    TarShard().samples(SourceFile(url="http://host/a.tar", size_bytes=len(small.data), etag="1"), small, scratch)
    other = Remote(tar_of([(f"{number:05}", {"jpg": bytes(num_bytes)}) for number in range(max(5, 9_000_000 // num_bytes))]))
    samples = TarShard().samples(SourceFile(url="http://host/b.tar", size_bytes=len(other.data), etag="1"), other, scratch)
    assert {parts["jpg"].size for parts in samples.parts} == {num_bytes}
    assert other.num_requests <= most


def test_a_shard_behind_one_with_near_headers_comes_whole_before_any_range_of_it(tmp_path: Path) -> None:
    path, walks = tmp_path / "s.tar", Walks()
    path.write_bytes(bytes(10_000_000))
    remote = Remote(path.read_bytes())
    file = SourceFile(url="http://host/s.tar", size_bytes=10_000_000, etag="1")
    AheadBytes(RemoteBytes(file, remote), lambda: LocalShard(path), walks).read_at(0, 512)
    assert remote.num_requests == 1, "nothing is known yet"
    walks.are_near = True
    whole = AheadBytes(RemoteBytes(file, remote), lambda: LocalShard(path), walks)
    assert whole.read_at(0, 512) == bytes(512)
    assert remote.num_requests == 1
