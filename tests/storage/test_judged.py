"""Addresses are judged as they are connected to, whatever a name was said to lead to; credentials stay where they belong."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, StorageError
from sqlstream.storage.backends import http_pools
from sqlstream.storage.backends.http import HttpStorage
from sqlstream.storage.backends.http_pools import Pools
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.protocols import Storage
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer

UNSIGNED = Access(is_judged=False, is_signed=False)


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"/x": b"data", "/bucket/x": b"data"}) as running:
        yield running


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Names and what they lead to, first and last answer alike; others are asked for as ever."""
    known: dict[str, list[str]] = {}
    ask: Callable[..., Any] = socket.getaddrinfo

    def answer(host: str, port: int | None, *args: Any, **options: Any) -> Any:
        if host not in known:
            return ask(host, port, *args, **options)
        return [found for address in known[host] for found in ask(address, port, *args, **options)]

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    return known


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hosts that connections are made to; none of them is."""
    hosts: list[str] = []

    def refuse(_: socket.socket, address: tuple[Any, ...]) -> None:
        hosts.append(str(address[0]))
        raise ConnectionRefusedError("the test lets nothing out")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    return hosts


def read(storage: Storage, url: str) -> bytes:
    stream = storage.get(url)
    try:
        return b"".join(bytes(chunk) for chunk in stream.chunks())
    finally:
        stream.close()


def of_strangers(pools: Pools | None = None, **options: object) -> HttpStorage:
    return HttpStorage(StorageOptions(storage_options=options), pools, is_judged=True)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "%6cocalhost",
        "%31%32%37.0.0.1",
        "127.0.0.%31",
        "2130706433",
        "[::ffff:127.0.0.1]",
        "LOCALHOST.",
    ],
)
def test_a_judged_connection_never_reaches_this_machine_however_it_is_spelled(server: FaultyHttpServer, host: str) -> None:
    url = server.url.replace("127.0.0.1", host) + "/x"
    with pytest.raises((AccessDeniedError, StorageError)):
        read(of_strangers(), url)
    assert server.requests() == []


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["169.254.169.254"], ["::1"], ["::ffff:10.0.0.1"], ["64:ff9b::a9fe:a9fe"], ["10.0.0.1", "fd00::1"]],
)
def test_a_name_that_leads_into_a_private_network_is_refused_before_a_connection(
    names: dict[str, list[str]], connected: list[str], addresses: list[str]
) -> None:
    names["public.example.org"] = addresses
    for scheme in ("http", "https"):
        with pytest.raises(AccessDeniedError, match=rf"public.example.org.*allowed_roots=\['{scheme}://public.example.org/'\]"):
            read(of_strangers(), f"{scheme}://public.example.org/x")
    assert connected == []


def test_what_is_connected_to_is_the_address_that_was_judged_and_no_private_one_beside_it(
    names: dict[str, list[str]], connected: list[str]
) -> None:
    names["both.example.org"] = ["10.0.0.1", "8.8.8.8", "127.0.0.1"]
    with pytest.raises(StorageError, match=r"both\.example\.org"):
        read(of_strangers(), "http://both.example.org/x")
    assert connected == ["8.8.8.8"], "the literal: to ask for the name again may give another answer"


def test_what_the_user_names_is_not_judged_and_says_where_it_led(server: FaultyHttpServer, names: dict[str, list[str]]) -> None:
    names["own.example.org"] = ["127.0.0.1"]
    storage = HttpStorage(StorageOptions())
    assert read(storage, server.url.replace("127.0.0.1", "own.example.org") + "/x") == b"data"
    assert storage.head(f"{server.url}/x").is_private


def test_a_connection_that_the_user_made_is_not_taken_for_a_judged_read(server: FaultyHttpServer) -> None:
    options = StorageOptions()
    pools = Pools(options)
    assert read(HttpStorage(options, pools), f"{server.url}/x") == b"data"
    with pytest.raises(AccessDeniedError):
        read(of_strangers(pools), f"{server.url}/x")
    assert len(server.requests()) == 1


def test_a_redirect_of_a_public_server_to_a_name_of_a_private_one_is_refused(
    server: FaultyHttpServer, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_pools, "is_public", lambda address: address != "127.0.0.2")  # the server is a public one
    names["inside.example.org"] = ["127.0.0.2"]
    inside = server.url.replace("127.0.0.1", "inside.example.org")
    for location in (f"{inside}/x", f"{inside}/x?", inside.upper().replace("HTTP", "http") + "/x"):
        server.script("/x", FaultyAnswer(fault=Fault.REDIRECT, location=location))
        with pytest.raises(AccessDeniedError, match="redirects into a private network"):
            read(HttpStorage(StorageOptions()), f"{server.url}/x")


def test_a_proxy_is_not_asked_for_what_is_known_to_be_private(server: FaultyHttpServer, names: dict[str, list[str]]) -> None:
    names["inside.example.org"] = ["10.0.0.1"]
    for host in ("10.0.0.1", "localhost", "inside.example.org"):
        with pytest.raises(AccessDeniedError):
            read(of_strangers(proxy_url=server.url), f"http://{host}/x")
    assert server.requests() == []


def test_a_foreign_name_of_this_machine_is_refused_through_the_helper(server: FaultyHttpServer) -> None:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, 80)
    except OSError:
        pytest.skip("this machine's own name leads nowhere")
    with_name = server.url.replace("127.0.0.1", name)
    fetcher = Fetcher(StorageOptions(num_retries=0))
    try:
        reader = fetcher.with_access(Access(is_judged=True))
        for call in (reader.head, lambda url: reader.get_ranges(url, [(0, 1)])):
            with pytest.raises(AccessDeniedError, match="private network"):
                call(f"{with_name}/x")
    finally:
        fetcher.stop()


# -- credentials --------------------------------------------------------------------------------------------------------


def signatures(server: FaultyHttpServer) -> list[bool]:
    return ["authorization" in request.headers or "x-amz-security-token" in request.headers for request in server.requests()]


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_another_bucket_is_read_unsigned_whatever_options_and_environment_hold(
    server: FaultyHttpServer, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "FROM-THE-ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    given = {"key": "AK", "secret": "secret", "token": "token"}
    for keys in (given, {}):
        options = {**keys, "endpoint_url": server.url, "region": "us-east-1", "allow_http": True, "backend": backend}
        if backend == "fsspec":
            pytest.importorskip("s3fs")
            del options["allow_http"]
        fetcher = Fetcher(StorageOptions(storage_options=options, num_retries=0))
        try:
            num_before = len(server.requests())
            assert fetcher.with_access(UNSIGNED).head("s3://bucket/x").size_bytes == 4
            assert not any(signatures(server)[num_before:])
            fetcher.head("s3://bucket/x")
            assert signatures(server)[-1]
        finally:
            fetcher.stop()


def test_a_file_system_object_is_not_used_for_another_place() -> None:
    import fsspec

    fetcher = Fetcher(StorageOptions(storage_options={"filesystem": fsspec.filesystem("memory")}))
    try:
        with pytest.raises(AccessDeniedError, match=r"credential_hosts'\]=\['s3://other'\]"):
            fetcher.with_access(UNSIGNED).head("s3://other/x")
    finally:
        fetcher.stop()


@pytest.mark.parametrize("hosts", ["api.example.org", [1], [""], {"a": 1}])
def test_credential_hosts_that_are_no_list_of_hosts_are_refused(hosts: object) -> None:
    with pytest.raises(ConfigError, match="credential_hosts"):
        StorageOptions(storage_options={"credential_hosts": hosts})
