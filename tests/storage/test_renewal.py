"""Credentials that end while they are used: by a clock, and by the server's word."""

from __future__ import annotations

import datetime
import math
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, SqlStreamError, TransientStorageError
from sqlstream.storage.backends.renewal import CredentialSource, Granted, RenewedStorage, credential_source
from sqlstream.storage.backends.resolve import Resolver
from sqlstream.storage.base.identity import PartingOptions
from sqlstream.storage.base.protocols import ObjectInfo, Storage
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.faulty import Fault, FaultyAnswer
from tests.storage.downloads import Downloads
from tests.storage.raw import RawServer
from tests.storage.tokens import EXPIRED, PLACE, TokenServer

NUM_OBJECTS, NUM_USES = 200, 20
URL = "s3://bucket/x"
Open = Callable[..., Fetcher]


# -- with servers ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[TokenServer]:
    with TokenServer(NUM_USES) as server:
        monkeypatch.setenv(PLACE, server.url)
        yield server


@pytest.fixture
def opened(server: TokenServer) -> Iterator[Open]:
    """Opens fetchers that read from the server as a backend does."""
    made: list[Fetcher] = []

    def opened(backend: str, function: str = "", **options: object) -> Fetcher:
        name = f"tests.storage.tokens:{function or ('bearer' if backend == 'urllib3' else 'keys')}"
        where = {} if backend == "urllib3" else {"endpoint_url": server.url, "region": "us-east-1", "backend": backend}
        given = {"credentials": name, **where, **options}
        # fsspec asks twice for an object, and each token that ends between costs a try: one thread, so that none costs two
        num_threads = 1 if backend == "fsspec" else 3
        made.append(Fetcher(StorageOptions(storage_options=given, num_retries=1, num_threads=num_threads)))
        return made[-1]

    yield opened
    for fetcher in made:
        fetcher.stop()


def url_of(server: TokenServer, backend: str, name: str) -> str:
    return f"{server.url}/bucket/{name}" if backend == "urllib3" else f"s3://bucket/{name}"


