from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, StorageError
from sqlstream.storage.base.settings import (
    check_options_of_sources,
    http_headers,
    network_settings,
    options_over,
    store_settings,
)
from sqlstream.storage.fetcher import Fetcher


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "S3_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


@pytest.mark.parametrize(
    ("scheme", "options", "config"),
    [
        (
            "s3",
            {"key": "k", "secret": "s", "token": "t"},
            {"access_key_id": "k", "secret_access_key": "s", "session_token": "t"},
        ),
        ("s3", {"anon": True, "requester_pays": True}, {"skip_signature": True, "request_payer": True}),
        ("s3", {"key": "k", "client_kwargs": {"region_name": "r"}}, {"access_key_id": "k", "region": "r"}),
        ("s3", {"access_key_id": "k", "region": "r", "key": None}, {"access_key_id": "k", "region": "r"}),
        ("gs", {"token": "anon"}, {"skip_signature": True}),
        ("gs", {"token": "/key.json"}, {"service_account": "/key.json"}),
        ("gs", {"token": {"type": "x"}}, {"service_account_key": '{"type": "x"}'}),
        ("gcs", {"token": "google_default", "project": "p"}, {}),
        ("abfs", {"account_name": "a", "sas_token": "s"}, {"account_name": "a", "sas_key": "s"}),
        ("https", {"key": "of s3", "account_name": "of az"}, {}),
    ],
)
def test_fsspec_and_obstore_names_both_work(scheme: str, options: Mapping[str, object], config: Mapping[str, object]) -> None:
    assert store_settings(scheme, options).config == config


def test_an_option_that_nobody_knows_is_named() -> None:
    with pytest.raises(ConfigError, match=r"storage_options\['acess_key'\] is not known for s3://"):
        store_settings("s3", {"acess_key": "typo"})


@pytest.mark.parametrize("endpoint", [{"endpoint_url": "http://h:1"}, {"client_kwargs": {"endpoint_url": "http://h:1"}}])
def test_an_http_endpoint_may_be_spoken_to_in_the_clear(endpoint: Mapping[str, object]) -> None:
    settings = store_settings("s3", {"anon": True, **endpoint})
    assert (settings.config["endpoint"], settings.client["allow_http"]) == ("http://h:1", True)
    assert "allow_http" not in store_settings("s3", {"anon": True, "endpoint_url": "https://h:1"}).client


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "S3_ENDPOINT_URL"])
def test_the_endpoint_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "http://h:1")
    assert store_settings("s3", {"anon": True}).config["endpoint"] == "http://h:1"
    assert store_settings("s3", {"anon": True, "endpoint_url": "https://mine"}).config["endpoint"] == "https://mine"


def test_credentials_come_from_the_aws_profile_when_nothing_else_names_them(
    bare_environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bare_environment / "credentials").write_text(
        "[default]\naws_access_key_id = d\naws_secret_access_key = ds\n[work]\naws_access_key_id=w\naws_secret_access_key=ws\n"
    )
    (bare_environment / "config").write_text("[default]\nregion = eu-west-1\n[profile work]\nregion = us-west-2\n")
    default = {"access_key_id": "d", "secret_access_key": "ds", "region": "eu-west-1"}
    work = {"access_key_id": "w", "secret_access_key": "ws", "region": "us-west-2"}
    assert store_settings("s3", {}).config == default
    assert store_settings("s3", {"profile": "work"}).config == work
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert store_settings("s3", {}).config == work
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from the environment")
    assert store_settings("s3", {}).config == {}


def test_a_profile_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="AWS profile 'nope'"):
        store_settings("s3", {"profile": "nope"})


def test_secrets_are_not_in_the_repr() -> None:
    assert "hush" not in repr(store_settings("s3", {"key": "hush", "secret": "hush"}))


def test_what_sqlstream_acts_on_itself_reaches_no_client() -> None:
    own = {"backend": "obstore", "timeout": 5, "connect_timeout": 1, "read_timeout": 2, "verify_etag": True}
    settings = store_settings("s3", {"anon": True, **own})
    assert (settings.config, settings.client) == ({"skip_signature": True}, {})


def test_timeouts_among_the_storage_options_are_those_of_the_helper() -> None:
    options = StorageOptions(storage_options={"timeout": 5, "connect_timeout": 1, "read_timeout": 2.5})
    assert (options.total_timeout_seconds, options.connect_timeout_seconds, options.read_timeout_seconds) == (5, 1, 2.5)


