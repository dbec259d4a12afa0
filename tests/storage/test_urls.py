from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError
from sqlstream.storage.base import urls


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/k", "s3"),
        ("HTTPS://h/x", "https"),
        ("/data/x", "file"),
        ("x.csv", "file"),
        ("file:///x", "file"),
        ("hf://datasets/a", "hf"),
        ("simplecache::s3://b/k", "simplecache"),
        ("C:weird", "file"),
        ("time 12:30://x", "file"),
        ("a::b.txt", "file"),
        ("img::1/x.txt", "file"),
    ],
)
def test_scheme_of_a_url(url: str, expected: str) -> None:
    assert urls.scheme(url) == expected
    assert urls.is_remote(url) == (expected != "file")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://b/a.b/photo.JPG", ".jpg"),
        ("https://h/x.webp?width=1.5#frag.png", ".webp"),
        ("https://h/x.tar.gz", ".gz"),
        ("/data/a#1.jpg", ".jpg"),
        ("s3://b/no_extension", ""),
        ("s3://b/.hidden", ""),
        ("s3://b/x.j/pg", ""),
        ("s3://b/x.exe\n", ""),
        ("s3://b/x.ünï", ""),
        ("s3://b/x.muchtoolongtobeone", ""),
        ("https://host.com", ".com"),
    ],
)
def test_extension_is_kept_only_when_it_is_safe_in_a_file_name(url: str, expected: str) -> None:
    assert urls.extension(url) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://user:pa:ss@host/x?sig=secret", "https://host/x"),
        ("https://token@host/x", "https://host/x"),
        ("s3://bucket/key@2x.png", "s3://bucket/key@2x.png"),
        ("abfs://container@account.dfs.core.windows.net/x?sas=secret", "abfs://container@account.dfs.core.windows.net/x"),
        ("/local/file?.jpg", "/local/file?.jpg"),
        ("https://h/x#page", "https://h/x#page"),
    ],
)
def test_redact_takes_out_what_may_be_secret_and_no_more(url: str, expected: str) -> None:
    assert urls.redact(url) == expected


def test_redact_text_finds_every_url_in_a_message() -> None:
    text = "GET https://u:p@h/x?sig=1 failed (see 'http://other/y?key=2')"
    assert urls.redact_text(text) == "GET https://h/x failed (see 'http://other/y')"


def test_local_path_refuses_a_remote_url_and_hides_its_password() -> None:
    with pytest.raises(ConfigError, match="https://h/x is not a local path"):
        urls.local_path("https://u:secret@h/x")
    with pytest.raises(ConfigError, match="not a local path"):
        urls.local_path("file://otherhost/x")


def test_local_path_undoes_as_uri(tmp_path: Path) -> None:
    path = tmp_path / "a b%ü#.csv"
    assert urls.local_path(path.as_uri()) == path
    assert urls.local_path(str(path)) == path


def as_text(named: Callable[[str], object], url: str) -> str:
    try:
        return str(named(url))
    except ConfigError:
        return "refused"


@given(st.text("/.:a%\n", max_size=9))
def test_local_name_is_local_path_as_text(url: str) -> None:
    assert as_text(urls.local_name, url) == as_text(urls.local_path, url)


@pytest.mark.parametrize(
    ("base", "relative", "expected"),
    [
        ("s3://b", "x", "s3://b/x"),
        ("s3://b/d/", "/x", "s3://b/d/x"),
        ("/d", "a/b", "/d/a/b"),
        ("", "a", "a"),
        ("/", "a", "/a"),
        ("s3://b", "https://h/x", "https://h/x"),
    ],
)
def test_join_keeps_urls_and_puts_names_below_the_base(base: str, relative: str, expected: str) -> None:
    assert urls.join(base, relative) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://h/a/x.csv?sig=a/b", "https://h/a"),
        ("https://h/x.csv", "https://h"),
        ("file:///data/x.csv", "file:///data"),
        ("/data/x", "/data"),
        ("s3://b/d/", "s3://b"),
    ],
)
def test_parent_is_the_directory_without_the_query(url: str, expected: str) -> None:
    assert urls.parent(url) == expected


@pytest.mark.parametrize("mark", ["/", "#", "?", "/#?", "@", "%2f/", "/a:b#c?d=e/"])
@pytest.mark.parametrize("address", ["https://me:{}@host/x", "s3://key:{}@bucket/x", "postgresql+psycopg://me:{}@host/db"])
def test_redact_knows_a_password_with_any_mark_in_it(mark: str, address: str) -> None:
    url = address.format(f"hid{mark}den")
    for text in (urls.redact(url), urls.redact_text(f"cannot reach '{url}', or <{url}>: no"), urls.redact(url + "?sig=hidden")):
        assert "hid" not in text
        assert "den" not in text
        assert text.count("host") + text.count("bucket") > 0


def test_redact_knows_passwords_of_databases_by_sqlalchemys_rule() -> None:
    assert urls.redact("mysql://me:12/34@host/db?x=a@b") == "mysql://host/db"
    assert urls.redact("sqlite:////data/a@b.db") == "sqlite:////data/a@b.db"
    assert urls.redact("postgresql://host/db?user=me@x") == "postgresql://host/db"


def test_redact_leaves_names_with_an_at_sign() -> None:
    for url in ("https://h:8080/a@2x.jpg", "s3://b/a@b/x:y", "abfs://container@account/x", "https://[::1]:80/a@b"):
        assert urls.redact(url) == url


def test_redact_text_hides_values_that_are_named_as_secrets() -> None:
    text = urls.redact_text("host=h password=hidden user=me&X-Amz-Signature=hidden; access_token=hidden, sig=hidden")
    assert "hidden" not in text
    assert "host=h" in text


@pytest.mark.parametrize(
    ("base", "relative", "expected"),
    [
        ("https://h/d", "hash#1.jpg", "https://h/d/hash%231.jpg"),
        ("https://h/d", "percent%20.jpg", "https://h/d/percent%2520.jpg"),
        ("HTTP://h/d", "q?x=1.jpg", "HTTP://h/d/q%3Fx=1.jpg"),
        ("https://h/d", "a b/ü+&.jpg", "https://h/d/a b/ü+&.jpg"),  # clients escape it, and its object has that key since ever
        ("https://h/d", "https://h/x#1?y", "https://h/x#1?y"),
        ("https://h/d", "x%20y.jpg?token=abc", "https://h/d/x%20y.jpg?token=abc"),
        ("https://h/d", "%2e%2e/x", "https://h/d/%2e%2e/x"),  # left to be refused
        ("https://h/d", "../a#1", "https://h/d/../a%231"),
        ("s3://b/d", "hash#1.jpg", "s3://b/d/hash#1.jpg"),
        ("/d", "q?x=1.jpg", "/d/q?x=1.jpg"),
    ],
)
def test_a_relative_path_is_the_name_of_a_file_also_below_a_web_address(base: str, relative: str, expected: str) -> None:
    assert urls.join(base, relative) == expected


def test_a_rows_own_text_is_shown_whole_but_for_secrets() -> None:
    assert urls.shown("q?x=1#2%20.jpg") == "q?x=1#2%20.jpg"
    for written in ("y.jpg?sig=hidden", "y.jpg?a=1&X-Amz-Signature=hidden", "https://me:hidden@h/y.jpg?q=hidden"):
        assert urls.shown(written).endswith("y.jpg")
