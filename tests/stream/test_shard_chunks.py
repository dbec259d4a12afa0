"""Two users of the seams for shards: samples of TAR shards by members and by whole shards, through index, cache and engine."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectParts, ObjectRef, charged_bytes
from sqlstream.config import LazyOptions
from sqlstream.errors import UnknownLengthError
from sqlstream.index.build.lazy import LazyIndex
from sqlstream.index.file.kept import KeptRows
from sqlstream.index.sources.base.access import local_file, stat_file
from sqlstream.index.sources.base.byte_source import bytes_of
from sqlstream.stream.engine.lazy_rows import LazyRows
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.session import Session
from tests.index.sources import FolderReader, NoReader
from tests.index.tar_chunks import members_of, open_shards
from tests.processes import ROOT

FIXTURES = ROOT / "tests/fixtures/tar"
EXPECTED = json.loads((FIXTURES / "expected.json").read_text())
NAMES = ["bsdtar.tar", "ustar_prefix.tar", "no_end.tar"]


def expected_rows() -> list[tuple[str, str]]:
    """The key of each sample, and the hash of its text, as Python's tarfile has them."""
    listed = [entry for name in NAMES for entry in EXPECTED[name]["tarfile"]]
    return [(entry["name"].removesuffix(".txt"), entry["content"]) for entry in listed if entry["name"].endswith(".txt")]


def found_rows(rows: list[dict[str, object]]) -> list[tuple[object, str]]:
    texts = [row["txt"] for row in rows]
    assert all(isinstance(text, bytes) for text in texts)
    return [(row["key"], hashlib.sha256(bytes(row["txt"])).hexdigest()) for row in rows]  # type: ignore[call-overload]  # bytes


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects |= {f"/{name}": (FIXTURES / name).read_bytes() for name in NAMES}
    return [f"{server.url}/{name}" for name in NAMES]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "cache", limit="10mb") as cache:
        yield cache
    check_invariants(tmp_path / "cache", at_rest=True)


def open_remotely(cache: Cache, urls: list[str], *, is_whole: bool, condition: str | None = None) -> LazyIndex:
    shards = [stat_file(url, cache.fetcher) for url in urls]
    path = cache.path / "index" / f"{'whole' if is_whole else 'members'}.sqlite"
    path.parent.mkdir(exist_ok=True)
    return open_shards(path, shards, cache.fetcher, is_whole=is_whole, condition=condition)


def streamed(index: LazyIndex, cache: Cache) -> list[dict[str, object]]:
    """All rows of an index, fetched through the cache as a dataset brings them."""
    rows = LazyRows(index, cache, LazyOptions(chunk_rows=1), None)
    try:
        return rows.rows(range(index.num_rows))
    finally:
        rows.close()


@pytest.mark.parametrize("name", NAMES)
def test_members_are_where_another_reader_finds_them_and_only_headers_are_read(name: str) -> None:
    reader = FolderReader(FIXTURES)
    shard = replace(local_file(FIXTURES / name), url=f"s3://bucket/{name}")
    found = list(members_of(bytes_of(shard, reader)))
    listed = EXPECTED[name]["tarfile"]
    assert [(member.name, member.start, member.stop) for member in found] == [
        (entry["name"], entry["offset_data"], entry["offset_data"] + entry["size"]) for entry in listed
    ]
    assert len(listed) * 512 <= reader.num_bytes <= (len(listed) + 1) * 512


@pytest.mark.parametrize("is_whole", [False, True], ids=["members", "whole"])
def test_local_shards_are_chunks_that_are_read_in_place(tmp_path: Path, is_whole: bool) -> None:
    shards = [local_file(FIXTURES / name) for name in NAMES]
    index = open_shards(tmp_path / "shards.sqlite", shards, NoReader(), is_whole=is_whole)
    assert (len(index), index.bounds[-1], len(index.bounds)) == (len(expected_rows()), len(expected_rows()), len(NAMES) + 1)
    for opened in (index, pickle.loads(pickle.dumps(index))):
        assert [opened.place_of(number).spans for number in range(len(NAMES))] == [()] * len(NAMES)
        chunks = [opened.read(number, []) for number in range(len(NAMES))]
        assert found_rows([row for chunk in chunks for row in chunk.rows(chunk.row_ids)]) == expected_rows()
        opened.close()


def test_samples_by_members_and_by_whole_shards_are_equal_and_each_byte_is_stored_once_in_each(
    server: FaultyHttpServer, cache: Cache, urls: list[str]
) -> None:
    by_members, whole = (open_remotely(cache, urls, is_whole=is_whole) for is_whole in (False, True))
    rows = streamed(by_members, cache)
    assert found_rows(rows) == expected_rows()
    num_members = sum(len(EXPECTED[name]["tarfile"]) for name in NAMES)
    assert cache.statistics().entries == num_members
    server_asked = len(server.requests())
    assert streamed(by_members, cache) == rows
    assert len(server.requests()) == server_asked, "members are entries: each came once"
    assert streamed(whole, cache) == rows
    assert cache.statistics().entries == num_members + len(NAMES)
    for index in (by_members, whole):
        index.close()


def test_a_filter_stays_above_the_chunks_whatever_they_are(cache: Cache, urls: list[str]) -> None:
    kept: list[list[dict[str, object]]] = []
    for is_whole in (False, True):
        index = open_remotely(cache, urls, is_whole=is_whole, condition="cls = X'31'")
        index.kept_path.write_bytes(bytes(KeptRows.size_bytes(np.diff(index.bounds))))
        with pytest.raises(UnknownLengthError):
            len(index)
        rows = LazyRows(index, cache, LazyOptions(chunk_rows=1), None)
        rows.count(np.arange(len(NAMES)))
        kept.append(rows.rows(rows.ids_at(range(len(index)))))
        rows.close()
        index.close()
    assert kept[0] == kept[1]
    assert 0 < len(kept[0]) < len(expected_rows())
    assert {row["cls"] for row in kept[0]} == {b"1"}


def test_what_samples_hold_of_shards_counts_once(cache: Cache, urls: list[str]) -> None:
    """A group for each sample: of a whole shard they all name the same entry, by members each names its own."""
    session = Session(cache)
    for is_whole in (False, True):
        index = open_remotely(cache, urls, is_whole=is_whole)
        groups = [group for number in range(len(NAMES)) for group in groups_of(index, number, cache, is_whole=is_whole)]
        holds = session.acquire(groups)
        assert len(holds) == len(groups) == len(expected_rows())
        for hold in holds:
            session.wait(hold)
        distinct = {ref.key: ref for group in groups for ref in group}
        assert session.held_bytes == sum(charged_bytes(ref.size_bytes or 0) for ref in distinct.values())
        assert len(distinct) == (len(NAMES) if is_whole else sum(len(group) for group in groups))
        for hold in holds:
            session.release(hold)
        assert session.held_bytes == 0
        index.close()


def groups_of(index: LazyIndex, number: int, cache: Cache, *, is_whole: bool) -> list[list[ObjectRef]]:
    """What each sample of a chunk wants: the shard, or its two members."""
    place = index.place_of(number)
    file = place.file
    refs = [*map(ObjectParts(file.url, file.size_bytes, etag=file.etag, identity=cache.identity).part, place.spans)]
    num_samples = int(np.diff(index.bounds)[number])
    return [refs] * num_samples if is_whole else [refs[2 * at : 2 * at + 2] for at in range(num_samples)]
