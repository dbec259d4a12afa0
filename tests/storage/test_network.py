"""Certificates, names, proxies, redirects, regions: what lies between us and the bytes."""

from __future__ import annotations

import base64
import re
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, StorageError, TransientStorageError
from sqlstream.storage.backends.http import HttpStorage
from sqlstream.storage.backends.http_pools import Pools, discover_region, proxy_for
from sqlstream.storage.base.settings import Network, network_settings
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage.downloads import Downloads
from tests.storage.raw import RawServer
from tests.storage.tunnel import Tunnel

DATA = b"data" * 1000
_MORE_WAYS = ("root_certificate", "verify=False")
Make = Callable[..., Fetcher]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Fetcher] = []

    def make(num_retries: int = 1, **options: object) -> Fetcher:
        made.append(Fetcher(StorageOptions(storage_options=options, num_retries=num_retries)))
        return made[-1]

    yield make
    for fetcher in made:
        fetcher.stop()


@pytest.fixture
def tls(certificate: Path) -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"/bucket/x": DATA}, certificate=certificate) as server:
        yield server


def read(fetcher: Fetcher, url: str, directory: Path) -> bytes:
    fetcher.download(url, directory / "read")
    return (directory / "read").read_bytes()


class TestCertificates:
    @pytest.mark.parametrize("path", ["/bucket/x", "/bucket/x?query=1"])  # obstore, urllib3
    def test_a_certificate_that_nobody_vouches_for_is_refused(
        self, make: Make, tls: FaultyHttpServer, tmp_path: Path, path: str
    ) -> None:
        with pytest.raises(StorageError, match=r"(?i)certificate"):
            read(make(), tls.url + path, tmp_path)
        assert tls.requests() == []

    def test_its_error_names_the_cure(self, tls: FaultyHttpServer) -> None:
        with pytest.raises(StorageError, match=r"bucket/x: .*certificate.*root_certificate") as caught:
            HttpStorage(StorageOptions()).get(tls.url + "/bucket/x")
        assert type(caught.value) is StorageError  # not tried again

    @pytest.mark.parametrize(
        ("sent", "kind", "said"),
        [
            (b"", TransientStorageError, "127.0.0.1"),
            (b"\x16\x03\x03\x00\x40\x02", TransientStorageError, "ended while it was being encrypted"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", StorageError, "does not encrypt: check the port"),
        ],
        ids=["nothing", "a part of the handshake", "http"],
    )
    def test_a_handshake_that_breaks_off_is_tried_again_and_one_that_is_none_is_not(
        self, sent: bytes, kind: type[StorageError], said: str
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:

            def answer() -> None:
                with listener.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(sent)

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(StorageError, match=said) as caught:
                HttpStorage(StorageOptions()).get(f"https://127.0.0.1:{listener.getsockname()[1]}/x")
            thread.join()
        assert type(caught.value) is kind

    def test_on_s3_too(self, make: Make, tls: FaultyHttpServer, tmp_path: Path) -> None:
        with pytest.raises(StorageError, match="certificate is not valid") as caught:
            read(make(anon=True, endpoint_url=tls.url, region="r"), "s3://bucket/x", tmp_path)
        assert type(caught.value) is StorageError  # not tried again

    def test_s3_takes_an_authority_that_the_user_names(
        self, make: Make, tls: FaultyHttpServer, certificate: Path, tmp_path: Path
    ) -> None:
        options = {"anon": True, "endpoint_url": tls.url, "region": "r", "verify": str(certificate.with_name("ca.pem"))}
        assert read(make(num_retries=0, **options), "s3://bucket/x", tmp_path) == DATA

    @pytest.mark.parametrize("path", ["/bucket/x", "/bucket/x?query=1"])
    @pytest.mark.parametrize("how", ["verify", "insecure", *(pytest.param(x, marks=pytest.mark.slow) for x in _MORE_WAYS)])
    def test_it_is_taken_when_the_user_names_it(
        self, make: Make, tls: FaultyHttpServer, certificate: Path, tmp_path: Path, how: str, path: str
    ) -> None:
        authority = certificate.with_name("ca.pem")
        options: dict[str, dict[str, object]] = {
            "verify": {"verify": str(authority)},
            "root_certificate": {"root_certificate": authority.read_text()},
            "insecure": {"allow_invalid_certificates": True},
            "verify=False": {"verify": False},
        }
        assert read(make(num_retries=0, **options[how]), tls.url + path, tmp_path) == DATA


@pytest.mark.parametrize("url", ["s3://bucket/x", "http://no-such-host.invalid/x", "https://no-such-host.invalid/x?q=1"])
def test_a_name_that_does_not_exist_is_tried_again_and_named(make: Make, tmp_path: Path, url: str) -> None:
    fetcher = make(anon=True, region="r", endpoint_url="https://no-such-host.invalid")
    with pytest.raises(
        TransientStorageError, match=r"(?is)no-such-host\.invalid.*(lookup|resolve|name).*gave up after 2 tries"
    ):
        read(fetcher, url, tmp_path)


@pytest.mark.parametrize("path", ["/x", "/x?query=1"])
def test_a_proxy_is_used_for_http(make: Make, server: FaultyHttpServer, tmp_path: Path, path: str) -> None:
    """The server plays the proxy: it answers for a host that does not exist."""
    server.objects["/x"] = DATA
    assert read(make(proxy_url=server.url), f"http://far-away.invalid{path}", tmp_path) == DATA
    assert server.requests("/x")[-1].headers["host"] == "far-away.invalid"


def test_a_proxy_is_used_for_s3(make: Make, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/bucket/x"] = DATA
    fetcher = make(proxy_url=server.url, anon=True, endpoint_url="http://far-away.invalid", region="r")
    assert read(fetcher, "s3://bucket/x", tmp_path) == DATA


@pytest.mark.parametrize("path", ["/x", "/x?query=1"])
def test_the_proxy_of_the_environment_is_used_but_for_its_exceptions(
    make: Make, server: FaultyHttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    server.objects["/x"] = DATA
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, server.url)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    assert read(make(), f"http://far-away.invalid{path}", tmp_path) == DATA
    with FaultyHttpServer({"/x": b"direct"}) as other:
        assert read(make(), other.url + path, tmp_path) == b"direct"


@pytest.mark.parametrize("is_environment", [False, True], ids=["option", "environment"])
@pytest.mark.parametrize(
    ("excludes", "host", "is_excluded"),
    [
        ("corp", "corp", True),
        (".corp", "a.corp", True),
        ("corp, Example.ORG", "a.example.org", True),
        ("corp", "notcorp", False),
        ("*", "far.org", True),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("fd00::/8", "fd00::1", True),
        ("10.1.2.3", "10.1.2.3", True),
        ("", "10.1.2.3", False),
    ],
)
def test_hosts_without_a_proxy_are_named_in_one_way_everywhere(
    monkeypatch: pytest.MonkeyPatch, excludes: str, host: str, is_excluded: bool, is_environment: bool
) -> None:
    options = {} if is_environment else {"proxy_url": "http://p:1", "proxy_excludes": excludes}
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, excludes if is_environment else "")
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "p:1")
    assert proxy_for(network_settings(options), "http", host) == ("" if is_excluded else "http://p:1")


def test_the_exceptions_of_the_environment_are_not_those_of_the_user_s_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "far.org")
    assert proxy_for(network_settings({"proxy_url": "http://p:1"}), "http", "far.org") == "http://p:1"
    monkeypatch.setenv("http_proxy", "http://q:1")
    assert proxy_for(network_settings({"proxy_excludes": "own.org"}), "http", "own.org") == ""


