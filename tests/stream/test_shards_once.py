"""Shards that a dataset takes whole cross the network once: they come into the cache as they are indexed."""

from __future__ import annotations

import gzip
import logging
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sqlstream.cache import Cache
from sqlstream.errors import ObjectNotFoundError, SourceError, StorageError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.stream.shards import content, opened, samples, serve, tar_of


def urls(server: FaultyHttpServer, num_shards: int, ending: str = ".tar") -> str:
    return f"{server.url}/data/s-{{000..{num_shards - 1:03}}}{ending}"


def bytes_read(server: FaultyHttpServer) -> int:
    """How many bytes all answers so far had."""
    total = 0
    for request in server.requests():
        size = len(server.objects[request.path])
        span = str(request.range).removeprefix("bytes=").partition("-")
        if request.method == "GET":
            total += size if request.range is None else min(size, int(span[2] or size) + 1) - int(span[0])
    return total


def gets(server: FaultyHttpServer) -> int:
    return sum(request.method == "GET" for request in server.requests())


def stored_bytes(server: FaultyHttpServer) -> int:
    return sum(map(len, server.objects.values()))


@pytest.mark.parametrize("unit", ["auto", "whole"])
def test_index_and_first_epoch_read_each_byte_of_a_tar_once(unit: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 20, 15, num_bytes=2000)
    dataset = opened(urls(server, 20), tmp_path, shards=unit, shuffle_seed=1)
    assert sorted(map(str, map(content, dataset))) == sorted(map(str, expected))
    assert gets(server) == 20
    assert bytes_read(server) == stored_bytes(server)
    used = dataset.cache.statistics()
    assert used.entries == 20
    assert [of_dataset.name for of_dataset in used.datasets] == [dataset.name], "`cache clear --dataset` finds them"
    check_invariants(dataset.cache.path)


def test_of_a_large_tar_some_headers_are_read_first(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 2, 100, num_bytes=100_000)
    dataset = opened(urls(server, 2), tmp_path)
    assert [content(sample) for sample in dataset] == expected
    assert gets(server) <= 2 * 10
    assert bytes_read(server) <= 1.05 * stored_bytes(server)


def test_a_compressed_tar_is_unpacked_once_for_both(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected: list[dict[str, bytes]] = []
    for shard in range(4):
        made = samples(shard, 100, 3000)
        server.objects[f"/data/s-{shard:03}.tar.gz"] = gzip.compress(tar_of(made))
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    dataset = opened(urls(server, 4, ".tar.gz"), tmp_path)
    assert [content(sample) for sample in dataset] == expected
    assert gets(server) == 8, "its first bytes tell how it is compressed"
    assert bytes_read(server) <= 1.05 * stored_bytes(server)


def test_large_members_are_found_by_their_headers_alone(server: FaultyHttpServer, tmp_path: Path) -> None:
    made = [(f"{number}", {"bin": bytes(2 << 20)}) for number in range(6)]
    server.objects["/data/s-000.tar"] = tar_of(made)
    dataset = opened(urls(server, 1), tmp_path)
    assert dataset.cache.statistics().entries == 0
    assert bytes_read(server) <= 0.05 * stored_bytes(server)
    assert [content(sample) for sample in dataset] == [{"__key__": key.encode(), **parts} for key, parts in made]


@pytest.mark.parametrize(
    "options",
    [
        {"shards": "members"},
        {"cache_limit": "300kb"},
        {"cache_limit": "300kb", "shards": "whole"},
        {"where": "cls = 1"},
        {"sql_query": "SELECT * FROM dataframe WHERE cls = 1"},
        {"columns_to_download": ["cls"]},
        {"max_size": 50},
    ],
    ids=str,
)
def test_nothing_comes_into_the_cache_where_whole_shards_have_no_room_or_are_not_known_to_be_wanted(
    options: dict[str, Any], server: FaultyHttpServer, tmp_path: Path
) -> None:
    serve(server, 10, 15, num_bytes=2000)
    dataset = opened(urls(server, 10), tmp_path, **options)
    assert dataset.cache.statistics().entries == 0
    assert all(request.range not in (None, "bytes=0-") for request in server.requests() if request.method == "GET")
    assert len(list(dataset)) == len(dataset)


def _open_and_read(src: str, folder: Path, num_samples: int) -> None:
    dataset = opened(src, folder)
    assert len(list(dataset)) == num_samples


def test_two_processes_that_open_at_once_read_each_byte_once(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 12, 15, num_bytes=2000)
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_open_and_read, args=(urls(server, 12), tmp_path, 180)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0]
    assert bytes_read(server) <= 1.05 * stored_bytes(server)
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_kill_in_the_middle_leaks_nothing_and_what_was_whole_stays(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 12, 15, num_bytes=2000)
    for shard in range(5, 12):
        silent = FaultyAnswer(fault=Fault.HOLD, after_bytes=5000, gate=threading.Event())
        server.script(f"/data/s-{shard:03}.tar", always=silent)
    process = multiprocessing.get_context("fork").Process(target=_open_and_read, args=(urls(server, 12), tmp_path, 180))
    process.start()
    while gets(server) < 12:
        time.sleep(0.005)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    check_invariants(tmp_path / "cache", at_rest=True)
    for shard in range(12):
        server.script(f"/data/s-{shard:03}.tar")
    before = gets(server)
    dataset = opened(urls(server, 12), tmp_path)
    assert [content(sample) for sample in dataset] == expected
    assert 7 <= gets(server) - before <= 12
    check_invariants(dataset.cache.path)