@pytest.mark.parametrize("backend", ["obstore", "urllib3", "fsspec"])
def test_credentials_that_end_are_renewed_as_often_as_it_takes(
    backend: str, server: TokenServer, opened: Open, tmp_path: Path
) -> None:
    if backend == "fsspec":  # which asks twice for an object, and makes a new client in half a second
        server.num_uses = 60
    names = [f"{number:03}" for number in range(NUM_OBJECTS // 2 if backend == "fsspec" else NUM_OBJECTS)]
    server.objects |= {f"/bucket/{name}": name.encode() for name in names}
    downloads = Downloads(opened(backend), tmp_path)
    downloads.submit(*(url_of(server, backend, name) for name in names))
    done = downloads.wait_done()
    assert [event.error for event in done] == [None] * len(names)
    assert [downloads.read(event.ticket).decode() for event in done] == names
    num_served = len(server.requests()) - server.num_tokens - server.num_refused
    assert num_served >= NUM_OBJECTS
    assert server.num_tokens == math.ceil(num_served / server.num_uses)  # none is thrown away before it ends
    if backend != "fsspec":
        assert sum(event.num_requests for event in done) == num_served + server.num_refused
        assert sum(event.num_retries for event in done) == 0


@pytest.mark.parametrize("backend", ["obstore", "urllib3", "fsspec"])
def test_questions_and_listings_are_renewed_too(backend: str, server: TokenServer, opened: Open) -> None:
    server.objects["/bucket/x"], server.num_uses = b"12345", 6
    fetcher = opened(backend)
    while server.num_tokens < 3:
        assert fetcher.head(url_of(server, backend, "x")).size_bytes == 5
        assert fetcher.get_ranges(url_of(server, backend, "x"), [(1, 3)]) == [b"23"]
        if backend != "urllib3":
            assert [info.size_bytes for info in fetcher.list("s3://bucket/")] == [5]


@pytest.mark.parametrize("backend", ["obstore", "urllib3"])
def test_an_object_that_may_not_be_read_costs_one_renewal(backend: str, server: TokenServer, opened: Open) -> None:
    server.objects["/bucket/x"] = b"1"
    server.script("/bucket/x", always=FaultyAnswer(fault=Fault.STATUS, status=403))
    with pytest.raises(AccessDeniedError, match="403"):
        opened(backend).head(url_of(server, backend, "x"))
    assert server.num_tokens == 2


def test_a_function_that_has_nothing_new_leaves_the_servers_own_words(opened: Open) -> None:
    with pytest.raises(AccessDeniedError, match="ExpiredToken: The provided token has expired"):
        opened("obstore", "nothing_new").head(URL)


def test_places_without_credentials_and_local_files_ask_for_none(opened: Open, tmp_path: Path, server: TokenServer) -> None:
    (tmp_path / "x").write_bytes(b"12")
    assert opened("obstore", "failing").head(str(tmp_path / "x")).size_bytes == 2
    assert server.num_tokens == 0


def test_what_a_function_raises_is_said_without_secrets(opened: Open) -> None:
    with pytest.raises(
        TransientStorageError, match=r"tests\.storage\.tokens:failing' raised RuntimeError: .*gave up after 2"
    ) as caught:
        opened("obstore", "failing").head(URL)
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("name", ["tests.storage.tokens:gone", "no_such_module:get"])
def test_a_function_that_is_not_there_is_named(name: str) -> None:
    source = credential_source(name, [])
    assert source is not None
    with pytest.raises(ConfigError, match=f"{name}.*is not there"):
        source.current()


def test_a_module_beside_the_program_is_found_behind_our_own_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ours_for_a_test.py").write_text(
        "class Vault:\n    @staticmethod\n    def get():\n        return {'token': 'x'}\n"
    )
    source = credential_source("ours_for_a_test:Vault.get", [str(tmp_path)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert source is not None
    assert source.current().options == {"token": "x"}


@pytest.mark.parametrize("value", [{"token": "hidden"}, "hidden", "a:b:c", "1a:b", ""])
def test_what_names_no_function_is_refused_and_not_shown(value: object) -> None:
    with pytest.raises(ConfigError, match="module:function") as caught:
        StorageOptions(storage_options={"credentials": value})
    assert "hidden" not in str(caught.value)


def test_a_file_system_object_has_its_own_credentials() -> None:
    with pytest.raises(ConfigError, match="leave one of them out"):
        StorageOptions(storage_options={"credentials": "a:b", "filesystem": object()})


# -- by the clock ---------------------------------------------------------------------------------------------------------


class Vault:
    """Gives credentials that end at a time."""

    def __init__(self, seconds: float | None = None) -> None:
        self.now = 1000.0
        self.seconds = seconds
        self.num_asked = 0
        self.error: Exception | None = None
        self.source = CredentialSource("vault:get", self.ask, lambda: self.now)

    def ask(self) -> Mapping[str, object]:
        if self.error is not None:
            raise self.error
        self.num_asked += 1
        ends_at = None if self.seconds is None else self.now + self.seconds
        return {"token": str(self.num_asked), "expires_at": ends_at}


@pytest.mark.parametrize(("seconds", "early"), [(3600.0, 300.0), (100.0, 10.0)])
def test_credentials_are_renewed_before_they_end(seconds: float, early: float) -> None:
    vault = Vault(seconds)
    for now, number in ((0, 1), (seconds - early - 1, 1), (seconds - early, 2), (seconds, 2), (2 * (seconds - early), 3)):
        vault.now = 1000.0 + now
        assert vault.source.current().options == {"token": str(number)}
        assert vault.source.current().number == number


def test_while_they_are_good_a_function_that_fails_is_asked_again_later(caplog: pytest.LogCaptureFixture) -> None:
    vault = Vault(3600.0)
    first = vault.source.current()
    vault.now, vault.error = first.renew_at, RuntimeError("no network")
    for _ in range(3):
        assert vault.source.current().options == first.options
    assert [record.getMessage().rpartition("; ")[2] for record in caplog.records] == ["what it gave before ends in 300 s"]
    vault.now += 30
    vault.error = None
    assert vault.source.current().number == 2
    vault.now, vault.error = vault.now + 3600, RuntimeError("no network")
    with pytest.raises(TransientStorageError, match="no network"):
        vault.source.current()


@pytest.mark.parametrize(
    "end",
    [
        1_700_000_000,
        1_700_000_000.5,
        "2023-11-14T22:13:20Z",
        "2023-11-14T22:13:20",
        datetime.datetime(2023, 11, 14, 22, 13, 20, tzinfo=datetime.UTC),
        datetime.datetime(2023, 11, 14, 22, 13, 20),
    ],
)
def test_an_end_is_taken_in_each_form(end: object) -> None:
    granted = CredentialSource("a:b", lambda: {"expires_at": end}, lambda: 0.0).current()
    assert int(granted.ends_at) == 1_700_000_000


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"expires_at": "soon"}, "expires_at='soon', which is no time"),
        ({"expires_at": math.nan}, "which is no time"),
        ({"expires_at": True}, "which is no time"),
        ({"expires_at": 1_900_000_000_000}, r"expires_at=1900000000000, .*: give seconds \(divide milliseconds by 1000\)"),
        ("token", "gave a str"),
        ({"endpoint_url": "http://h"}, "gave 'endpoint_url', which is no credential"),
        ({"headers": {"Authorization": 5}}, r"'a:b' gave headers\['Authorization'\] as a int: return a text"),
        ({"headers": {"Authorization": None}}, r"gave headers\['Authorization'\] as a NoneType: return a text"),
        ({"headers": {"Authorization": b"hidden"}}, r"gave headers\['Authorization'\] as a bytes: return a text"),
        ({"headers": {b"hidden": "x"}}, "gave a header whose name is a bytes: return names as texts"),
        ({"headers": ["hidden"]}, "gave headers as a list: return a dict"),
    ],
)
def test_what_is_no_answer_of_such_a_function_is_refused(given: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        CredentialSource("a:b", lambda: given).current()
    assert "hidden" not in str(caught.value)


def test_credentials_that_have_ended_by_our_clock_are_tried_and_said(caplog: pytest.LogCaptureFixture) -> None:
    source = CredentialSource("a:b", lambda: {"token": "x", "expires_at": 10}, lambda: 20.0)
    assert source.current().ends_at == math.inf
    assert source.current().number == 1
    assert "ended 10 s ago: check the clock" in caplog.text


@pytest.mark.parametrize("error", [SystemExit("no login"), KeyboardInterrupt("no login"), GeneratorExit("no login")])
def test_a_function_that_ends_its_thread_is_said_and_not_waited_for(error: BaseException) -> None:
    def get() -> object:
        raise error

    with pytest.raises(TransientStorageError, match=f"'a:b' raised {type(error).__name__}: no login"):
        CredentialSource("a:b", get).current()


class Silent:
    """A function that gives credentials at once, and from then on when it is let."""

    def __init__(self, patience_seconds: float) -> None:
        self.now = 1000.0
        self.may_return, self.is_asked = threading.Event(), threading.Event()
        self.num_asked = 0
        self.source = CredentialSource("silent:get", self.get, lambda: self.now, patience_seconds)

    def get(self) -> Mapping[str, object]:
        self.num_asked += 1
        if self.num_asked > 1:
            self.is_asked.set()
            self.may_return.wait()
        return {"token": str(self.num_asked), "expires_at": self.now + 3600}


def test_a_function_that_never_returns_is_waited_for_by_few_tries_and_by_the_others_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float | None] = []
    wait, thread = threading.Event.wait, threading.current_thread()

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is thread:
            waits.append(timeout)
        return wait(event, timeout)

    silent = Silent(0.05)
    silent.now = silent.source.current().ends_at
    for _ in range(5):
        with pytest.raises(TransientStorageError, match="has not returned"):
            silent.source.current()
    monkeypatch.setattr(threading.Event, "wait", noted)
    with pytest.raises(TransientStorageError, match="has not returned"):
        silent.source.current()
    silent.may_return.set()
    assert waits == [0, 0]