def test_a_proxy_for_all_schemes_is_that_of_those_without_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: {"all": "a:1", "https": "http://b:1"})
    assert proxy_for(Network(), "http", "far.org") == "http://a:1"
    assert proxy_for(Network(), "https", "far.org") == "http://b:1"


@pytest.mark.parametrize(
    ("options", "environment", "name"),
    [
        ({}, {"all": "socks5://u:secret@p:1"}, "ALL_PROXY in the environment"),
        ({}, {"http": "SOCKS5://u:secret@p:1"}, "HTTP_PROXY in the environment"),
        ({"proxy_url": "socks5://u:secret@p:1"}, {}, "storage_options['proxy_url']"),
    ],
)
def test_a_proxy_of_another_kind_is_named(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, str], environment: dict[str, str], name: str
) -> None:
    monkeypatch.setattr(urllib.request, "getproxies", lambda: environment)
    with pytest.raises(ConfigError, match=rf"^{re.escape(name)} is a proxy that speaks socks5, .*http://host:port") as caught:
        proxy_for(network_settings(options), "http", "far.org")
    assert "secret" not in str(caught.value)
    assert proxy_for(network_settings(options | {"proxy_excludes": "far.org"}), "http", "far.org") == ""


def test_the_environment_is_asked_for_a_proxy_once_for_each_host(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value={})
    monkeypatch.setattr(urllib.request, "getproxies", asked)
    with FaultyHttpServer({"/bucket/x": DATA}) as server:
        storage = HttpStorage(StorageOptions())
        for _ in range(3):
            assert b"".join(storage.get(f"{server.url}/bucket/x").chunks()) == DATA
    assert asked.call_count == 1, "many times slower than all else that a request needs in a long environment"


