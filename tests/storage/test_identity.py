"""What identifies an object: the table of docs/reliability.md, row by row."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem

from sqlstream.cache.model.refs import ObjectParts, ObjectRef
from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.identity import Identity, object_name

VARIABLES = (
    "AWS_ENDPOINT AWS_ENDPOINT_URL AWS_ENDPOINT_URL_S3 S3_ENDPOINT_URL AWS_PROFILE AWS_REGION AWS_DEFAULT_REGION "
    "AWS_CONFIG_FILE AWS_SHARED_CREDENTIALS_FILE AWS_ACCESS_KEY_ID "
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST GOOGLE_BASE_URL STORAGE_EMULATOR_HOST "
    "GOOGLE_APPLICATION_CREDENTIALS AZURE_STORAGE_ACCOUNT_NAME AZURE_STORAGE_ENDPOINT AZURE_ENDPOINT HF_ENDPOINT "
    "AZURE_STORAGE_CONNECTION_STRING FSSPEC_CONFIG_DIR"
).split()


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


def key(url: str, options: Mapping[str, Any] | None = None, namespace: str | None = None) -> bytes:
    return ObjectRef.of(url, identity=Identity(StorageOptions(storage_options=dict(options or {})), namespace)).key


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("https://h/audio?id=1&sr=44100", "https://h/audio?id=1&sr=16000"),
        ("https://h/a?st=0&se=10", "https://h/a?st=10&se=20"),
        ("https://h/a?sp=1&sv=2&sig=3", "https://h/a?sp=2&sv=3&sig=4"),
        ("https://h/a?expires=1", "https://h/a?expires=2"),
        ("s3://b/q?sp=1", "s3://b/q?sp=2"),
        ("abfs://train@acc.dfs.core.windows.net/x", "abfs://test@acc.dfs.core.windows.net/x"),
        ("abfss://train@acc/x", "abfss://test@acc/x"),
        ("abfs://c@one.dfs.core.windows.net/x", "abfs://c@two.dfs.core.windows.net/x"),
        ("s3://b/u@x/track#1.mp3", "s3://b/u@x/track#2.mp3"),
        ("s3://b/track#1.mp3", "s3://b/track#2.mp3"),
        ("s3://b/a?1", "s3://b/a?2"),
        ("s3://b/a?", "s3://b/a"),
        ("gs://b/a?x=1#1", "gs://b/a?x=1#2"),
        ("https://h/f?file=caf%E9.jpg&sig=secret", "https://h/f?file=caf%E8.jpg&sig=secret"),
        ("https://h/f?file=a%2Bb", "https://h/f?file=a+b"),
        ("https://h/f?a=1&b=2", "https://h/f?b=2&a=1"),
        ("sftp://alice@h/~/x", "sftp://bob@h/~/x"),
        ("sftp://alice@h/~/x", "sftp://h/~/x"),
        ("ftp://alice@h/x", "ftp://bob@h/x"),
        ("https://alice:one@api/me", "https://bob:one@api/me"),
        ("https://alice:one@api/me", "https://alice:two@api/me"),
        ("https://h:8080/x", "https://h:8081/x"),
        ("http://h/x", "https://h/x"),
        ("s3://b//a", "s3://b/a"),
        ("s3://b/a/../b", "s3://b/b"),
        ("s3://b/A", "s3://b/a"),
        ("s3://b/a%20b", "s3://b/a b"),
        ("s3://b/caf\u00e9", "s3://b/cafe\u0301"),
        ("https://h/a.", "https://h/a"),
        ("hf://datasets/o/n@main/x", "hf://datasets/o/n@v2/x"),
        ("hf://datasets/o/n/x", "hf://datasets/o/n@v2/x"),
        ("zip://a.txt::s3://b/x.zip", "zip://b.txt::s3://b/x.zip"),
        ("zip://u@a::https://h/x?y", "zip://v@a::https://h/x?y"),
    ],
)
def test_two_objects_never_share_a_key(one: str, two: str) -> None:
    assert key(one) != key(two)
    assert object_name(one) != object_name(two)


AMZ = (
    "X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={0}&X-Amz-Date={0}&X-Amz-Expires=60&X-Amz-SignedHeaders=host"
    "&X-Amz-Signature={0}"
)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        (
            f"https://b.s3.amazonaws.com/x?versionId=7&{AMZ.format('a')}",
            f"https://b.s3.amazonaws.com/x?versionId=7&{AMZ.format('b')}",
        ),
        (f"https://b.s3.amazonaws.com/x?{AMZ.format('a')}", "https://b.s3.amazonaws.com/x"),
        (
            "https://d.cloudfront.net/x?Policy=a&Signature=b&Key-Pair-Id=c",
            "https://d.cloudfront.net/x?Policy=d&Signature=e&Key-Pair-Id=f",
        ),
        ("https://h/x?a=1#one", "https://h/x?a=1#two"),  # the fragment is never sent
    ],
)
def test_one_object_signed_twice_has_one_key(one: str, two: str) -> None:
    assert key(one) == key(two)


@pytest.mark.parametrize(
    ("url", "expected"),
    [  # computed with the code before identities
        ("s3://bucket/a/photo.jpg", "f9c860be4d16c031066b522b43c0f699"),
        ("https://example.org/get?id=1", "ec7f414b919c48c1a9584805422e776e"),
        (f"https://bucket.s3.amazonaws.com/a.jpg?versionId=7&{AMZ.format('a')}", "d5d4648a8969865fc43e530de7986d3c"),
    ],
)
def test_objects_without_options_keep_the_keys_of_earlier_versions(url: str, expected: str) -> None:
    assert key(url).hex() == expected


UNSIGNED = Access(is_signed=False)
S3, GS, AZ, HTTP, SFTP = "s3://b/x", "gs://b/x", "az://c/x", "https://h/x", "sftp://h/~/x"


@pytest.mark.parametrize(
    ("url", "one", "two"),
    [
        (S3, {"endpoint_url": "http://a:9000"}, {"endpoint_url": "http://b:9000"}),
        (S3, {"endpoint_url": "http://a:9000"}, {}),
        (S3, {"client_kwargs": {"endpoint_url": "http://a"}}, {"client_kwargs": {"endpoint_url": "http://b"}}),
        (S3, {"endpoint": "http://a", "virtual_hosted_style_request": True}, {"endpoint": "http://a"}),
        (S3, {"region": "cn-north-1"}, {"region": "us-east-1"}),
        (S3, {"region": "us-gov-west-1"}, {}),
        (S3, {"backend": "fsspec", "endpoint_url": "http://a"}, {"backend": "fsspec", "endpoint_url": "http://b"}),
        (GS, {"base_url": "http://a"}, {"base_url": "http://b"}),
        (GS, {"project": "one"}, {"project": "two"}),
        (GS, {"token": {"gcs_base_url": "http://a"}}, {"token": {"gcs_base_url": "http://b"}}),
        (AZ, {"account_name": "one"}, {"account_name": "two"}),
        (AZ, {"endpoint": "http://a"}, {"endpoint": "http://b"}),
        (AZ, {"account_name": "a", "use_emulator": True}, {"account_name": "a"}),
        (
            AZ,
            {"backend": "fsspec", "connection_string": "AccountName=one;AccountKey=k"},
            {"backend": "fsspec", "connection_string": "AccountName=two;AccountKey=k"},
        ),
        (HTTP, {"headers": {"Accept": "image/png"}}, {"headers": {"Accept": "image/webp"}}),
        (HTTP, {"headers": {"X-Tenant": "one"}}, {"headers": {"X-Tenant": "two"}}),
        (HTTP, {"headers": {"X-Account-Id": "one"}}, {"headers": {"X-Account-Id": "two"}}),
        (HTTP, {"headers": {"X-Cache-Key": "one"}}, {"headers": {"X-Cache-Key": "two"}}),
        (HTTP, {"headers": {"X-Author": "one"}}, {"headers": {"X-Author": "two"}}),
        (HTTP, {"headers": {"X-Tokenizer": "one"}}, {"headers": {"X-Tokenizer": "two"}}),
        (HTTP, {"headers": {"Range": "bytes=0-1"}}, {}),
        (HTTP, {"user_agent": "one"}, {"user_agent": "two"}),
        (SFTP, {"username": "alice"}, {"username": "bob"}),
        (SFTP, {"port": 22}, {"port": 2222}),
        (SFTP, {"user": "alice"}, {"user": "bob"}),
        ("ftp://h/x", {"partition_key": "one"}, {"partition_key": "two"}),
        ("webdav://h/x", {"auth": ("alice", "1")}, {"auth": ("bob", "1")}),
        ("oss://b/x", {"endpoint": "http://a"}, {"endpoint": "http://b"}),
        (
            "memory://x",
            {"filesystem": DirFileSystem("/a", LocalFileSystem())},
            {"filesystem": DirFileSystem("/b", LocalFileSystem())},
        ),
        (S3, {"filesystem": LocalFileSystem()}, {}),
        ("zip://a::s3://b/x", {"s3": {"endpoint_url": "http://a"}}, {"s3": {"endpoint_url": "http://b"}}),
    ],
)
def test_options_that_lead_elsewhere_part_objects(url: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    assert key(url, one) != key(url, two)


@pytest.mark.parametrize(
    ("url", "one", "two"),
    [
        (S3, {"key": "a", "secret": "b", "token": "c"}, {}),
        (S3, {"access_key_id": "a", "secret_access_key": "b"}, {"anon": True}),
        (S3, {"region": "eu-west-1"}, {"region": "us-east-1"}),  # names of buckets are one's in all of a partition
        (S3, {"endpoint_url": "http://a:9000/", "key": "a"}, {"endpoint_url": "http://a:9000", "key": "b"}),
        (S3, {"backend": "fsspec", "key": "a", "username": "u", "region": "x"}, {"backend": "fsspec"}),
        (S3, {"proxy_url": "http://p", "connect_timeout": 3, "verify": False}, {}),
        (GS, {"token": "anon"}, {"token": "google_default"}),
        (AZ, {"account_name": "a", "account_key": "1"}, {"account_name": "a", "sas_token": "2"}),
        (
            AZ,
            {"backend": "fsspec", "connection_string": "AccountName=one;AccountKey=k"},
            {"backend": "fsspec", "connection_string": "AccountName=one;AccountKey=l"},
        ),
        (HTTP, {"headers": {"Authorization": "Bearer 1", "Cookie": "a", "X-Api-Key": "b", "PRIVATE-TOKEN": "c"}}, {}),
        (HTTP, {"headers": {"accept": "image/png", "cookie": "1"}}, {"headers": {"Accept": "image/png", "Cookie": "2"}}),
        (HTTP, {"endpoint_url": "http://a:9000", "key": "a"}, {}),  # of another scheme
        (S3, {"headers": {"X-Tenant": "one"}}, {}),
        (SFTP, {"username": "alice", "password": "1"}, {"username": "alice", "password": "2"}),
        ("webdav://h/x", {"auth": ("alice", "1")}, {"auth": ("alice", "2")}),
        ("hf://datasets/o/n/x", {"token": "1"}, {}),
    ],
)
def test_credentials_and_transport_part_nothing(url: str, one: dict[str, Any], two: dict[str, Any]) -> None:
    assert key(url, one) == key(url, two)


@pytest.mark.parametrize(
    ("url", "variable"),
    [
        (S3, "AWS_ENDPOINT_URL"),
        (S3, "AWS_ENDPOINT_URL_S3"),
        (S3, "AWS_ENDPOINT"),
        (GS, "GOOGLE_BASE_URL"),
        (AZ, "AZURE_STORAGE_ACCOUNT_NAME"),
        (AZ, "AZURE_STORAGE_ENDPOINT"),
        ("hf://datasets/o/n/x", "HF_ENDPOINT"),
        ("zip://a::s3://b/x", "AWS_ENDPOINT_URL"),
        ("simplecache::s3://b/x", "AWS_ENDPOINT_URL"),
    ],
)
def test_the_environment_counts_as_options_do(url: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key(url)
    assert key(url) == ObjectRef.of(url).key == plain
    monkeypatch.setenv(variable, "http://one")
    one = key(url)
    monkeypatch.setenv(variable, "http://two")
    assert len({plain, one, key(url)}) == 3
    assert key(HTTP) == ObjectRef.of(HTTP).key


def test_the_account_of_a_url_holds_against_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "abfs://c@acc.dfs.core.windows.net/x"
    plain = key(url)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    assert key(url) == plain
    identity = Identity(StorageOptions())
    for _ in range(2):  # the second time from what is kept
        assert "other" in identity.prefix("abfs://c/x")
        assert identity.prefix(url) == ""


def test_a_profile_that_leads_elsewhere_parts_objects(tmp_path: Path) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[profile lab]\nendpoint_url = http://lab:9000\n[profile home]\nregion = eu-west-1\n"
    )
    assert len({key(S3), key(S3, {"profile": "lab"}), key(S3, {"profile": "home"})}) == 3
    with pytest.raises(ConfigError, match="profile 'gone'"):
        key(S3, {"profile": "gone"})


def test_fsspec_configuration_counts_where_fsspec_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key("ftp://h/x")
    monkeypatch.setenv("FSSPEC_FTP_PORT", "2121")
    monkeypatch.setitem(fsspec.config.conf, "ftp", {"port": "2121", "password": "1"})
    assert key("ftp://h/x") != plain
    assert key(S3) == ObjectRef.of(S3).key


def test_a_namespace_parts_what_two_principals_see() -> None:
    assert len({key(HTTP), key(HTTP, namespace="alice"), key(HTTP, namespace="bob")}) == 3
    assert key(HTTP, {"headers": {"Accept": "x"}}, "alice") != key(HTTP, {"headers": {"Accept": "x"}})
    for bad in ("", 7):
        with pytest.raises(ConfigError, match="cache_namespace"):
            Identity(StorageOptions(), bad)  # type: ignore[arg-type]  # what a user may give


def test_no_url_spells_the_prefix_of_another_identity() -> None:
    prefix = Identity(StorageOptions(), "alice").prefix(HTTP)
    assert prefix[0] == prefix[-1] == "\0"
    assert "\0" not in prefix[1:-1]
    assert json.loads(prefix[1:-1]) == {"namespace": "alice"}


def test_an_identity_is_the_same_in_another_process() -> None:
    identity = Identity(StorageOptions(storage_options={"endpoint_url": "http://a"}), "me")
    assert pickle.loads(pickle.dumps(identity)).prefix(S3) == identity.prefix(S3) != ""


def test_what_is_known_of_one_scheme_holds_for_no_other() -> None:
    identity = Identity(StorageOptions(storage_options={"endpoint_url": "http://a", "headers": {"X-Tenant": "b"}}))
    for _ in range(2):  # the second time from what is kept
        assert "endpoint" in identity.prefix(S3)
        assert "x-tenant" in identity.prefix(HTTP)
        assert identity.prefix("zip://a::s3://b/x") != identity.prefix(S3)
        assert identity.prefix("gs://b/x") != identity.prefix(S3)


def test_an_option_that_cannot_be_described_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Connection:
        pass

    with caplog.at_level(logging.WARNING):
        key(SFTP, {"connection": Connection()})
        key(SFTP, {"connection": Connection()})
    assert [record.getMessage().count("cache_namespace") for record in caplog.records] == [1]


def test_what_is_read_without_headers_is_another_object_than_with_them() -> None:
    identity = Identity(
        StorageOptions(storage_options={"headers": {"X-Tenant": "one", "Cookie": "1"}, "endpoint_url": "http://a"})
    )
    signed, unsigned = ObjectRef.of(HTTP, identity=identity), ObjectRef.of(HTTP, identity=identity, access=UNSIGNED)
    assert signed.key != unsigned.key == ObjectRef.of(HTTP).key
    assert ObjectRef.of(S3, identity=identity).key == ObjectRef.of(S3, identity=identity, access=UNSIGNED).key
    credentials = Identity(StorageOptions(storage_options={"headers": {"Cookie": "1"}}))
    assert ObjectRef.of(HTTP, identity=credentials).key == ObjectRef.of(HTTP, identity=credentials, access=UNSIGNED).key
    parts = [ObjectParts(HTTP, identity=identity, access=access).part((0, 1)).key for access in (OWN, UNSIGNED)]
    assert parts[0] != parts[1]


def test_a_user_without_a_home_directory_reads_file_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    assert key("hf://datasets/o/n/x") == ObjectRef.of("hf://datasets/o/n/x").key
