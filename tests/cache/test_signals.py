"""Signals at every place where Python looks for them: a handler that raises leaks nothing, one that uses the cache works.

Python runs handlers in the main thread, between two of its instructions: after a call, at the begin of a function, at the
end of a loop's round. `Injector` counts these places in our package, and has a signal come at the n-th.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.files import read_hold
from sqlstream.cache.files.read_hold import KeptLocks, ReadLock, ReadLocks
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.errors import SqlStreamError, TransformError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.kit import acquire_hits, open_locks, read_pinned
from tests.cache.session import Session
from tests.handlers import HandlerError, Injector, fail, handler
from tests.processes import open_files
from tests.stream.sources import Photos, check_bytes, make_photos

pytestmark = pytest.mark.usefixtures("starts_anew")  # the places of a start are among those where a handler raises


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def photos(server: FaultyHttpServer, tmp_path: Path) -> Photos:
    return make_photos(server, tmp_path, num=24)


def stream(photos: Photos, tmp_path: Path) -> StreamingDataset:
    """All photos, in an order that does not change."""
    return StreamingDataset(
        photos.src,
        dst=tmp_path / "dst",
        columns_to_download=["image"],
        transforms=[check_bytes],
        shuffle_seed=0,
        cache_limit="10mb",
    )


def places(total: int, sample: int, request: pytest.FixtureRequest) -> range:
    """All places in the slow form, else about `sample` of them."""
    step = 1 if "slow" in request.node.name else max(1, total // sample)
    return range(1 + (total // 3) % step, total + 1, step)


SIZES = ["sampled", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


def is_free(cache: Cache) -> bool:
    """Whether another thread can do all of it: read, begin a transaction, download."""
    done = threading.Event()

    def use() -> None:
        Session(cache).flush()
        cache.statistics()
        cache.fetcher.share_node(cache.fetcher.num_processes % 2 + 1)
        done.set()

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    return done.wait(60)


def check_at_rest(cache: Cache, handlers: Sequence[object]) -> None:
    gc.collect()
    assert is_free(cache)
    assert Session(cache).pinned_keys == []
    assert cache.statistics().pinned_entries == 0
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGUSR1)] == handlers


def acquire_misses(cache: Cache, urls: list[str]) -> None:
    cache.clear()
    acquire_hits(cache, urls)


def rest(cache: Cache, urls: list[str]) -> None:
    with cache.pinned(urls[0]):
        cache.rest()


def look(cache: Cache, urls: list[str]) -> None:
    cache.statistics()
    cache.limit_bytes = 10 << 20
    cache.verify()
    cache.clear(older_than_seconds=1e9)


WORK: dict[str, Callable[[Cache, list[str]], None]] = {
    "acquire and release": acquire_hits,
    "pinned": read_pinned,
    "download": acquire_misses,
    "rest": rest,
    "statistics, limit, verify, clear": look,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("work", WORK)
def test_a_handler_that_raises_at_any_place_leaves_no_lock_no_pin_and_no_descriptor(
    photos: Photos, tmp_path: Path, request: pytest.FixtureRequest, work: str, size: str
) -> None:
    urls = [f"{photos.server.url}{photos.path(number)}" for number in range(3)]
    with Cache(tmp_path / "dst", limit="10mb") as cache, handler(fail):
        handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGUSR1)]
        WORK[work](cache, urls)
        with Injector(0) as injector:
            WORK[work](cache, urls)
        num_raised = 0
        files = None
        for nth in places(injector.num_places, 4, request):
            try:
                with Injector(nth):
                    WORK[work](cache, urls)
            except HandlerError:
                num_raised += 1
            for url in urls:
                with contextlib.suppress(SqlStreamError):  # it came after the last step of acquiring
                    cache.release_many([url])
            cache.rest()  # ends what is under way, too
            check_at_rest(cache, handlers)
            if work != "download":
                assert files in (None, files := len(open_files(tmp_path)))
        assert num_raised
    check_invariants(tmp_path / "dst", at_rest=True)
    assert open_files(tmp_path) == []


def is_of_handler(error: Exception) -> bool:
    """Whether the handler raised it: around a call of a transform, it comes as that transform's error."""
    return isinstance(error, HandlerError) or isinstance(error.__cause__, HandlerError)


