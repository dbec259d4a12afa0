"""Fetchers of one process with the same server and identity have one helper, and each gets its own answers only."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError, ObjectNotFoundError, StorageError, TransientStorageError
from sqlstream.storage.client.client import HelperClient
from sqlstream.storage.client.outstanding import HelperUser
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.protocol.channel import Channel
from sqlstream.storage.protocol.messages import Fetch, HelperTiming, ReadOptions
from sqlstream.storage.worker.users import Users
from sqlstream.storage.worker.workers import Lane, Workers
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.processes import children, is_alive
from tests.storage.downloads import Downloads, granted
from tests.storage.life import counted, has_more_than, in_forked_child, wait_dead, wait_for_requests
from tests.storage.meter import Meter

Open = Callable[..., Fetcher]
STALL = FaultyAnswer(fault=Fault.STALL, seconds=600)
DATA = b"0123456789" * 1000


@pytest.fixture
def open_fetcher() -> Iterator[Open]:
    opened: list[Fetcher] = []

    def open_one(**options: object) -> Fetcher:
        fields = {key: options.pop(key) for key in ("num_retries", "num_threads", "read_timeout_seconds") if key in options}
        opened.append(Fetcher(StorageOptions(storage_options=options, **fields)))  # type: ignore[arg-type]  # each its own
        return opened[-1]

    yield open_one
    for fetcher in opened:
        fetcher.close()


@pytest.fixture
def url(server: FaultyHttpServer) -> str:
    server.objects["/x"] = DATA
    return f"{server.url}/x"


def pids(*fetchers: Fetcher) -> set[int | None]:
    return {fetcher.helper_pid for fetcher in fetchers}


class TestWhoShares:
    @pytest.mark.usefixtures("starts_anew")
    def test_tries_timeouts_numbers_and_checks_choose_no_helper(self, open_fetcher: Open, url: str) -> None:
        before = set(children(os.getpid()))
        fetchers = [
            open_fetcher(),
            open_fetcher(num_retries=0),
            open_fetcher(num_threads=2, read_timeout_seconds=5.0),
            open_fetcher(timeout=30, connect_timeout=3, verify_etag=True, credential_hosts=["s3://bucket"]),
        ]
        for fetcher in fetchers:
            assert fetcher.head(url).size_bytes == len(DATA)
        assert len(pids(*fetchers)) == 1
        assert set(children(os.getpid())) - before == pids(*fetchers)

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ({"key": "a", "secret": "s"}, {"key": "b", "secret": "s"}),
            ({"key": "a", "secret": "s"}, {}),
            ({"endpoint_url": "http://one"}, {"endpoint_url": "http://other"}),
            ({"headers": {"Cookie": "a"}}, {"headers": {"Cookie": "b"}}),
            ({"client_kwargs": {"region_name": "a"}}, {"client_kwargs": {"region_name": "b"}}),
            ({"backend": "fsspec"}, {"backend": "obstore"}),
            ({"anon": True}, {"anon": 1}),
        ],
    )
    def test_another_server_or_identity_has_its_own(
        self, open_fetcher: Open, tmp_path: Path, first: dict[str, object], second: dict[str, object]
    ) -> None:
        fetchers = [open_fetcher(**options) for options in (first, second, first, second)]
        for fetcher in fetchers:
            with pytest.raises(ObjectNotFoundError):
                fetcher.head(str(tmp_path / "no"))
        assert fetchers[0].helper_pid == fetchers[2].helper_pid != fetchers[1].helper_pid == fetchers[3].helper_pid

    def test_another_environment_is_another_identity(
        self, open_fetcher: Open, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = open_fetcher()
        first.head(url)
        monkeypatch.setenv("AWS_SESSION_TOKEN", "refreshed")
        second = open_fetcher()
        second.head(url)
        assert first.helper_pid != second.helper_pid

    def test_the_headers_of_one_reach_no_request_of_another(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str
    ) -> None:
        first, second = (open_fetcher(headers={"Cookie": name}) for name in ("first", "second"))
        for fetcher in (first, second, first, second):
            fetcher.head(url)
        assert [request.headers.get("cookie") for request in server.requests("/x")] == ["first", "second"] * 2

    def test_options_that_are_changed_after_the_start_change_no_other_fetcher(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str
    ) -> None:
        headers = {"Cookie": "first"}
        first, second = (Fetcher(StorageOptions(storage_options={"headers": headers})) for _ in range(2))
        headers["Cookie"] = "changed"
        third = open_fetcher(headers=headers)
        for fetcher in (first, third, second):
            fetcher.head(url)
        assert [request.headers.get("cookie") for request in server.requests("/x")] == ["first", "changed", "first"]
        assert first.helper_pid == second.helper_pid != third.helper_pid
        first.close()
        second.close()


class TestEnd:
    @pytest.mark.parametrize("end", ["stop", "close"])
    def test_the_end_of_one_leaves_the_downloads_of_another_alone(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str, tmp_path: Path, end: str
    ) -> None:
        server.script("/stalls", always=STALL)
        server.objects["/stalls"] = DATA
        one, other = (Downloads(open_fetcher(), tmp_path, name) for name in ("one", "other"))
        for downloads in (one, other):
            downloads.submit(url, f"{server.url}/stalls", like=granted(0))
        other.wait_grants(1)
        one.wait_grants(1)
        wait_for_requests(server, 2, "/stalls")
        pid = other.fetcher.helper_pid
        getattr(one.fetcher, end)()
        assert [type(done.error) for done in one._done().values()] == [FetchCancelledError] * 2  # before it returned
        assert (one.fetcher.num_pending, one.fetcher.helper_pid) == (0, None)
        assert (other.fetcher.num_pending, other.fetcher.helper_pid) == (2, pid)
        other.fetcher.grant("other0", len(DATA))
        assert other.wait_done("other0")[0].error is None
        assert other.read("other0") == DATA
        assert set(other._done()) == {"other0"}
        held = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
        assert not held & {str(tmp_path / "one0"), str(tmp_path / "one1")}
        other.fetcher.stop()
        assert pid is not None
        assert not is_alive(pid)  # the suite's starter, whose child it is, has perhaps not reaped it yet

    def test_a_call_of_the_one_that_ends_gets_its_error_and_that_of_another_its_answer(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str
    ) -> None:
        ending, other = open_fetcher(), open_fetcher()
        server.script("/stalls", always=STALL)
        server.objects["/stalls"] = DATA
        errors: list[BaseException] = []

        def ask() -> None:
            try:
                ending.head(f"{server.url}/stalls")
            except StorageError as error:
                errors.append(error)

        thread = threading.Thread(target=ask)
        thread.start()
        other.head(url)
        wait_for_requests(server, 1, "/stalls")
        ending.stop()
        thread.join(300)
        assert [type(error) for error in errors] == [FetchCancelledError]
        assert ending.num_pending == 0
        assert other.head(url).size_bytes == len(DATA)

    def test_a_listing_of_the_one_that_ends_goes_on_in_no_other_place(self, open_fetcher: Open, tmp_path: Path) -> None:
        ending, other = open_fetcher(), open_fetcher()
        for i in range(1200):
            (tmp_path / f"{i:04}").touch()
        listings = [fetcher.list(f"{tmp_path}/") for fetcher in (ending, other)]
        for listing in listings:
            next(listing)
        ending.stop()
        assert len(list(listings[1])) == 1199
        with pytest.raises(TransientStorageError, match="list again"):
            list(listings[0])

    def test_none_is_left_when_all_have_ended_in_any_order(self, open_fetcher: Open, url: str) -> None:
        fetchers = [open_fetcher() for _ in range(3)]
        before = counted()
        for order in ((0, 1, 2), (2, 0, 1)):
            for fetcher in fetchers:
                fetcher.head(url)
            (pid,) = pids(*fetchers)
            assert pid is not None
            for number in order:
                assert Path(f"/proc/{pid}").exists()
                fetchers[number].stop()
            assert not is_alive(pid)
        assert not has_more_than(before)

    def test_one_that_is_forgotten_no_longer_counts(self, open_fetcher: Open, url: str) -> None:
        kept, forgotten = open_fetcher(), Fetcher(StorageOptions())
        for fetcher in (kept, forgotten):
            fetcher.head(url)
        pid = kept.helper_pid
        assert pid is not None
        del forgotten, fetcher
        gc.collect()
        assert kept.helper_pid == pid
        kept.stop()
        wait_dead(pid)

    @pytest.mark.usefixtures("starts_anew")
    def test_the_last_one_ends_a_helper_that_no_longer_reads(self, open_fetcher: Open, url: str) -> None:
        first, last = open_fetcher(), open_fetcher()
        for fetcher in (first, last):
            fetcher.head(url)
        first.stop()
        pid = last.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        last.stop()
        assert not Path(f"/proc/{pid}").exists()

    @pytest.mark.parametrize("max_silent_looks", [3, 10**6], ids=["soon", "sooner while one closes"])
    def test_one_that_ends_while_the_helper_hangs_waits_until_it_is_taken_for_dead(
        self, server: FaultyHttpServer, url: str, tmp_path: Path, max_silent_looks: int
    ) -> None:
        server.script("/x", STALL, STALL)
        timing = HelperTiming(look_seconds=0.2, max_silent_looks=max_silent_looks, max_silent_looks_at_start=10**6)
        one, other = (Downloads(Fetcher(StorageOptions(), timing), tmp_path, name) for name in ("one", "other"))
        one.submit(url)
        other.submit(url)
        wait_for_requests(server, 2)
        pid = other.fetcher.helper_pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        one.fetcher.stop()
        assert [type(done.error) for done in one._done().values()] == [FetchCancelledError]
        assert other.wait_done()[0].error is None, "another helper brings it"
        other.fetcher.stop()

    def test_a_user_that_asks_while_the_last_other_one_ends_is_answered(
        self, open_fetcher: Open, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It comes between the look for others and the lock."""
        ending, asking = open_fetcher(), open_fetcher()
        ending.head(url)
        answers: list[int | None] = []
        abandon = HelperClient.abandon

        def then_ask(client: HelperClient, user: HelperUser) -> None:
            abandon(client, user)
            monkeypatch.undo()
            answers.append(asking.head(url).size_bytes)

        monkeypatch.setattr(HelperClient, "abandon", then_ask)
        ending.stop()
        assert answers == [len(DATA)]
        assert asking.head(url).size_bytes == len(DATA)

    def test_a_user_that_takes_the_place_of_one_that_was_dropped_meets_no_dead_helper(
        self, url: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        fetcher = Fetcher(StorageOptions())
        for _ in range(10):
            assert fetcher.head(url).size_bytes == len(DATA)
            fetcher = Fetcher(StorageOptions())  # the one before ends without `close`, as in a notebook whose cell runs again
        fetcher.close()
        assert "died" not in caplog.text


class TestRequests:
    def test_tickets_of_one_are_out_of_the_reach_of_another(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        downloads, other = Downloads(open_fetcher(), tmp_path), open_fetcher()
        downloads.submit(url, like=granted(0))
        downloads.wait_grants(1)
        other.head(url)
        other.grant("0", len(DATA))
        other.cancel(["0"])
        assert (other.num_pending, downloads.fetcher.num_pending) == (0, 1)
        downloads.fetcher.grant("0", len(DATA))
        assert downloads.wait_done()[0].error is None

    def test_each_tries_as_often_as_its_own_options_say(self, open_fetcher: Open, server: FaultyHttpServer, url: str) -> None:
        patient, hasty = open_fetcher(num_retries=2), open_fetcher(num_retries=0)
        server.script("/x", always=FaultyAnswer(fault=Fault.STATUS, status=503))
        for fetcher, num_tries in ((patient, 3), (hasty, 1), (patient, 3)):
            num_before = len(server.requests("/x"))
            with pytest.raises(TransientStorageError):
                fetcher.head(url)
            assert len(server.requests("/x")) - num_before == num_tries
        assert patient.helper_pid == hasty.helper_pid

    def test_each_waits_as_long_as_its_own_options_say(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        patient = Downloads(open_fetcher(num_retries=0), tmp_path)
        hasty = open_fetcher(num_retries=0, read_timeout_seconds=0.2)
        server.script("/x", always=STALL)
        patient.submit(url)
        wait_for_requests(server, 1)
        with pytest.raises(TransientStorageError):
            hasty.head(url)
        assert (patient.fetcher.num_pending, patient.events) == (1, [])
        assert patient.fetcher.helper_pid == hasty.helper_pid

    def test_each_has_its_own_number_of_downloads_at_a_time(
        self, open_fetcher: Open, server: FaultyHttpServer, tmp_path: Path
    ) -> None:
        for path in ("/one", "/other"):
            server.objects[path] = DATA
            server.script(path, always=STALL)
        one = Downloads(open_fetcher(num_threads=2), tmp_path, "one")
        other = Downloads(open_fetcher(num_threads=3), tmp_path, "other")
        one.submit(*[f"{server.url}/one"] * 20)
        wait_for_requests(server, 2, "/one")
        other.submit(*[f"{server.url}/other"] * 20)
        wait_for_requests(server, 3, "/other")
        threading.Event().wait(0.2)  # for one too many
        assert (len(server.requests("/one")), len(server.requests("/other"))) == (2, 3)

    def test_a_request_that_kills_helpers_fails_alone_whoever_asked_for_the_others(
        self, open_fetcher: Open, server: FaultyHttpServer, url: str, tmp_path: Path
    ) -> None:
        server.objects |= {"/bad": b"bad"}
        server.script("/bad", always=STALL)
        server.script("/x", *[FaultyAnswer(fault=Fault.STALL, seconds=60)] * 2)  # still open when the helper dies
        bad, good = (Downloads(open_fetcher(), tmp_path, name) for name in ("bad", "good"))
        bad.submit(f"{server.url}/bad")
        good.submit(url)
        for num_tries in (1, 2, 3):
            wait_for_requests(server, num_tries, "/bad")
            wait_for_requests(server, min(num_tries, 2))
            pid = bad.fetcher.helper_pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            wait_dead(pid)
        assert type(bad.wait_done()[0].error) is TransientStorageError
        assert good.wait_done()[0].error is None


def test_a_lane_that_is_full_keeps_no_other_one_waiting() -> None:
    full, free, workers = Meter(), Meter(), Workers()
    lanes = Lane(2), Lane(2)
    workers.submit(lanes[0], [full.job] * 10)
    full.wait(lambda: full.num_running == 2)
    free.gate.set()
    workers.submit(lanes[1], [free.job] * 10)
    free.wait(lambda: free.num_done == 10)
    assert (full.most, full.num_done) == (2, 0)
    full.gate.set()
    full.wait(lambda: full.num_done == 10)
    assert full.most == 2


def test_lanes_take_turns_where_no_second_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    meter, workers = Meter(), Workers()
    first, second = Lane(8), Lane(8)
    workers.submit(first, [meter.job])
    meter.wait(lambda: meter.num_running == 1)
    done: list[str] = []

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            workers.submit(first, [lambda _: done.append("first")])
            workers.submit(second, [lambda _: done.append("second")])
    workers.submit(second, [meter.job])
    meter.gate.set()
    meter.wait(lambda: meter.num_done == 2)
    assert sorted(done) == ["first"] * 3 + ["second"] * 3


def test_a_forked_child_has_one_of_its_own_for_all(open_fetcher: Open, url: str) -> None:
    fetchers = [open_fetcher() for _ in range(3)]
    for fetcher in fetchers:
        fetcher.head(url)
    (parents,) = pids(*fetchers)

    def child() -> None:
        assert pids(*fetchers) == {None}
        for fetcher in fetchers:
            fetcher.head(url)
        (own,) = pids(*fetchers)
        assert own not in (None, parents)
        fetchers[0].close()
        assert pids(*fetchers[1:]) == {own}
        for fetcher in fetchers:
            fetcher.close()

    assert in_forked_child(child) == 0
    for fetcher in fetchers:
        assert fetcher.head(url).size_bytes == len(DATA)
    assert len(pids(*fetchers)) == 1


def count_in_spawned(fetchers: list[Fetcher], url: str) -> int:
    for fetcher in fetchers:
        fetcher.head(url)
    return len(pids(*fetchers))


def test_a_spawned_process_has_one_for_all(open_fetcher: Open, url: str) -> None:
    fetchers = [open_fetcher(headers={"Cookie": "a"}) for _ in range(3)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(count_in_spawned, (fetchers, url)) == 1


def test_frames_hold_the_requests_of_one_user(
    open_fetcher: Open, server: FaultyHttpServer, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that a dead helper left open are sent together, each with its own user's options."""
    server.script("/x", *[STALL] * 3)
    one, other = (
        Downloads(open_fetcher(num_threads=1), tmp_path, "one"),
        Downloads(open_fetcher(num_threads=2), tmp_path, "other"),
    )
    for downloads in (one, other):
        downloads.submit(url, url)
    wait_for_requests(server, 3)
    sent: list[tuple[int | str, list[str]]] = []
    send = Channel.send

    def noted(channel: Channel, messages: list[object], descriptors: tuple[int, ...] = ()) -> None:
        fetches = [message for message in messages if isinstance(message, Fetch)]
        sent.extend((fetch.options.num_threads, [request.ticket for request in fetch.requests]) for fetch in fetches)
        send(channel, messages, descriptors)

    monkeypatch.setattr(Channel, "send", noted)
    pid = other.fetcher.helper_pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [done.error for downloads in (one, other) for done in downloads.wait_done()] == [None] * 4
    assert sent == [(1, ["one0", "one1"]), (2, ["other0", "other1"])]


def test_connections_with_timeouts_that_no_user_has_any_more_are_closed() -> None:
    def options(user: str, timeout_seconds: float) -> ReadOptions:
        return ReadOptions(user, 3, timeout_seconds, 60.0, 600.0, "auto", checks_etag=False)

    users = Users(StorageOptions(), Workers(), lambda _event: None)
    kept = users.get(options("kept", 10.0)).context.resolver
    gone = weakref.ref(users.get(options("gone", 5.0)).context.resolver)
    assert gone() is not kept
    users.end("gone")
    gc.collect()
    assert gone() is None
    assert users.get(options("later", 10.0)).context.resolver is kept
