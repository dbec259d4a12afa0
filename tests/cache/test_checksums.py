"""Files whose bytes change at equal size: seen where a user asks for it, removed, fetched again and counted."""

from __future__ import annotations

import pickle
import zlib
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.acquire.checksums import num_without
from sqlstream.cache.admin.clear import clear
from sqlstream.cache.files.read_hold import ReadHold
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import CacheError, ConfigError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.actors import Stage, begin_and_wait, body, objects, pin_until_told
from tests.cache.kit import num_gets
from tests.cache.session import Session
from tests.processes import answer_of_forked_child
from tests.stream.shards import content, serve

NUM, SIZE = 8, 10_000


@pytest.fixture
def urls(server: FaultyHttpServer) -> list[str]:
    server.objects.update(objects([SIZE] * NUM))
    return [f"{server.url}/o/{i}.bin" for i in range(NUM)]


def fill(directory: Path, urls: list[str], verify_reads: str) -> list[Path]:
    with Cache(directory, verify_reads=verify_reads) as cache:
        paths = cache.acquire_many(urls)
        cache.release_many(urls)
        return paths


def flip(path: Path) -> None:
    """Change one bit; size and times stay."""
    with open(path, "r+b") as file:
        file.seek(SIZE // 2)
        byte = file.read(1)[0]
        file.seek(SIZE // 2)
        file.write(bytes([byte ^ 1]))


def test_a_changed_file_is_removed_fetched_again_and_counted(
    directory: Path, urls: list[str], server: FaultyHttpServer, caplog: pytest.LogCaptureFixture
) -> None:
    paths = fill(directory, urls, "crc")
    flip(paths[3])
    with Cache(directory) as cache, cache.pinned(urls[3]) as path:  # never is the default
        assert path.read_bytes() != body("/o/3.bin", SIZE)
    with Cache(directory, verify_reads="crc") as cache:
        for url, path in zip(urls, cache.acquire_many(urls), strict=True):
            assert path.read_bytes() == body(url.removeprefix(server.url), SIZE)
        cache.release_many(urls)
        assert cache.statistics().quarantined == 1
    assert num_gets(server) == NUM + 1
    assert "does not have the bytes that came: fetching it again" in caplog.text
    check_invariants(directory, at_rest=True)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("reads", [True, False], ids=["read lock", "rows"])
def test_a_dataset_gives_no_changed_bytes(
    directory: Path, tmp_path: Path, urls: list[str], server: FaultyHttpServer, workers: int, reads: bool
) -> None:
    from torch.utils.data import DataLoader

    (tmp_path / "t.csv").write_text("index,file\n" + "".join(f"{i},{url}\n" for i, url in enumerate(urls)))
    paths = fill(directory, urls, "crc")

    def read(sample: dict[str, object]) -> dict[str, object]:
        data = Path(str(sample["file"])).read_bytes()
        return {**sample, "data": data, **({"file": ""} if reads else {})}

    with StreamingDataset(
        f"{tmp_path}/t.csv", str(directory), columns_to_download=["file"], transforms=[read], verify_reads="crc"
    ) as dataset:
        for _ in range(2):  # the second epoch compares nothing again in the same process, and has nothing to find
            flip(paths[5])
            loader = DataLoader(
                dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
            )
            data = {int(sample["index"]): sample["data"] for sample in loader}
            assert data == {i: body(f"/o/{i}.bin", SIZE) for i in range(NUM)}
            if not workers:
                break
        assert dataset.cache.statistics().quarantined == (2 if workers else 1)


def test_a_changed_shard_that_this_process_keeps_open_is_fetched_again(directory: Path, server: FaultyHttpServer) -> None:
    """It is read under a lock that stays from sample to sample, and no other process uses it."""
    expected = serve(server, 1, 8)
    options: Any = {"shards": "whole", "verify_reads": "crc", "show_progress": False}
    with StreamingDataset(f"{server.url}/data/s-000.tar", directory, **options) as dataset:
        assert [content(dataset[i]) for i in range(8)] == expected
    (shard,) = directory.glob("data/*/*")
    flip(shard)
    with StreamingDataset(f"{server.url}/data/s-000.tar", directory, **options) as dataset:
        assert [content(dataset[i]) for i in range(8)] == expected
        assert dataset.cache.statistics().quarantined == 1


def test_a_file_without_a_checksum_gets_one_at_the_first_look(directory: Path, urls: list[str]) -> None:
    paths = fill(directory, urls, "never")
    with Cache(directory) as cache:
        assert num_without(Session(cache).ledger) == NUM
    fill(directory, urls, "crc")
    with Cache(directory) as cache:
        assert num_without(Session(cache).ledger) == 0
    flip(paths[0])
    with Cache(directory, verify_reads="crc") as cache, cache.pinned(urls[0]) as path:
        assert path.read_bytes() == body("/o/0.bin", SIZE)


def test_a_checksum_that_is_noted_late_is_none_of_the_object_that_came_since(
    directory: Path, urls: list[str], server: FaultyHttpServer, stage: Stage
) -> None:
    fill(directory, urls, "never")
    with Cache(directory, verify_reads="crc") as cache:
        session, ref = Session(cache), ObjectRef.of(urls[0], identity=cache.identity)
        with cache.pinned(urls[1]):  # from here on the ledger knows this process, and it may read under locks
            pass
        session.flush()
        hold = session.acquire_one([ref], for_reading=True)
        assert isinstance(hold, ReadHold)
        session.stop_background()  # which writes what waits, now and then
        assert session.claim(hold)
        session.release(hold)
        server.objects["/o/0.bin"] = b"other" * (SIZE // 5)
        clear(session.ledger, session.disk, dataset=None, older_than_seconds=None, index=False)
        stage.start(begin_and_wait, directory, None, urls[0]).end()
        session.flush()
    with Cache(directory, verify_reads="crc") as cache:
        with cache.pinned(urls[0]) as path:
            assert path.read_bytes() == server.objects["/o/0.bin"]
        assert cache.statistics().quarantined == 0
        assert cache.verify(deep=True) == []
    assert num_gets(server) == NUM + 1


def test_each_process_compares_a_file_once(directory: Path, urls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fill(directory, urls, "crc")
    compared: list[int] = []
    crc32 = zlib.crc32

    def counted_crc32(data: bytes, value: int = 0) -> int:
        compared.append(len(data))
        return crc32(data, value)

    monkeypatch.setattr(zlib, "crc32", counted_crc32)
    with Cache(directory, verify_reads="crc") as cache:

        def use() -> str:
            for _ in range(3):
                cache.acquire_many(urls[:2])
                cache.release_many(urls[:2])
            return str(compared)

        assert use() == str([SIZE] * 2)
        Session(cache).flush()
        assert answer_of_forked_child(use) == str([SIZE] * 4), "another process looks for itself"


def test_a_file_that_was_written_to_since_it_was_compared_is_compared_again(directory: Path, urls: list[str]) -> None:
    fill(directory, urls, "crc")
    with Cache(directory, verify_reads="crc") as cache:
        with cache.pinned(urls[0]) as path:
            flip(path)
        with cache.pinned(urls[0]) as path:
            assert path.read_bytes() == body("/o/0.bin", SIZE)
        assert cache.statistics().quarantined == 1


def fetch_anew(_: Connection, directory: Path, urls: list[str]) -> int:
    with Cache(directory, verify_reads="crc") as cache:
        num_removed = cache.clear().removed_entries
        cache.acquire_many(urls)
    return num_removed


@pytest.mark.parametrize("comes_from", ["disk", "server"])
def test_a_file_that_another_process_has_fetched_since_is_compared(
    directory: Path, urls: list[str], stage: Stage, comes_from: str
) -> None:
    if comes_from == "disk":
        fill(directory, urls, "crc")
    with Cache(directory, verify_reads="crc") as cache:
        paths = cache.acquire_many(urls)
        cache.release_many(urls)
        Session(cache).flush()
        assert stage.run_all(fetch_anew, [(directory, urls)]) == [NUM]
        flip(paths[2])
        with cache.pinned(urls[2]) as path:
            assert path.read_bytes() == body("/o/2.bin", SIZE)


def test_a_changed_file_that_another_process_pins_is_an_error(directory: Path, urls: list[str], stage: Stage) -> None:
    paths = fill(directory, urls, "crc")
    other = stage.start(pin_until_told, directory, None, urls[:1])
    other.hear()
    flip(paths[0])
    with Cache(directory, verify_reads="crc") as cache:
        with pytest.raises(CacheError, match="another process uses it: find out what writes into"):
            cache.acquire_many(urls)
        assert paths[0].exists()
        flip(paths[0])
        other.tell()
        other.hear()


def test_verify_deep_finds_and_mends_what_changed(directory: Path, urls: list[str], server: FaultyHttpServer) -> None:
    paths = fill(directory, urls, "crc")
    flip(paths[2])
    with Cache(directory) as cache:
        assert cache.verify() == []
        (found,) = cache.verify(deep=True)
        assert (found.kind, found.url, found.repaired) == ("wrong content", urls[2], False)
        with cache.pinned(urls[2]):
            (found,) = cache.verify(deep=True, repair=True)
            assert not found.repaired
        (found,) = cache.verify(deep=True, repair=True)
        assert found.repaired
        assert cache.verify(deep=True) == []
        assert not paths[2].exists()
        with cache.pinned(urls[2]) as path:
            assert path.read_bytes() == body("/o/2.bin", SIZE)
    assert num_gets(server) == NUM + 1


def test_what_is_fetched_again_without_a_checksum_has_none_of_the_old_bytes(
    directory: Path, urls: list[str], server: FaultyHttpServer
) -> None:
    fill(directory, urls, "crc")
    server.objects["/o/1.bin"] = bytes(SIZE)
    with Cache(directory) as cache:
        cache.clear()
        with cache.pinned(urls[1]):
            pass
        assert cache.verify(deep=True) == []


def test_an_unknown_word_is_refused_and_the_option_goes_to_workers(directory: Path) -> None:
    with pytest.raises(ConfigError, match="verify_reads='md5' is unknown: give one of never, crc"):
        Cache(directory, verify_reads="md5")
    with Cache(directory, verify_reads="crc") as cache:
        copy = pickle.loads(pickle.dumps(cache))
        assert copy.verifies_reads
        copy.close()
