from __future__ import annotations

import pytest

from sqlstream.errors import AccessDeniedError
from sqlstream.storage.policy import check_allowed, check_redirect, is_private_literal

REMOTE = "https://data.example.org/index.parquet"


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/a.jpg",
        "gs://b/x",
        "abfs://c@account.dfs.core.windows.net/x",
        "https://cdn.example.org/x?sig=1",
        "hf://datasets/a/b",
    ],
)
def test_a_remote_index_may_name_objects_on_servers(url: str) -> None:
    check_allowed(url, index_url=REMOTE)


@pytest.mark.parametrize(
    "url",
    [
        "/etc/passwd",
        "etc/passwd",
        "file:///etc/passwd",
        "FILE:///etc/passwd",
        "local:///etc/passwd",
        "memory://x",
        "simplecache::file:///etc/passwd",
        "zip://x::/etc/passwd",
        "reference::/etc/x.json",
        "/data/../etc/passwd",
        "/data/%2e%2e/etc/passwd",
        "file:///data/..%2fetc/passwd",
        "s3://bucket/../x",
        "https://cdn.example.org/a/../../x",
        "http://127.0.0.1/x",
        "http://localhost:8080/x",
        "http://169.254.169.254/latest/meta-data/",
        "http://[::1]/x",
        "http://10.0.0.8/x",
        "http://2130706433/x",
        "http://metadata.google.internal/x",
        "/database/x",
    ],
)
def test_a_remote_index_may_name_nothing_on_this_machine_or_in_its_network(url: str) -> None:
    with pytest.raises(AccessDeniedError, match=r"remote index https://data\.example\.org"):
        check_allowed(url, index_url=REMOTE, allowed_roots=["/data"])


def test_allowed_roots_open_what_lies_below_them() -> None:
    roots = ["/data", "memory://", "http://10.0.0.8/sets"]
    for url in ("/data/a.jpg", "file:///data/a.jpg", "http://10.0.0.8/sets/x", "/data/b/c"):
        check_allowed(url, index_url=REMOTE, allowed_roots=roots)
    for url in ("/data-other/x", "http://10.0.0.8/setsx", "/data/../x", "data/x"):
        with pytest.raises(AccessDeniedError):
            check_allowed(url, index_url=REMOTE, allowed_roots=roots)


def test_a_local_index_may_name_anything() -> None:
    for url in ("/etc/passwd", "../x", "s3://bucket/x", "http://127.0.0.1/x"):
        check_allowed(url, index_url="/home/me/index.csv")
        check_allowed(url, index_url="file:///home/me/index.csv")


def test_an_index_from_the_private_network_may_name_objects_there() -> None:
    check_allowed("http://10.0.0.8/x", index_url="http://10.0.0.7/index.csv")


def test_the_error_shows_no_credentials() -> None:
    with pytest.raises(AccessDeniedError) as caught:
        check_allowed("http://me:secret@10.0.0.8/x?key=secret", index_url="https://me:secret@h.example.org/i.csv?sig=secret")
    assert "secret" not in str(caught.value)


def test_redirects_into_private_networks_and_to_other_schemes_are_refused() -> None:
    for target in ("http://127.0.0.1/x", "http://169.254.169.254/x", "http://localhost/x", "file:///etc/passwd", "ftp://h/x"):
        with pytest.raises(AccessDeniedError, match="redirect"):
            check_redirect("http://8.8.8.8/x", target)
    check_redirect("http://8.8.8.8/x", "https://1.1.1.1/x")
    check_redirect("http://127.0.0.1:1/x", "http://127.0.0.1:2/x")
    check_redirect("http://10.0.0.1/x", "http://127.0.0.1:2/x")


@pytest.mark.parametrize("host", ["8.8.8.8", "example.org", "s3.amazonaws.com", "1.1", "localhost.example.org"])
def test_public_hosts_are_public(host: str) -> None:
    assert not is_private_literal(host)
