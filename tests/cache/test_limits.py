"""The limit belongs to the directory: who gives none takes what is in force, and what is above a limit goes at once."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import socket
import sqlite3
from pathlib import Path

import pytest

import sqlstream
from sqlstream import AS_IT_IS, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.config import Limit, parse_limit
from sqlstream.errors import ConfigError
from sqlstream.testing.disk import cached_files
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Stage, body, objects, pin_until_told
from tests.cache.kit import destroy, num_gets
from tests.cache.session import Session
from tests.processes import answer_of_forked_child

NUM, SIZE, CHARGE = 20, 10_000, 12_288


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


def filled(directory: Path, urls: list[str], limit: int | str | None = None) -> None:
    with Cache(directory, limit=limit) as cache:
        cache.acquire_many(urls)
        cache.release_many(urls)


def limit_of(directory: Path) -> int | None:
    """What `cache stats` shows."""
    with Cache(directory, create=False) as cache:
        return cache.statistics().limit_bytes


def test_a_limit_is_in_force_before_anything_is_read(directory: Path) -> None:
    with Cache(directory, limit="1gb") as cache:
        assert cache.statistics().limit_bytes == 1 << 30


def test_who_gives_no_limit_takes_what_is_in_force_and_removes_nothing(directory: Path, urls: list[str]) -> None:
    filled(directory, urls, limit="1gb")
    with Cache(directory) as notebook:
        assert notebook.limit_bytes is AS_IT_IS
        with notebook.pinned(urls[0]):
            assert notebook.statistics().limit_bytes == 1 << 30
    assert len(cached_files(directory)) == NUM
    assert limit_of(directory) == 1 << 30


def test_a_dataset_that_gives_no_limit_leaves_a_shared_cache_alone(
    directory: Path, tmp_path: Path, urls: list[str], server: FaultyHttpServer
) -> None:
    """Of 2.4 GB as of 240 KB: the default was a limit of 100 MB, for everybody."""
    with Cache(directory, limit="10gb") as trainer:
        trainer.acquire_many(urls)
        trainer.release_many(urls)
        (tmp_path / "t.csv").write_text(f"index,image\n0,{urls[0]}\n")
        with StreamingDataset(
            f"{tmp_path}/t.csv", str(directory), columns_to_download=["image"], show_progress=False
        ) as dataset:
            assert Path(dataset[0]["image"]).read_bytes() == body("/o/0.bin", SIZE)
        assert trainer.statistics().limit_bytes == 10 << 30
    assert limit_of(directory) == 10 << 30
    assert num_gets(server) == len(cached_files(directory)) == NUM


def test_the_name_of_the_default_is_in_signature_and_repr() -> None:
    assert repr(AS_IT_IS) == str(AS_IT_IS) == "AS_IT_IS"
    assert pickle.loads(pickle.dumps(AS_IT_IS)) is AS_IT_IS is sqlstream.config.AS_IT_IS
    assert parse_limit(AS_IT_IS) is AS_IT_IS
    with pytest.raises(ConfigError, match="limit='AS_IT_IS' is not a size"):
        parse_limit("AS_IT_IS")


@pytest.mark.parametrize("limit", [1 << 30, None, AS_IT_IS], ids=["a size", "none", "as it is"])
def test_a_limit_goes_to_workers_as_it_was_given(directory: Path, limit: Limit) -> None:
    Cache(directory, limit=1 << 40).close()
    with Cache(directory, limit=limit) as cache:
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.limit_bytes == limit
        copy.close()
        assert cache.statistics().limit_bytes == (1 << 40 if limit is AS_IT_IS else limit)


def test_a_forked_child_keeps_the_limit_that_its_parent_gave(directory: Path) -> None:
    with Cache(directory, limit="1gb") as cache:

        def child() -> str:
            Session(cache).owner.run(lambda tx: None)
            return str([owner.limit_bytes for owner in cache.statistics().owners])

        assert answer_of_forked_child(child) == str([1 << 30] * 2)


def test_a_new_directory_without_a_limit_takes_half_of_the_free_space_and_says_so_once(
    directory: Path, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlstream.cache")
    with Cache(directory) as cache:
        cache.acquire_many(urls[:1])
        limit = cache.statistics().limit_bytes
        status = os.statvfs(directory)
    assert limit is not None
    assert limit == pytest.approx(status.f_bavail * status.f_frsize / 2, rel=0.05)
    assert [record.message for record in caplog.records if "half of the free space" in record.message]
    assert not [record for record in caplog.records if record.levelno > logging.INFO], "a healthy start logs no warning"
    caplog.clear()
    for _ in range(2):
        with Cache(directory) as cache, cache.pinned(urls[1]):
            pass
    assert not caplog.records
    assert limit_of(directory) == limit


def test_no_limit_is_a_limit_given(directory: Path) -> None:
    Cache(directory, limit=None).close()
    Cache(directory).close()
    assert limit_of(directory) is None
    with Cache(directory, limit="1mb"), Cache(directory, limit=None) as other:
        assert other.statistics().limit_bytes == 1 << 20  # of those given, the smallest
    Cache(directory, limit=None).close()
    assert limit_of(directory) is None


def test_the_limit_is_known_before_the_first_use(directory: Path) -> None:
    with Cache(directory, limit="1gb") as cache:
        assert limit_of(directory) == cache.statistics().limit_bytes == 1 << 30


def test_the_smallest_limit_of_the_living_holds_and_their_end_raises_none(directory: Path) -> None:
    with Cache(directory) as plain, Cache(directory, limit="2gb") as large:
        assert plain.statistics().limit_bytes == 2 << 30
        with Cache(directory, limit="1gb"):
            assert plain.statistics().limit_bytes == 1 << 30
        assert plain.statistics().limit_bytes == 2 << 30  # of those who gave one, it is the smallest again
        large.close()
        assert plain.statistics().limit_bytes == 2 << 30
        with Cache(directory, limit="3gb"):
            assert plain.statistics().limit_bytes == 3 << 30  # no other living user gave one
    assert limit_of(directory) == 3 << 30


def test_a_limit_of_a_closed_cache_binds_no_other_process_while_its_own_goes_on(
    directory: Path, stage: Stage, urls: list[str]
) -> None:
    with Cache(directory) as plain:
        Cache(directory, limit="1gb").close()
        assert plain.statistics().limit_bytes == 1 << 30
        stage.start(pin_until_told, directory, 2 << 30, urls[:1]).hear()
        assert plain.statistics().limit_bytes == 2 << 30


def test_of_several_that_died_together_the_smallest_limit_stays(directory: Path, stage: Stage, urls: list[str]) -> None:
    others = [stage.start(pin_until_told, directory, limit, urls[:1]) for limit in (1 << 30, 1 << 28, 1 << 29)]
    for other in others:
        other.hear()
    for other in others:
        other.kill()
    assert limit_of(directory) == 1 << 28


@pytest.mark.parametrize("limit_of_the_dead", [4 * CHARGE, 1 << 30], ids=["smaller", "larger"])
def test_a_limit_of_the_dead_is_not_in_force_after_the_last_one_ended(
    directory: Path, stage: Stage, urls: list[str], limit_of_the_dead: int
) -> None:
    with Cache(directory, limit=10 * CHARGE) as cache:
        cache.acquire_many(urls[:8])
        other = stage.start(pin_until_told, directory, limit_of_the_dead, urls[:1])
        other.hear()
        other.kill()
    assert len(cached_files(directory)) == 8
    assert limit_of(directory) == 10 * CHARGE


@pytest.mark.parametrize("by_setter", [False, True])
def test_a_limit_below_what_is_used_evicts_at_once_and_warns_once(
    directory: Path, urls: list[str], caplog: pytest.LogCaptureFixture, by_setter: bool
) -> None:
    filled(directory, urls)
    with Cache(directory, limit="1gb" if by_setter else 8 * CHARGE) as cache:
        if by_setter:
            assert len(cached_files(directory)) == NUM
            cache.limit_bytes = 8 * CHARGE
        assert sum(cached_files(directory).values()) <= 8 * CHARGE
        assert len(cached_files(directory)) == 7  # 95 % of the limit
        check_invariants(directory)
    (said,) = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert f"holds {NUM * CHARGE} bytes, and a limit of {8 * CHARGE} bytes is given" in said
    caplog.clear()
    Cache(directory, limit=8 * CHARGE).close()
    assert not caplog.records


def test_a_limit_given_elsewhere_evicts_down_to_what_is_pinned_names_the_users_and_later_the_rest(
    directory: Path, urls: list[str], stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    filled(directory, urls)
    other = stage.start(pin_until_told, directory, 1 << 30, urls[:12])
    other.hear()
    with Cache(directory, limit=4 * CHARGE) as cache:
        assert len(cached_files(directory)) == 12
        (said,) = [record.message for record in caplog.records]
        assert f"(pid {other.pid})" in said
        other.tell()
        other.hear()
        with cache.pinned(urls[0]):  # a hit, and nothing is downloaded any more
            pass
        with cache.pinned(urls[0]):
            assert len(cached_files(directory)) <= 4


def test_a_rebuilt_ledger_keeps_what_is_here_when_its_limit_is_lost(
    directory: Path, urls: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    filled(directory, urls, limit="1gb")
    destroy(directory)
    with Cache(directory) as cache:
        limit = cache.statistics().limit_bytes
        assert limit is not None
        assert limit > NUM * CHARGE
    assert len(cached_files(directory)) == NUM
    assert any("its limit is lost" in record.message for record in caplog.records)


def test_a_ledger_of_version_4_without_a_limit_has_none(directory: Path, urls: list[str]) -> None:
    from tests.cache.old_ledgers import as_version

    filled(directory, urls)
    as_version(directory, 4)
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as old, old:
        old.execute("UPDATE meta SET limit_bytes = NULL")
    with Cache(directory) as cache:
        assert cache.statistics().limit_bytes is None


def test_the_limit_of_a_process_that_left_its_pins_to_the_trainer_ends_with_it(directory: Path, urls: list[str]) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, Cache(directory, limit="1mb") as cache:

        def leave(fd: int) -> None:
            socket.send_fds(theirs, [b"pins"], [fd])

        def child() -> str:
            session = Session(cache)
            hold = cache.hold((ObjectRef.of(urls[0], identity=cache.identity),))
            session.retain(hold)
            session.hand_over(leave)
            return "handed over"

        assert answer_of_forked_child(child) == "handed over"
        assert cache.statistics().pinned_entries == 1
        cache.limit_bytes = "10mb"
        assert cache.statistics().limit_bytes == 10 << 20
        destroy(directory)
        with cache.pinned(urls[1]):
            assert cache.statistics().limit_bytes == 10 << 20
            assert cache.statistics().pinned_entries == 2