@pytest.mark.parametrize("inside", ["acquire_one", "_acquire_window", pytest.param(None, marks=pytest.mark.slow)])
def test_a_handler_that_raises_as_a_download_is_begun_leaves_no_pin_though_the_download_goes_on(
    tmp_path: Path, inside: str | None
) -> None:
    fetcher = ScriptedFetcher({})
    fetcher.holds_back = True
    with Cache(tmp_path / "dst", limit="10mb") as cache, handler(fail):
        cache.fetcher = fetcher
        session = Session(cache)
        num_raised = 0
        for nth in itertools.count(1):
            url = f"s3://bucket/{nth}"
            is_over = False
            with contextlib.suppress(HandlerError), Injector(nth, inside):
                session.release(session.acquire_one((ObjectRef.of(url),)))
                is_over = True
            assert session.held_bytes == 0, nth
            assert session.pinned_keys == [], nth
            for pending in fetcher.pending:
                fetcher.deliver(pending)
            if is_over:
                break
            num_raised += 1
        assert num_raised > 1
        session.flush()
    check_invariants(tmp_path / "dst", at_rest=True)


@pytest.mark.parametrize("inside", ["acquire_many", "release_many", pytest.param(None, marks=pytest.mark.slow)])
def test_a_handler_that_raises_leaves_all_of_several_objects_acquired_or_none(tmp_path: Path, inside: str | None) -> None:
    urls = [f"s3://bucket/{number}" for number in range(3)]
    with Cache(tmp_path / "dst", limit="10mb") as cache, handler(fail):
        cache.fetcher = ScriptedFetcher(dict.fromkeys(urls, b"bytes"))
        acquire_hits(cache, urls)
        for nth in itertools.count(1):
            is_acquired = False
            with contextlib.suppress(HandlerError), Injector(nth, inside) as injector:
                cache.acquire_many(urls)
                is_acquired = True
                cache.release_many(urls)
            Session(cache).collect()
            num_pinned = len(Session(cache).pinned_keys)
            assert num_pinned in ((0, len(urls)) if is_acquired else (0,)), nth
            if num_pinned:
                cache.release_many(urls)
            if injector.num_places < nth:
                break
        assert nth > 3


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["iterate", "access"])
def test_a_handler_that_raises_at_any_place_of_a_dataset_leaves_nothing(
    photos: Photos, tmp_path: Path, request: pytest.FixtureRequest, way: str, size: str
) -> None:
    def read() -> None:
        if way == "access":
            assert dataset[3]["is_right"]
            return
        samples = iter(dataset)
        assert next(samples)["is_right"]
        assert next(samples)["is_right"]
        assert isinstance(samples, Generator)
        samples.close()

    with stream(photos, tmp_path) as dataset, handler(fail):
        handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGUSR1)]
        assert sum(sample["is_right"] for sample in dataset) == photos.num
        read()
        with Injector(0) as injector:
            read()
        num_raised = 0
        for nth in places(injector.num_places, 4, request):
            try:
                with Injector(nth):
                    read()
            except (HandlerError, TransformError) as error:
                if not is_of_handler(error):
                    raise
                num_raised += 1
            dataset.cache.rest()
            check_at_rest(dataset.cache, handlers)
        assert num_raised
        assert sum(sample["is_right"] for sample in dataset) == photos.num
    check_invariants(tmp_path / "dst", at_rest=True)
    assert open_files(tmp_path) == []


