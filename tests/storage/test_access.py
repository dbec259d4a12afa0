from __future__ import annotations

from collections.abc import Sequence

import pytest

from sqlstream.errors import AccessDeniedError
from sqlstream.storage.base.access import OWN, Access, Origin, Rules, check_redirect, origin_at
from sqlstream.storage.base.addresses import is_private_literal
from sqlstream.storage.base.credentials import place_of

REMOTE = "https://data.example.org/index.parquet"


def check_allowed(url: str, *, index_url: str, allowed_roots: Sequence[str] = ()) -> str:
    """Return what is read for `url`, which the table at `index_url` names."""
    rules = Rules(allowed_roots=tuple(allowed_roots), places=frozenset((place_of(index_url),)))
    return rules.judge(url, origin_at(index_url), named_by=index_url).url


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
    for unclear in ("http://h:999999/x", "http://a@b@c/x"):
        with pytest.raises(AccessDeniedError, match=r"redirects to http.*cannot be read in one way only"):
            check_redirect("http://8.8.8.8/x", unclear)
    check_redirect("http://8.8.8.8/x", "https://1.1.1.1/x")
    check_redirect("http://127.0.0.1:1/x", "http://127.0.0.1:2/x")
    check_redirect("http://10.0.0.1/x", "http://127.0.0.1:2/x")


@pytest.mark.parametrize("host", ["8.8.8.8", "example.org", "s3.amazonaws.com", "1.1", "localhost.example.org"])
def test_public_hosts_are_public(host: str) -> None:
    assert not is_private_literal(host)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://127.0.0.1/x",
        "ftp://ftp.example.org/x",
        "sftp://localhost/etc/passwd",
        "ssh://10.0.0.1/x",
        "webhdfs://169.254.169.254:9870/x",
        "webdav://nas.local/x",
        "smb://host.example.org/share/x",
        "hdfs://namenode:8020/x",
        "http://%6cocalhost/x",
        "http://%31%32%37.0.0.1/x",
        "http://127.0.0.%31/x",
        "http://１２７.0.0.1/x",
        "http://127。0。0。1/x",
        "http://cdn.example.org@127.0.0.1/x",
        "http://cdn.example.org@evil@127.0.0.1/x",
        "http://[::ffff:169.254.169.254]/x",
        "http://[fe80::1%25lo]/x",
        "http:///x",
        "https://data.example.org\\@evil.example.net/x",
        "https://data.example.org\t@evil.example.net/x",
        "s3://169.254.169.254#@bucket/x",
        "s3://127.0.0.1?bucket/x",
        "abfs://c@127.0.0.1\\x/x",
        "https://data.example.org/a/..\\..\\x",
    ],
)
def test_a_remote_index_may_not_reach_inside_by_another_spelling_or_scheme(url: str) -> None:
    with pytest.raises(AccessDeniedError, match=r"allowed_roots=\["):
        check_allowed(url, index_url=REMOTE)


def test_schemes_that_look_hosts_up_themselves_lead_to_the_host_of_the_source_and_to_allowed_roots() -> None:
    assert check_allowed("sftp://h.example.org/b", index_url="sftp://h.example.org/i.csv") == "sftp://h.example.org/b"
    check_allowed("ftp://other.example.org/b", index_url=REMOTE, allowed_roots=["ftp://other.example.org/"])
    for url in ("sftp://other.example.org/b", "sftp://h.example.org:2222/b", "ftp://h.example.org/b"):
        with pytest.raises(AccessDeniedError, match="cannot be bound"):
            check_allowed(url, index_url="sftp://h.example.org/i.csv")


def test_dots_are_taken_out_where_the_rest_lies_below_an_allowed_root() -> None:
    roots = ["s3://bucket/photos", "/data", "http://h.example.org/a/"]
    for url, expected in (
        ("s3://bucket/meta/../photos/x.jpg", "s3://bucket/photos/x.jpg"),
        ("/data/a/../x", "/data/x"),
        ("http://h.example.org/b/../a/x?sig=1", "http://h.example.org/a/x?sig=1"),
    ):
        assert check_allowed(url, index_url=REMOTE, allowed_roots=roots) == expected
    for url in (
        "s3://bucket/photos/../x",
        "/data/../etc/passwd",
        "s3://bucket/../bucket/photos/x",
        "s3://bucket/photos/%2e%2e/x",
    ):
        with pytest.raises(AccessDeniedError):
            check_allowed(url, index_url=REMOTE, allowed_roots=roots)


def test_the_error_names_the_rows_own_text_and_a_root_that_helps() -> None:
    rules = Rules(places=frozenset(("s3://bucket",)))
    with pytest.raises(AccessDeniedError) as caught:
        rules.judge(
            "s3://bucket/meta/../photos/x", Origin(is_foreign=True), named_by="s3://bucket/meta/i.csv", written="../photos/x"
        )
    assert "'../photos/x'" in str(caught.value)
    root = str(caught.value).partition("allowed_roots=['")[2].partition("'")[0]
    helped = Rules(allowed_roots=(root,))
    url = helped.judge("s3://bucket/meta/../photos/x", Origin(is_foreign=True), named_by="i").url
    assert url == "s3://bucket/photos/x"


@pytest.mark.parametrize(
    ("url", "is_signed"),
    [
        ("s3://bucket/x", True),
        ("s3a://bucket/x", True),
        ("s3://me:secret@bucket/x", True),
        ("s3://other/x", False),
        ("gs://bucket/x", False),
        ("https://api.example.org/x", True),
        ("https://api.example.org:8443/x", False),
        ("https://api.example.org.evil.net/x", False),
    ],
)
def test_credentials_belong_to_the_places_of_the_source_and_to_those_listed(url: str, is_signed: bool) -> None:
    rules = Rules(places=frozenset(("s3://bucket",)), credential_hosts=("https://api.example.org",))
    access = rules.judge(url, Origin(is_foreign=True), named_by="i").access
    assert access.is_signed is is_signed
    assert access.is_judged is url.startswith("http")
    assert rules.judge(url, Origin(is_foreign=False), named_by="i").access == Access(is_signed=is_signed)
    assert Rules().judge(url, Origin(is_foreign=False), named_by="i").access == OWN


def test_each_repository_is_a_place_of_its_own() -> None:
    rules = Rules(places=frozenset(("hf://datasets/me/mine",)))
    for url, is_signed in (
        ("hf://datasets/me/mine/a", True),
        ("hf://datasets/me/other/a", False),
        ("hf://datasets/me/mine/b", True),
    ):
        assert rules.judge(url, Origin(is_foreign=True), named_by="i").access.is_signed is is_signed


@pytest.mark.parametrize("row", ["plain.jpg", "github://org:repo@/a.jpg", "myown://place/a.jpg"])
def test_a_row_with_a_scheme_that_is_not_known_is_refused_unless_its_root_is_allowed(row: str) -> None:
    index_url = f"{row.partition('://')[0] if '://' in row else 'github'}://org:repo@/i.parquet"
    url = row if "://" in row else f"github://org:repo@/{row}"
    with pytest.raises(
        AccessDeniedError, match=r"has the scheme '(github|myown)', which may read from this machine.*allowed_roots"
    ):
        check_allowed(url, index_url=index_url)
    assert check_allowed(url, index_url=index_url, allowed_roots=[url.rpartition("/")[0] + "/"]) == url