def test_a_user_in_a_redirect_is_not_sent_to_the_proxy(make: Make, tmp_path: Path) -> None:
    found = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: http://me:hush@8.8.4.4/y\r\n\r\n"
    with RawServer(found, always=b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nsent") as server:
        assert read(make(proxy_url=server.url.removesuffix("/bucket/x")), "http://8.8.8.8/x", tmp_path) == b"sent"
    assert server.requests[1].startswith("GET http://8.8.4.4/y HTTP/1.1\r\n")


@pytest.mark.parametrize("url", ["http://far-away.invalid/x", "s3://bucket/x"])
def test_escapes_in_a_password_of_the_proxy_are_undone(make: Make, server: FaultyHttpServer, tmp_path: Path, url: str) -> None:
    server.objects |= {"/x": DATA, "/bucket/x": DATA}
    proxy = f"http://m%40e:p%2Fa%3As%C3%A4@127.0.0.1:{server.url.rpartition(':')[2]}"
    where = {"endpoint_url": "http://far-away.invalid", "anon": True} if url.startswith("s3") else {}
    assert read(make(proxy_url=proxy, **where), url, tmp_path) == DATA
    sent = server.requests()[0].headers["proxy-authorization"].removeprefix("Basic ")
    assert base64.b64decode(sent).decode() == "m@e:p/a:sä"


def test_a_password_of_the_proxy_is_sent_to_it_and_shown_nowhere(make: Make, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/x"] = DATA
    port = server.url.rpartition(":")[2]
    options = StorageOptions(storage_options={"proxy_url": f"http://me:hush@127.0.0.1:{port}"})
    assert "hush" not in repr(options)
    read(make(**options.storage_options), "http://far-away.invalid/x?q=1", tmp_path)
    assert server.requests("/x")[0].headers["proxy-authorization"].startswith("Basic ")
    broken = make(num_retries=0, proxy_url="http://me:hush@127.0.0.1:9")
    with pytest.raises(StorageError) as caught:
        read(broken, "http://far-away.invalid/x?q=1", tmp_path)
    assert "hush" not in str(caught.value)


class TestRedirects:
    def test_into_a_private_network_is_refused(self, server: FaultyHttpServer, make: Make, tmp_path: Path) -> None:
        """A proxy plays the public server: its address is public by its spelling."""
        server.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location="http://169.254.169.254/secret"))
        with pytest.raises(AccessDeniedError, match="private network"):
            read(make(proxy_url=server.url), "http://8.8.8.8/x", tmp_path)
        assert server.requests("/secret") == []

    def test_credentials_and_headers_stay_with_the_server_that_they_are_for(
        self, server: FaultyHttpServer, make: Make, tmp_path: Path
    ) -> None:
        with FaultyHttpServer({"/y": DATA}) as other:
            server.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location=f"{other.url}/y"))
            fetcher = make(headers={"X-Token": "secret"})
            port = server.url.rpartition(":")[2]
            assert read(fetcher, f"http://me:secret@127.0.0.1:{port}/x", tmp_path) == DATA
            assert {"authorization", "x-token"} <= server.requests("/x")[0].headers.keys()
            assert not {"authorization", "x-token"} & other.requests("/y")[0].headers.keys()

    @pytest.mark.parametrize(
        ("start", "target", "is_same"),
        [
            ("http://far.invalid/x", "http://FAR.Invalid/y", True),
            ("http://far.invalid/x", "http://far.invalid./y", True),
            ("http://far.invalid/x", "http://far.invalid:80/y", True),
            ("http://far.invalid/x", "http://far%2Einvalid/y", True),
            ("http://FAR.invalid:80/x", "//far.invalid/y", True),
            ("http://far.invalid/x", "http://far.invalid:8080/y", False),
            ("http://far.invalid/x", "http://www.far.invalid/y", False),
            ("http://far.invalid/x", "http://far.invalid@other.invalid/y", False),
        ],
    )
    def test_headers_go_along_to_the_same_server_however_it_is_spelled(
        self, server: FaultyHttpServer, make: Make, tmp_path: Path, start: str, target: str, is_same: bool
    ) -> None:
        server.objects["/y"] = DATA
        server.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location=target))
        fetcher = make(proxy_url=server.url, headers={"X-Token": "secret"})
        assert read(fetcher, start, tmp_path) == DATA
        assert server.requests("/x")[0].headers["x-token"] == "secret"
        assert ("x-token" in server.requests("/y")[0].headers) == is_same

    def test_in_a_circle_ends(self, server: FaultyHttpServer, make: Make, tmp_path: Path) -> None:
        server.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location="/x"))
        with pytest.raises(StorageError, match="more than 10 redirects"):
            read(make(num_retries=0), f"{server.url}/x?q=1", tmp_path)

    @pytest.mark.parametrize("scheme", ["http", "https"])
    def test_over_tls_into_a_private_network_is_refused(
        self, tls: FaultyHttpServer, server: FaultyHttpServer, make: Make, certificate: Path, tmp_path: Path, scheme: str
    ) -> None:
        """The server speaks for the public address 8.8.8.8, by a proxy, and has a certificate for it."""
        server.objects["/secret"] = DATA
        target = server.url if scheme == "http" else tls.url
        tls.objects["/secret"] = DATA
        tls.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location=f"{target}/secret"))
        tls.script("/y", always=FaultyAnswer(fault=Fault.REDIRECT, location="https://8.8.8.8/bucket/x"))
        with Tunnel(int(tls.url.rpartition(":")[2])) as tunnel:
            options = {"proxy_url": tunnel.url, "verify": str(certificate.with_name("ca.pem"))}
            fetcher = make(num_retries=0, **options)
            with pytest.raises(AccessDeniedError, match="private network"):
                read(fetcher, "https://8.8.8.8/x", tmp_path)
            assert read(fetcher, "https://8.8.8.8/y", tmp_path) == DATA
            assert set(tunnel.named) == {"8.8.8.8:443"}
        assert server.requests() == tls.requests("/secret") == []

    def test_each_is_counted_as_a_request(self, server: FaultyHttpServer, make: Make, tmp_path: Path) -> None:
        """Also where it leads to a failure: twice two."""
        server.objects["/y"] = DATA
        server.script("/x", always=FaultyAnswer(fault=Fault.REDIRECT, location="/y"))
        server.script("/y", FaultyAnswer(fault=Fault.STATUS, status=503))
        downloads = Downloads(make(), tmp_path)
        downloads.submit(f"{server.url}/x")
        (done,) = downloads.wait_done()
        assert (done.error, done.num_requests, done.num_retries) == (None, 4, 1)
        assert len(server.requests()) == 4