def test_a_function_that_does_not_return_holds_up_no_thread_with_good_credentials() -> None:
    silent = Silent(1000.0)
    first = silent.source.current()
    silent.now = first.renew_at
    with ThreadPoolExecutor(1) as pool:
        later = pool.submit(silent.source.current)
        silent.is_asked.wait()
        meanwhile = [silent.source.current() for _ in range(3)]
        silent.may_return.set()
        assert later.result().options == {"token": "2"}
    assert meanwhile == [first] * 3
    assert silent.source.current().options == {"token": "2"}
    assert silent.num_asked == 2


def test_a_function_that_does_not_return_is_an_error_at_the_end_of_credentials(
    caplog: pytest.LogCaptureFixture,
) -> None:
    silent = Silent(0.01)
    first = silent.source.current()
    silent.now = first.renew_at
    assert silent.source.current().options == first.options
    assert "silent:get' has not returned for 0 s: have it give up after a time" in caplog.text
    silent.now = first.ends_at
    with pytest.raises(TransientStorageError, match="has not returned"):
        silent.source.current()
    with pytest.raises(TransientStorageError, match="has not returned"):
        silent.source.after_refusal(first)
    assert silent.num_asked == 2  # one thread waits for it, however often it is wanted
    assert caplog.text.count("no request is made before it does") == 1
    silent.may_return.set()