@pytest.mark.parametrize("wrong", [{"timeout": "5"}, {"read_timeout": 0}, {"connect_timeout": True}])
def test_a_timeout_that_is_none_is_named(wrong: Mapping[str, object]) -> None:
    (key,) = wrong
    with pytest.raises(ConfigError, match=key):
        StorageOptions(storage_options=wrong)


def test_proxies_and_certificates_hold_for_every_client() -> None:
    network = network_settings({"proxy_url": "http://me:hush@p:1", "proxy_excludes": "a.org, b.org", "verify": False})
    assert (network.proxy_url, network.proxy_excludes) == ("http://me:hush@p:1", ("a.org", "b.org"))
    assert network.allows_invalid_certificates
    assert "hush" not in repr(network)
    for scheme in ("s3", "https", "az"):
        assert store_settings(scheme, {"anon": True, "verify": False}).client == {"allow_invalid_certificates": True}


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("https://h.invalid/x", {"verify": "gone.pem"}, r"\['verify'\] names the file 'gone.pem', .*No such file"),
        ("s3://bucket/x", {"verify": "gone.pem"}, r"\['verify'\] names the file 'gone.pem', .*No such file"),
        ("s3://bucket/x", {"verify": "."}, r"\['verify'\] names the file '.', .*Is a directory"),
        ("https://h.invalid/x", {"root_certificate": "hello"}, "root_certificate'.* holds no certificate"),
        ("https://h.invalid/x", {"proxy_url": "http://me:hidden@[::1"}, r"storage_options\['proxy_url'\] is no URL of a proxy"),
        ("https://h.invalid/x", {"proxy_url": "http://me:hidden@h:99999"}, "is no URL of a proxy"),
        ("s3://bucket/x", {"endpoint_url": "no url"}, "the endpoint 'no url' is no address of a server"),
        ("s3://bucket/x", {"endpoint_url": "http://[::1"}, "is no address of a server"),
        ("s3://bucket/x", {"endpoint_url": "http://h:99999"}, "is no address of a server"),
        ("s3://bucket/x", {"endpoint_url": "ftp://h"}, "is no address of a server"),
        ("s3://bucket/x", {"endpoint_url": "http://me:hidden@h?a=1"}, "'http://h' is no address of a server"),
        ("gs://bucket/x", {"endpoint_url": "http://"}, "is no address of a server"),
        ("az://bucket/x", {"endpoint_url": "h:1", "account_name": "a"}, "is no address of a server"),
    ],
)
def test_an_option_that_no_client_can_use_is_named(url: str, options: dict[str, object], said: str) -> None:
    fetcher = Fetcher(StorageOptions(storage_options={"anon": True, **options}, num_retries=0))
    try:
        with pytest.raises(ConfigError, match=said) as caught:
            fetcher.head(url)
    finally:
        fetcher.stop()
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("text", [b"no section\n", b"[default]\naws_secret_access_key hidden\n", b"[default]\nregion = \xff\n"])
def test_a_file_of_aws_that_cannot_be_read_is_named(bare_environment: Path, text: bytes) -> None:
    (bare_environment / "config").write_bytes(text)
    with pytest.raises(ConfigError, match=r"/config is no configuration of AWS") as caught:
        store_settings("s3", {})
    assert "hidden" not in str(caught.value)


def test_a_bucket_that_obstore_panics_at_is_an_error_of_its_object() -> None:
    fetcher = Fetcher(StorageOptions(storage_options={"anon": True, "endpoint_url": "http://127.0.0.1:1", "region": "r"}))
    try:
        with pytest.raises(StorageError, match="s3://b u/x: obstore makes no request of it"):
            fetcher.head("s3://b u/x")
    finally:
        fetcher.stop()


def test_headers_of_http_are_lines_of_a_request() -> None:
    assert http_headers({"headers": {"X-Token": "1"}, "key": "of s3"}) == {"User-Agent": "sqlstream", "X-Token": "1"}
    assert http_headers({"user_agent": "me/1"}) == {"User-Agent": "me/1"}
    for wrong in ({"X": "1\r\nHost: other"}, {"X:": "1"}, {"": "1"}, {"X": "\u20ac"}, "X: 1", {"X": None}, {"X": b"1"}):
        with pytest.raises(ConfigError, match="headers"):
            http_headers({"headers": wrong})
    with pytest.raises(ConfigError, match="acess_key"):
        http_headers({"acess_key": "typo"})
    assert http_headers({"backend": "fsspec", "acess_key": "perhaps of a file system"})