@pytest.mark.parametrize("status", [200, 301, 403])
def test_the_region_of_a_bucket_is_what_s3_says_whatever_else_it_answers(server: FaultyHttpServer, status: int) -> None:
    headers = (("x-amz-bucket-region", "eu-north-1"),)
    server.script("/bucket", always=FaultyAnswer(fault=Fault.STATUS, status=status, headers=headers))
    pools = Pools(StorageOptions())
    assert discover_region("bucket", pools, endpoint=server.url) == "eu-north-1"
    assert discover_region("other", pools, endpoint=server.url) is None


def test_a_bucket_is_read_in_the_region_that_s3_says(
    tls: FaultyHttpServer, make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Amazon's hosts are played by a local server, behind a proxy; nobody names region or endpoint."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    tls.script("/bucket", FaultyAnswer(fault=Fault.STATUS, status=403, headers=(("x-amz-bucket-region", "eu-north-1"),)))
    with Tunnel(int(tls.url.rpartition(":")[2])) as tunnel:
        fetcher = make(num_retries=0, anon=True, proxy_url=tunnel.url, verify=False)
        assert [read(fetcher, "s3://bucket/x", tmp_path) for _ in range(2)] == [DATA, DATA]
        assert tunnel.named[0] == "s3.amazonaws.com:443"
        assert set(tunnel.named[1:]) == {"s3.eu-north-1.amazonaws.com:443"}
    assert [(request.method, request.path) for request in tls.requests()] == [
        ("HEAD", "/bucket"),
        ("GET", "/bucket/x"),
        ("GET", "/bucket/x"),
    ]


def test_a_region_that_cannot_be_asked_for_is_none_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert discover_region("bucket", Pools(StorageOptions()), endpoint="http://127.0.0.1:9") is None
    assert "storage_options['region']" in caplog.text


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_requester_pays_is_sent(server: FaultyHttpServer, make: Make, tmp_path: Path, backend: str) -> None:
    server.objects["/bucket/x"] = DATA
    options = {"key": "k", "secret": "s", "endpoint_url": server.url, "region": "us-east-1", "requester_pays": True}
    assert read(make(backend=backend, **options), "s3://bucket/x", tmp_path) == DATA
    assert {request.headers.get("x-amz-request-payer") for request in server.requests("/bucket/x")} == {"requester"}


def test_the_http_client_does_not_mind_options_of_other_schemes(server: FaultyHttpServer) -> None:
    server.objects["/x"] = DATA
    storage = HttpStorage(StorageOptions(storage_options={"key": "of s3", "account_name": "of az"}))
    assert storage.head(f"{server.url}/x").size_bytes == len(DATA)
