"""Shards of a source are indexed side by side: how many, in which order, and what ends it."""

from __future__ import annotations

import contextlib
import gzip
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sqlstream.errors import CacheFullError, ObjectNotFoundError, SourceError
from sqlstream.index.build import build as build_module
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.stream.shards import content, opened, samples, serve, tar_of


def wait_for_gets(server: FaultyHttpServer, num: int) -> set[str]:
    """Wait until so many objects were asked for; return which."""
    while True:
        paths = {request.path for request in server.requests() if request.method == "GET"}
        if len(paths) >= num:
            return paths
        time.sleep(0.005)


def urls(server: FaultyHttpServer, num_shards: int) -> str:
    return f"{server.url}/data/s-{{000..{num_shards - 1:03}}}.tar"


def test_sixteen_shards_are_read_at_a_time_and_rows_come_in_the_order_of_shards(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected = serve(server, 24, 3)
    gate = threading.Event()
    for shard in range(3, 24):
        server.script(f"/data/s-{shard:03}.tar", always=FaultyAnswer(fault=Fault.HOLD, gate=gate))
    found: list[dict[str, bytes]] = []
    reader = threading.Thread(target=lambda: found.extend(map(content, opened(urls(server, 24), tmp_path, shards="members"))))
    reader.start()
    assert wait_for_gets(server, 3 + 16) == {f"/data/s-{shard:03}.tar" for shard in range(19)}
    gate.set()
    reader.join()
    assert found == expected


def test_the_first_shard_that_is_damaged_is_named_though_others_fail_before_it(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    serve(server, 8, 3)
    gate = threading.Event()
    for shard in (2, 3, 5):
        server.objects[f"/data/s-{shard:03}.tar"] = b"no archive" * 1000
    server.script("/data/s-002.tar", FaultyAnswer(fault=Fault.HOLD), FaultyAnswer(fault=Fault.HOLD, gate=gate))
    failed: list[BaseException] = []

    def read() -> None:
        try:
            opened(urls(server, 8), tmp_path)
        except SourceError as error:
            failed.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    wait_for_gets(server, 6)
    gate.set()
    reader.join()
    assert "s-002.tar" in str(failed[0])
    assert not [path for path in (tmp_path / "cache/index").iterdir() if path.suffix != ".lock"]


def test_a_shard_that_is_gone_is_the_error_of_a_source(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 8, 3)
    for shard in (4, 6):
        gone = FaultyAnswer(fault=Fault.STATUS, status=404)
        server.script(f"/data/s-{shard:03}.tar", FaultyAnswer(fault=Fault.HOLD), always=gone)
    with pytest.raises(ObjectNotFoundError, match=r"source .*s-004\.tar does not exist"):
        opened(urls(server, 8), tmp_path)


def test_ctrl_c_ends_it_while_no_shard_answers(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 8, 3)
    silent = FaultyAnswer(fault=Fault.HOLD, gate=threading.Event())
    for shard in range(8):
        server.script(f"/data/s-{shard:03}.tar", always=silent)

    def interrupt() -> None:
        wait_for_gets(server, 2)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=interrupt)
    presser.start()
    with pytest.raises(KeyboardInterrupt):
        opened(urls(server, 8), tmp_path)
    presser.join()
    while any(thread.name.startswith("ahead") for thread in threading.enumerate()):
        time.sleep(0.005)
    assert not [path for path in (tmp_path / "cache/index").iterdir() if path.suffix != ".lock"]
    for shard in range(8):
        server.script(f"/data/s-{shard:03}.tar")
    assert [content(sample) for sample in opened(urls(server, 8), tmp_path)] == expected


def test_shards_that_have_no_room_beside_each_other_are_unpacked_one_at_a_time(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected: list[dict[str, bytes]] = []
    for shard in range(6):
        made = [(f"{shard}", {"bin": bytes(3 << 20)})]
        server.objects[f"/data/s-{shard:03}.tar.gz"] = gzip.compress(tar_of(made))
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    src = [f"{server.url}/data/s-{shard:03}.tar.gz" for shard in range(6)]
    dataset = opened(src, tmp_path, index_limit="6mb", shards="members")
    assert [content(sample) for sample in dataset] == expected
    server.objects["/data/large.tar.gz"] = gzip.compress(tar_of([("a", {"bin": bytes(8 << 20)})]))
    with pytest.raises(CacheFullError, match="index_limit"):
        opened([*src, f"{server.url}/data/large.tar.gz"], tmp_path / "other", index_limit="6mb", shards="members")


def test_a_limit_of_rows_reads_few_shards_beyond_it(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 30, 4)
    dataset = opened(urls(server, 30), tmp_path, max_size=6, shards="members")
    assert len({request.path for request in server.requests() if request.method == "GET"}) <= 6
    assert [content(sample) for sample in dataset] == expected[:6]


def test_a_local_shard_among_remote_ones_is_read_in_its_turn(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = serve(server, 5, 3)
    made = samples(77, 3)
    (tmp_path / "s.tar").write_bytes(tar_of(made))
    src = [*(f"{server.url}/data/s-{shard:03}.tar" for shard in range(4)), str(tmp_path / "s.tar")]
    local = [{"__key__": key.encode(), **parts} for key, parts in made]
    assert [content(sample) for sample in opened([*src, f"{server.url}/data/s-004.tar"], tmp_path)] == [
        *expected[:12],
        *local,
        *expected[12:],
    ]


def test_a_bar_counts_the_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[object, ...]] = []
    counted: list[int] = []

    @contextlib.contextmanager
    def bar(*shown: object) -> Iterator[Any]:
        bars.append(shown[:2])
        yield SimpleNamespace(update=counted.append)

    monkeypatch.setattr(build_module, "progress", bar)
    for shard in range(3):
        (tmp_path / f"s-{shard}.tar").write_bytes(tar_of(samples(shard, 4)))
    opened(str(tmp_path / "s-*.tar"), tmp_path)
    assert bars == [(3, " shards")]
    assert counted == [1, 1, 1]