def test_a_handler_that_raises_as_an_access_gives_its_files_back_leaves_none_open(photos: Photos, tmp_path: Path) -> None:
    with stream(photos, tmp_path) as dataset, handler(fail):
        assert sum(sample["is_right"] for sample in dataset) == photos.num
        assert dataset[3]["is_right"]
        with Injector(0, "close") as injector:
            assert dataset[3]["is_right"]
        assert injector.num_places
        for nth in range(1, injector.num_places + 1):
            with pytest.raises(HandlerError), Injector(nth, "close"):
                dataset[3]
            gc.collect()
            assert not open_locks()


def test_a_handler_that_raises_around_a_transform_comes_as_its_error_and_leaves_nothing(photos: Photos, tmp_path: Path) -> None:
    with stream(photos, tmp_path) as dataset, handler(fail):
        handlers = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGUSR1)]
        with Injector(0, "apply") as injector:
            assert dataset[3]["is_right"]
        kinds = set()
        for nth in range(1, injector.num_places + 1):
            with pytest.raises((HandlerError, TransformError)) as raised, Injector(nth, "apply"):
                dataset[3]
            assert is_of_handler(raised.value)
            kinds.add(raised.type)
            check_at_rest(dataset.cache, handlers)
        assert kinds == {HandlerError, TransformError}


def test_python_calls_no_function_of_ours_as_it_forgets_open_files(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    shared, held = ReadLocks("", lambda *_: None, KeptLocks()), dict[str, ReadLock]()
    for path in paths:
        path.write_bytes(b"1")
        assert shared.lock(str(path), 1, held)
    assert len(open_files(tmp_path)) == 2
    num_known = len(read_hold._locks)
    with Injector(0) as injector:
        del held
    assert injector.num_places == 0
    assert open_files(tmp_path) == []
    assert len(read_hold._locks) == num_known - 2


@pytest.mark.parametrize("size", SIZES)
def test_a_handler_that_raises_at_any_place_of_open_and_close_leaves_nothing(
    photos: Photos, tmp_path: Path, request: pytest.FixtureRequest, size: str
) -> None:
    url = f"{photos.server.url}{photos.path(0)}"

    def use() -> None:
        cache = Cache(tmp_path / "dst", limit="10mb")
        try:
            cache.acquire_many([url])
        finally:
            cache.close()

    with handler(fail):
        use()
        with Injector(0) as injector:
            use()
        num_raised = 0
        for nth in places(injector.num_places, 4, request):
            try:
                with Injector(nth):
                    use()
            except HandlerError:
                num_raised += 1
            gc.collect()
            for thread in threading.enumerate():
                if thread.name.startswith("sqlstream"):
                    thread.join(60)
            check_invariants(tmp_path / "dst", at_rest=True)
            assert open_files(tmp_path) == [], nth
        assert num_raised


USES: dict[str, Callable[[Cache, str], object]] = {
    "statistics": lambda cache, url: cache.statistics(),
    "read": lambda cache, url: read_pinned(cache, [url]),
    "clear": lambda cache, url: cache.clear(older_than_seconds=1e9),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("work", ["acquire and release", "download"])
def test_a_handler_that_uses_the_cache_at_any_place_works(
    photos: Photos, tmp_path: Path, request: pytest.FixtureRequest, work: str, use: str
) -> None:
    urls = [f"{photos.server.url}{photos.path(number)}" for number in range(4)]
    with Cache(tmp_path / "dst", limit="10mb") as cache:
        num_uses = 0

        def handle() -> None:
            nonlocal num_uses
            USES[use](cache, urls[3])
            num_uses += 1

        with handler(handle):
            WORK[work](cache, urls)
            with Injector(0) as injector:
                WORK[work](cache, urls)
            tried = places(injector.num_places, 4, request)
            for nth in tried:
                with Injector(nth):
                    WORK[work](cache, urls)
        assert num_uses > len(tried) // 2  # a run may be shorter than the first
        assert is_free(cache)
    check_invariants(tmp_path / "dst", at_rest=True)
