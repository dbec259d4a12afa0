"""`storage.credentials`: the tables, and to whom credentials belong."""

from __future__ import annotations

import pytest

from sqlstream.storage.base.credentials import (
    CREDENTIAL_HEADERS,
    CREDENTIAL_OPTIONS,
    belongs_to,
    is_credential_header,
    is_credential_option,
    place_of,
    without_credentials,
)
from sqlstream.storage.base.settings import known_keys

HARMLESS = """
    account_name account_url allow_http allow_invalid_certificates anon backend base_url client_kwargs connect_timeout
    credential_hosts default_region endpoint endpoint_url filesystem headers hedge_factor http1_only http2_only
    pool_idle_timeout pool_max_idle_per_host profile project proxy_ca_certificate proxy_excludes proxy_url read_timeout region
    region_name root_certificate s3_express skip_signature timeout unsigned_payload use_emulator use_fabric_endpoint user_agent
    verify verify_etag virtual_hosted_style_request
""".split()


def test_each_option_that_we_know_is_either_a_credential_or_known_to_be_none() -> None:
    unknown = {name for name in known_keys() if not is_credential_option(name)} - set(HARMLESS)
    assert not unknown
    assert not [name for name in HARMLESS if is_credential_option(name)]


def test_the_tables_are_in_lower_case_and_their_names_are_credentials() -> None:
    assert all(name == name.lower() and is_credential_header(name.upper()) for name in CREDENTIAL_HEADERS)
    assert all(name == name.lower() and is_credential_option(name) for name in CREDENTIAL_OPTIONS)


def test_without_credentials_drops_them_at_any_depth_and_every_header() -> None:
    options = {
        "key": "AK",
        "endpoint_url": "http://minio:9000",
        "headers": {"Accept": "x"},
        "client_kwargs": {"aws_secret_access_key": "s", "region_name": "eu-1", "headers": {"Cookie": "c"}},
    }
    assert without_credentials(options) == {"endpoint_url": "http://minio:9000", "client_kwargs": {"region_name": "eu-1"}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://h/x", "http://h/x"),
        ("https://h/x", "https://h:8443/x"),
        ("https://h/x", "https://h.evil.org/x"),
        ("s3://a/x", "s3://b/x"),
        ("abfs://c@one.dfs.core.windows.net/x", "abfs://c@two.dfs.core.windows.net/x"),
        ("hf://datasets/a/b/x", "hf://datasets/a/c/x"),
        ("sftp://h/x", "ftp://h/x"),
    ],
)
def test_places_that_differ_in_scheme_host_port_or_bucket_are_two(one: str, other: str) -> None:
    assert place_of(one) != place_of(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("https://H:443/x", "https://me:secret@h./y"),
        ("s3a://b/x", "s3://b/y"),
        ("hf://datasets/a/b@v1/x", "hf://datasets/a/b/y"),
    ],
)
def test_a_place_is_one_however_it_is_spelled(one: str, other: str) -> None:
    assert place_of(one) == place_of(other) != ""


def test_a_url_whose_host_is_not_clear_is_no_place_and_belongs_to_nothing() -> None:
    for url in ("https://a@b@c/x", "https:///x", "data.csv"):
        assert place_of(url) == ""
        assert not belongs_to(place_of(url), ["*"])


@pytest.mark.parametrize(
    ("url", "entry", "expected"),
    [
        ("https://[::1]:8443/x", "[::1]:8443", True),
        ("https://[::1]:8443/x", "[::1]:8444", False),
        ("http://nas:8443/x", "NAS:8443", True),
        ("https://api.example.org/x", "api.example.org", True),
        ("https://api.example.org:8443/x", "api.example.org", True),
        ("https://api.example.org:8443/x", "api.example.org:443", False),
        ("http://127.0.0.1:8080/x", "127.0.0.1:8080", True),
        ("https://api.example.org/x", "https://api.example.org/", True),
        ("http://api.example.org/x", "https://api.example.org", False),
        ("https://api.example.org.evil.net/x", "api.example.org", False),
        ("https://evil.net/api.example.org", "api.example.org", False),
        ("https://a.example.org/x", "*.example.org", True),
        ("https://example.org/x", "*.example.org", False),
        ("s3://my-bucket/x", "my-bucket", True),
        ("s3://my-bucket/x", "s3://my-bucket", True),
        ("s3://my-bucket-2/x", "s3://my-bucket", False),
        ("gs://my-bucket/x", "s3://*", False),
    ],
)
def test_credential_hosts_name_hosts_and_buckets(url: str, entry: str, expected: bool) -> None:
    assert belongs_to(place_of(url), [entry]) is expected
