"""What every session of a cache promises to its engine, whichever stands behind it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.failover import FailoverSession
from sqlstream.cache.private_files import PrivateFilesSession
from sqlstream.cache.session import AnyHold, CacheSession, Failure, ObjectRef, PutItem
from sqlstream.errors import CacheDiskError, ObjectNotFoundError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.kit import break_ledger
from tests.cache.session import Session
from tests.processes import answer_of_forked_child, open_files

OBJECTS = {f"http://nowhere/o/{i}.bin": bytes([i]) * (100 + i) for i in range(12)}
REFS = [ObjectRef.of(url) for url in OBJECTS]
STORED = ObjectRef(url="made", key=bytes(16), ext=".bin", is_stored_sample=True)
MISSING = ObjectRef.of("http://nowhere/missing.bin")


def read(hold: AnyHold) -> list[bytes]:
    return [Path(path).read_bytes() for path in hold.paths]


class SessionContract:
    """The tests; a subclass makes the session, with its files below `tmp_path`."""

    @pytest.fixture
    def fetcher(self) -> ScriptedFetcher:
        return ScriptedFetcher(OBJECTS)

    @pytest.fixture(autouse=True)
    def private(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "private").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "private"))

    @pytest.mark.parametrize("for_reading", [False, True])
    def test_a_window_is_held_until_each_hold_is_released(self, session: CacheSession, for_reading: bool) -> None:
        for _ in range(3):
            holds = [session.wait(hold) for hold in session.acquire([[ref, REFS[0]] for ref in REFS], for_reading=for_reading)]
            assert len(holds) == len(REFS)
            for hold, data in zip(holds, OBJECTS.values(), strict=True):
                assert hold.is_settled
                assert hold.error is None
                assert session.open(hold)
                assert read(hold) == [data, OBJECTS[REFS[0].url]]
                assert all(path.startswith(session.directories) and path.endswith(".bin") for path in hold.paths)
            for hold in holds:
                session.release(hold)
                session.release(hold)

    def test_two_columns_that_name_one_object_have_its_path_twice(self, session: CacheSession) -> None:
        hold = session.wait(session.acquire_one([REFS[1], REFS[2], REFS[1]]))
        assert session.open(hold)
        assert read(hold) == [OBJECTS[REFS[i].url] for i in (1, 2, 1)]
        assert hold.paths[0] == hold.paths[2]
        session.release(hold)

    def test_an_object_that_is_not_there_is_the_error_of_its_hold_alone(self, session: CacheSession) -> None:
        holds = [session.wait(hold) for hold in session.acquire([[REFS[0]], [MISSING], [REFS[1]]])]
        assert [type(hold.error) for hold in holds] == [type(None), ObjectNotFoundError, type(None)]
        assert session.open(holds[2])
        for hold in holds:
            session.release(hold)

    def test_a_wait_ends_when_the_objects_are_here_or_its_time_is_over(
        self, session: CacheSession, fetcher: ScriptedFetcher
    ) -> None:
        fetcher.holds_back = True
        hold = session.acquire_one([REFS[0]])
        assert not session.wait(hold, timeout_seconds=0).is_settled
        assert len(hold.outstanding) == 1
        fetcher.deliver(REFS[0].url)
        hold = session.wait(hold)
        assert session.open(hold)
        session.release(hold)

    def test_a_stored_sample_that_is_not_here_opens_nothing_and_fetches_nothing(
        self, session: CacheSession, fetcher: ScriptedFetcher
    ) -> None:
        hold = session.wait(session.acquire_one([STORED]))
        assert not session.open(hold)
        session.release(hold)
        assert fetcher.num_gets == {}
        assert session.stored([STORED.key]) == set()

    def test_a_retained_path_is_valid_until_its_hold_is_released(self, session: CacheSession) -> None:
        for for_reading in (False, True):
            hold = session.wait(session.acquire_one([REFS[3]], for_reading=for_reading))
            assert session.open(hold)
            path = Path(hold.paths[0])
            hold = session.retain(hold)
            session.flush()
            assert path.read_bytes() == OBJECTS[REFS[3].url]
            assert not hold.is_released
            session.release(hold)

    def test_a_hold_is_split_into_one_for_each_object(self, session: CacheSession) -> None:
        with session.prefetched(REFS[:3]):
            hold = session.wait(session.acquire_one(REFS[:3]))
        assert session.open(hold)
        pieces = session.split(hold)
        assert [piece.refs[0] for piece in pieces] == REFS[:3]
        session.release(pieces[0])
        assert [read(piece) for piece in pieces[1:]] == [[OBJECTS[ref.url]] for ref in REFS[1:3]]
        for piece in pieces:
            session.release(piece)

    def test_dropped_holds_leave_no_file_open(self, session: CacheSession, tmp_path: Path) -> None:
        session.release(session.wait(session.acquire_one([REFS[0]])))
        session.flush()
        before = open_files(tmp_path)
        holds = [session.wait(hold) for hold in session.acquire([[ref] for ref in REFS])]
        assert all(session.open(hold) for hold in holds)
        holds.clear()
        session.flush()
        assert open_files(tmp_path) == before

    def test_a_forked_child_takes_nothing_from_its_parent(self, session: CacheSession) -> None:
        hold = session.wait(session.acquire_one([REFS[0]]))
        assert session.open(hold)

        def act() -> str:
            other = session.wait(session.acquire_one([REFS[1]]))
            is_right = session.open(other) and read(other) == [OBJECTS[REFS[1].url]]
            session.release(hold)
            session.release(other)
            return str(is_right)

        assert answer_of_forked_child(act) == "True"
        assert read(hold) == [OBJECTS[REFS[0].url]]
        session.release(hold)

    def test_what_a_rest_of_the_fetcher_gives_up_is_asked_again(self, session: CacheSession, fetcher: ScriptedFetcher) -> None:
        fetcher.holds_back = True
        hold = session.acquire_one([REFS[0]])
        fetcher.stop()  # as an iteration of another thread ends
        hold = session.wait(hold)
        assert hold.error is None
        assert not session.open(hold)
        session.release(hold)
        fetcher.holds_back = False
        hold = session.wait(session.acquire_one([REFS[0]]))
        assert session.open(hold)
        assert read(hold) == [OBJECTS[REFS[0].url]]
        session.release(hold)

    def test_objects_that_were_made_are_held_with_others_and_bring_nothing(
        self, session: CacheSession, fetcher: ScriptedFetcher
    ) -> None:
        bodies = {bytes([number]) * 16: bytes([number]) * number for number in range(3)}
        made = [ObjectRef(url="made", key=key, ext=".bin", size_bytes=len(data)) for key, data in bodies.items()]
        hold = session.hold_made([REFS[0], *made], bodies)
        assert read(hold) == [OBJECTS[REFS[0].url], *bodies.values()]
        assert fetcher.num_gets == {REFS[0].url: 1}
        path = Path(hold.paths[2])
        kept = session.retain(hold)
        again = session.hold_made(made, bodies)
        assert read(again) == [*bodies.values()]
        session.release(again)
        assert path.read_bytes() == b"\1"
        session.release(kept)
        with pytest.raises(ObjectNotFoundError):
            session.hold_made([MISSING, *made], bodies)

    def test_samples_that_were_made_and_reports_are_taken_or_refused_with_a_reason(self, session: CacheSession) -> None:
        data = b"made"
        made = ObjectRef(url="made", key=bytes(16), ext=".bin", size_bytes=len(data))
        reason = session.put([PutItem(ref=made, data=data)])
        session.flush()
        assert (reason is None) == (session.stored([made.key]) == {made.key})
        assert session.discard(made)
        assert session.stored([made.key]) == set()
        session.note_failures([Failure(url="row 1", error="on purpose")])
        assert session.drop_other_versions(REFS) == set()
        dataset = session.register("name", "src", "fingerprint")
        assert dataset is None or dataset == session.register("name", "src", "fingerprint")
        assert session.policy.name == "lru"
        session.expect(2)
        session.warn_of_paths()
        session.rest()
        assert not session.is_closed


class TestLedgerSession(SessionContract):
    @pytest.fixture
    def session(self, directory: Path, fetcher: ScriptedFetcher) -> Iterator[CacheSession]:
        with Cache(directory, limit="10mb") as cache:
            cache.fetcher = fetcher
            yield cache.session
        check_invariants(directory, at_rest=True)


class TestCheckedLedgerSession(SessionContract):
    @pytest.fixture
    def session(self, directory: Path, fetcher: ScriptedFetcher) -> Iterator[CacheSession]:
        with Cache(directory, limit="10mb", verify_reads="crc") as cache:
            cache.fetcher = fetcher
            yield cache.session
        check_invariants(directory, at_rest=True)


class TestPrivateFilesSession(SessionContract):
    @pytest.fixture
    def session(self, fetcher: ScriptedFetcher, private: None, tmp_path: Path) -> Iterator[CacheSession]:
        session = PrivateFilesSession(fetcher)
        yield session  # type: ignore[misc]  # it takes its own holds alone
        session.close()
        assert os.listdir(tmp_path / "private") == []

    def test_a_released_hold_leaves_no_file_behind(self, session: CacheSession, tmp_path: Path) -> None:
        holds = [session.wait(hold) for hold in session.acquire([[ref] for ref in REFS])]
        session.release(holds[0])
        assert sum(path.is_file() for path in (tmp_path / "private").rglob("*")) == len(REFS) - 1
        holds.clear()
        assert not any(path.is_file() for path in (tmp_path / "private").rglob("*"))


class TestFailoverSession(SessionContract):
    @pytest.fixture
    def session(self, directory: Path, fetcher: ScriptedFetcher, private: None) -> Iterator[CacheSession]:
        with Cache(directory, limit="10mb", on_cache_error="bypass") as cache:
            cache.fetcher = fetcher
            yield cache.session
        check_invariants(directory, at_rest=True)

    def test_what_the_cache_fails_while_it_comes_goes_on_as_a_private_file(
        self, session: CacheSession, fetcher: ScriptedFetcher
    ) -> None:
        assert isinstance(session, FailoverSession)
        fetcher.holds_back = True
        hold = session.acquire_one([REFS[0]])
        hold.error = CacheDiskError("on purpose")  # type: ignore[misc]  # as of a part that cannot be written
        fetcher.holds_back = False
        other = session.wait(hold)
        assert other is not hold
        assert session.open(other)
        assert read(other) == [OBJECTS[REFS[0].url]]
        assert other.paths[0].startswith(session.stand_in.directories)
        session.release(other)
        fetcher.deliver(REFS[0].url)


class TestFailoverOfBrokenCache(SessionContract):
    @pytest.fixture
    def session(self, directory: Path, fetcher: ScriptedFetcher, private: None) -> Iterator[CacheSession]:
        with Cache(directory, limit="10mb", on_cache_error="bypass") as cache:
            cache.fetcher = fetcher
            break_ledger(cache)
            session = Session(cache).failover
            session.note(RuntimeError("on purpose"))
            session._left_alone_until = float("inf")
            yield session