def test_where_others_keep_the_room_shards_are_read_by_ranges_and_it_is_said(
    server: FaultyHttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = serve(server, 4, 15, num_bytes=2000)
    server.objects["/large"] = bytes(960_000)
    with (
        Cache(tmp_path / "cache", limit=1_000_000) as other,
        other.pinned(f"{server.url}/large"),
        caplog.at_level(logging.INFO, logger="sqlstream"),
    ):
        dataset = opened(urls(server, 4), tmp_path, cache_limit=1_000_000)
        assert "has no room in the cache as it is indexed" in caplog.text
        check_invariants(dataset.cache.path)
    assert [content(sample) for sample in dataset] == expected


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (FaultyAnswer(fault=Fault.STATUS, status=404), ObjectNotFoundError, "does not exist"),
        (FaultyAnswer(fault=Fault.STATUS, status=412), StorageError, r"the source .* cannot be read"),
        (FaultyAnswer(fault=Fault.DAMAGE), SourceError, r"s-002\.tar is damaged"),
    ],
    ids=str,
)
def test_errors_of_a_shard_are_those_of_its_source_and_no_pin_stays(
    answer: FaultyAnswer, kind: type[Exception], message: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected = serve(server, 4, 15, num_bytes=2000)
    server.script("/data/s-002.tar", FaultyAnswer(fault=Fault.HOLD), always=answer)
    with pytest.raises(kind, match=message) as caught:
        opened(urls(server, 4), tmp_path)
    assert "s-002.tar" in str(caught.value)
    with Cache(tmp_path / "cache") as cache:
        assert cache.statistics().pinned_entries == 0
    server.script("/data/s-002.tar")
    with opened(urls(server, 4), tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected, "the damaged one comes again"
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_damaged_compressed_shard_is_the_error_of_its_source(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/data/s-000.tar.gz"] = gzip.compress(tar_of(samples(0, 20)))[:-20]
    with pytest.raises(SourceError, match=r"s-000\.tar\.gz is damaged: as gzip"):
        opened(f"{server.url}/data/s-000.tar.gz", tmp_path)
    check_invariants(tmp_path / "cache", at_rest=True)


@pytest.mark.parametrize("lazy", [None, 1])
def test_damage_of_a_copy_in_the_cache_is_told_with_its_cure(
    lazy: int | None, server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected = serve(server, 1, 20)
    options: dict[str, Any] = {"lazy_index_chunk_size": lazy, "shards": "whole", "shuffle_seed": -1}
    with opened(urls(server, 1), tmp_path, **options) as dataset:
        assert len(list(dataset)) == len(expected)
    (copy,) = (path for path in (tmp_path / "cache" / "data").rglob("*") if path.is_file())
    with open(copy, "r+b") as file:
        file.write(b"0ther name")
    shutil.rmtree(tmp_path / "cache" / "index")
    with pytest.raises(SourceError, match=r"s-000\.tar is damaged .*its copy is not: `sqlstream cache clear` has it"):
        opened(urls(server, 1), tmp_path, **options)
    with Cache(tmp_path / "cache") as cache:
        cache.clear()
    with opened(urls(server, 1), tmp_path, **options) as dataset:
        assert sorted(map(str, map(content, dataset))) == sorted(map(str, expected))