def test_an_answer_is_copied_so_that_one_dict_that_is_filled_again_holds_new_credentials() -> None:
    answer: dict[str, dict[str, str]] = {"headers": {}}
    numbers = iter(range(9))

    def get() -> object:
        answer["headers"]["Authorization"] = f"Bearer {next(numbers)}"
        return answer

    source = CredentialSource("a:b", get)
    first = source.current()
    renewed = source.after_refusal(first)
    assert renewed is not None
    assert (first.options, renewed.options) == (
        {"headers": {"Authorization": "Bearer 0"}},
        {"headers": {"Authorization": "Bearer 1"}},
    )


@pytest.mark.parametrize(
    ("url", "given", "answer", "parting"),
    [
        ("https://h/x", {}, {"headers": {"Authorization": "me", "X-Tenant": "a"}}, r"headers'\]\['X-Tenant"),
        ("https://h/x", {"headers": {"X-Tenant": "b"}}, {"headers": {"x-tenant": "a"}}, r"headers'\]\['x-tenant"),
        ("gs://bucket/x", {}, {"token": '{"gcs_base_url": "http://other"}'}, "token"),
        ("abfs://c/x", {"backend": "fsspec"}, {"connection_string": "AccountName=other;AccountKey=x"}, "connection_string"),
        ("sftp://h/~/x", {}, {"username": "bob", "password": "x"}, "username"),
    ],
)
def test_what_a_function_gives_leads_to_no_other_object_than_the_key_names(
    url: str, given: Mapping[str, object], answer: Mapping[str, object], parting: str
) -> None:
    resolver = Resolver(StorageOptions(storage_options=given), CredentialSource("a:b", lambda: answer))
    with pytest.raises(
        ConfigError, match=rf"'a:b' gave storage_options\['{parting}'\], which chooses what is read: give it in"
    ):
        resolver.storage(url).head(url)


def test_what_a_function_gives_may_repeat_what_the_options_say() -> None:
    given = {"headers": {"X-Tenant": "a"}, "username": "bob"}
    assert PartingOptions(given, {"headers": {"x-tenant": "a", "Authorization": "me"}}).at("https://h/x") == []
    assert PartingOptions(given, {"username": "bob", "password": "new"}).at("sftp://h/x") == []


def test_what_a_function_gives_may_part_some_objects_of_a_scheme_and_not_others() -> None:
    parting = PartingOptions({}, {"username": "bob", "password": "x"})
    assert parting.at("zip://a.txt::s3://bucket/b.zip") == []
    assert parting.at("zip://a.txt::sftp://h/b.zip") == ["username"]


# -- by the server's word -------------------------------------------------------------------------------------------------


class Refusing:
    """A backend that refuses some credentials, when it is asked or in the middle of a listing."""

    def __init__(self, granted: Granted, bad: Mapping[int, SqlStreamError]) -> None:
        self.number, self._bad = granted.number, bad

    def head(self, url: str) -> ObjectInfo:
        if error := self._bad.get(self.number):
            raise error
        return ObjectInfo(url=url, size_bytes=self.number, etag=None)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        if not after:
            yield ObjectInfo(url=f"{prefix}a", size_bytes=0, etag=None)
        yield self.head(f"{prefix}b")


def renewed(vault: Vault, *bad: SqlStreamError) -> RenewedStorage:
    numbered = dict(enumerate(bad, 1))
    return RenewedStorage(vault.source, lambda granted: cast(Storage, Refusing(granted, numbered)))