def test_a_header_is_one_line_whatever_the_case_of_its_name() -> None:
    assert http_headers({"headers": {"user-agent": "me/1"}}) == {"user-agent": "me/1"}
    assert options_over({"headers": {"authorization": "old", "X": "1"}}, {"headers": {"Authorization": "new"}}) == {
        "headers": {"X": "1", "Authorization": "new"}
    }


def test_a_value_that_obstore_does_not_take_is_named() -> None:
    settings = store_settings("s3", {"key": 5, "pool_max_idle_per_host": 7, "region": Path("eu")})
    assert (settings.config, settings.client) == ({"access_key_id": "5", "region": "eu"}, {"pool_max_idle_per_host": "7"})
    with pytest.raises(ConfigError, match=r"storage_options\['token'\] is a list: give a text"):
        store_settings("s3", {"token": ["x"]})
    with pytest.raises(ConfigError, match=r"storage_options\['secret'\] is a bool: give a text"):
        store_settings("s3", {"secret": True})  # obstore takes it for "true"


LOGIN = SimpleNamespace(token="hidden")
"""An object that holds a token and shows it, as login libraries give."""


@pytest.mark.parametrize(
    ("scheme", "options", "said"),
    [
        ("gs", {"token": LOGIN}, r"storage_options\['token'\] is a SimpleNamespace: give the path"),
        ("gs", {"token": b"hidden"}, r"storage_options\['token'\] is a bytes: give the path"),
        ("gs", {"token": True}, r"storage_options\['token'\] is a bool: give the path"),
        ("gs", {"token": {"a": LOGIN}}, r"storage_options\['token'\] is a dict that is no JSON"),
        ("gs", {"token": "hidden"}, r"key cannot be opened: give its path .* an access token as \['bearer_token'\]"),
        ("gs", {"service_account_key": "{}"}, "missing field .*: check storage_options"),
        ("az", {"account_name": "a", "account_key": "!"}, "Invalid Access Key.*: check storage_options"),
        ("s3", {"token": LOGIN, "backend": "fsspec"}, r"storage_options\['token'\] is a SimpleNamespace: give a text"),
        ("s3", {"token": b"hidden", "backend": "fsspec"}, r"storage_options\['token'\] is a bytes: give a text"),
    ],
)
def test_credentials_of_a_wrong_kind_are_named_at_once_and_not_shown(
    scheme: str, options: dict[str, object], said: str
) -> None:
    fetcher = Fetcher(StorageOptions(storage_options=options))
    try:
        with pytest.raises(ConfigError, match=said) as caught:
            fetcher.head(f"{scheme}://bucket/x")
    finally:
        fetcher.stop()
    assert "hidden" not in str(caught.value)


def test_no_error_and_no_repr_shows_a_secret() -> None:
    assert "hush" not in repr(StorageOptions(storage_options={"key": "hush", "secret": "hush"}))
    with pytest.raises(ConfigError) as caught:
        store_settings("s3", {"client_kwargs": "hush"})
    assert "hush" not in str(caught.value)


def test_hedging_which_is_gone_is_an_unknown_option() -> None:
    for scheme in ("s3", "https"):
        with pytest.raises(ConfigError, match="storage_options\\['hedge_factor'\\] is not known"):
            store_settings(scheme, {"hedge_factor": 3})
    with pytest.raises(ConfigError, match="hedge_factor"):
        http_headers({"hedge_factor": 3})


def test_an_unknown_option_is_refused_for_sources_of_this_machine_too() -> None:
    wrong: list[dict[str, object]] = [{"regionn": "x"}, {"client_kwargs": {"regionn": "x"}}]
    for options in wrong:
        with pytest.raises(ConfigError, match=r"storage_options\['regionn'\] is not known: did you mean 'region'"):
            check_options_of_sources(["file", "s3"], options)
    right: list[dict[str, object]] = [{"regionn": None}, {"region": "x"}]
    right += [{"regionn": "x", "backend": "fsspec"}, {"regionn": "x", "filesystem": 1}]
    for options in right:
        check_options_of_sources(["file"], options)
    check_options_of_sources(["file", "sftp"], {"port": 22})


def test_azure_without_an_account_names_the_option_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    fetcher = Fetcher(StorageOptions())
    try:
        with pytest.raises(ConfigError, match=r"az://c/x: no storage account is named: set storage_options\['account_name'\]"):
            fetcher.head("az://c/x")
    finally:
        fetcher.stop()