def refused(status: int, code: str = "") -> SqlStreamError:
    return error_for_status(status, URL, detail=f"<Code>{code}</Code>" if code else "")


@pytest.mark.parametrize("error", [refused(401), refused(403, "InvalidAccessKeyId"), refused(400, "ExpiredToken")])
def test_a_refusal_of_the_credentials_is_renewed_three_times(error: SqlStreamError) -> None:
    assert renewed(Vault(3600), *[error] * 3).head(URL).size_bytes == 4
    vault = Vault(3600)
    with pytest.raises(type(error)):
        renewed(vault, *[error] * 9).head(URL)
    assert vault.num_asked == 4


def test_a_right_that_is_missing_is_not_renewed_where_the_end_of_the_credentials_is_known() -> None:
    for seconds, num_asked in ((3600.0, 1), (None, 2)):
        vault = Vault(seconds)
        with pytest.raises(AccessDeniedError):
            renewed(vault, *[refused(403, "AccessDenied")] * 9).head(URL)
        assert vault.num_asked == num_asked


def test_a_listing_that_is_refused_in_the_middle_can_be_begun_again() -> None:
    storage = renewed(Vault(), refused(400, "ExpiredToken"))
    listing = storage.list("s3://bucket/")
    assert next(listing).url.endswith("a")
    with pytest.raises(TransientStorageError, match="ExpiredToken"):
        next(listing)
    assert [info.size_bytes for info in storage.list("s3://bucket/")] == [0, 2]
    assert [info.size_bytes for info in storage.list("s3://bucket/", after="s3://bucket/a")] == [2]


class PagedStore:
    """Lists names in pages of 1000 to those who send a token, each of which is good for two of them.

    Args:
        names: Keys in `s3://bucket/`, in order.
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.num_tokens = self.num_pages = 0
        self._num_left: dict[str, int] = {}

    def __call__(self, request: str) -> bytes:
        if request.startswith("GET /token "):
            self.num_tokens += 1
            self._num_left[f"token-{self.num_tokens}"] = 2
            return answer("200 OK", f"token-{self.num_tokens}")
        token = re.search(r"x-amz-security-token: (\S+)", request, re.IGNORECASE)
        if token is None or not self._num_left[token[1]]:
            return answer("400 Bad Request", EXPIRED.decode())
        self._num_left[token[1]] -= 1
        self.num_pages += 1
        after = re.search(r"[?&](?:start-after|continuation-token)=([^& ]+)", request)
        start = self._names.index(unquote(after[1])) + 1 if after else 0
        page = self._names[start : start + 1000]
        is_cut = start + 1000 < len(self._names)
        following = f"<NextContinuationToken>{page[-1]}</NextContinuationToken>" if is_cut else ""
        dated = "<LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>1</Size>"
        objects = "".join(f"<Contents><Key>{name}</Key>{dated}</Contents>" for name in page)
        return answer(
            "200 OK",
            f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{following}{objects}</ListBucketResult>",
        )


def answer(status: str, body: str) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def test_a_listing_may_outlive_any_number_of_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{number:05}" for number in range(12_500)]
    store = PagedStore(names)
    with RawServer(always=store) as server:
        endpoint = server.url.removesuffix("/bucket/x")
        monkeypatch.setenv(PLACE, endpoint)
        given = {"credentials": "tests.storage.tokens:keys", "endpoint_url": endpoint, "region": "us-east-1"}
        fetcher = Fetcher(StorageOptions(storage_options=given, num_retries=1))
        try:
            assert [info.url.removeprefix("s3://bucket/") for info in fetcher.list("s3://bucket/")] == names
        finally:
            fetcher.stop()
    assert (store.num_pages, store.num_tokens) == (13, 7)  # no page twice


def test_a_right_that_is_missing_once_credentials_have_ended_is_renewed() -> None:
    """S3 that answers 403 without a code: in the middle of a listing, which keeps the credentials that it began with."""
    vault = Vault(3600)
    listing = renewed(vault, refused(403)).list("s3://bucket/")
    next(listing)
    vault.now += 3600
    with pytest.raises(TransientStorageError, match="they were renewed"):
        next(listing)
