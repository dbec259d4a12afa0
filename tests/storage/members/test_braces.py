"""What names shards, as WebDataset expands it; commands that name a URL."""

from __future__ import annotations

from typing import Any

import pytest

from sqlstream.errors import ConfigError
from sqlstream.storage.members.braces import expand, url_of
from tests.storage.members.kit import expected

VARIABLES = {"WDS_DIR": "/data/{0..1}", "WDS_A": "${B}.tar", "WDS_B": "b", "WDS_LOOP": "${LOOP}"}


@pytest.mark.parametrize("entry", expected("wds/urls.expected.json"), ids=lambda entry: entry["urls"])
def test_a_text_names_the_shards_that_webdataset_names(entry: dict[str, Any]) -> None:
    if isinstance(entry["expanded"], dict):
        with pytest.raises(ConfigError, match=r"'a\{b.tar' has braces that do not match"):
            expand(entry["urls"], VARIABLES)
    else:
        assert expand(entry["urls"], VARIABLES) == entry["expanded"]


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("p{2.{5..7},3.{2,3}}", ["p2.5", "p2.6", "p2.7", "p3.2", "p3.3"]),
        ("{2..-1}", ["2", "1", "0", "-1"]),
        ("{-01..1}", ["-01", "000", "001"]),
        ("{5..5}", ["5"]),
        ("{0..9..4}", ["0", "4", "8"]),
        ("{0..2..0}", ["0", "1", "2"]),
        ("{9..0..-4}", ["9", "5", "1"]),
        ("{c..a}{Y..b..1}", [first + second for first in "cba" for second in "YZab"]),
        ("x{,.bak}", ["x", "x.bak"]),
        ("{a}{b{1,2}}", ["{a}{b1}", "{a}{b2}"]),
        (r"a\{1,2\}\\{3,4}", ["a{1,2}\\3", "a{1,2}\\4"]),
        ("é{1,日}", ["é1", "é日"]),
        ("${A}", ["b.tar"]),
        ("", [""]),
        ("{1..x}", ["{1..x}"]),
        ("{1.5..2}", ["{1.5..2}"]),
    ],
)
def test_braces_expand_as_in_the_shell(text: str, shards: list[str]) -> None:
    assert expand(text, VARIABLES) == shards


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a}b{", "braces that do not match"),
        ("{1,{2}", "braces that do not match"),
        ("${MISSING}/x.tar", "needs the environment variable WDS_MISSING, which is not set"),
        ("{0..99999999999}", "names more than 10000000 shards"),
        ("{0..9999}{0..9999}", "names more than 10000000 shards"),
        ("{0..9999}{0..999}{0..1}", "names more than 10000000 shards"),
        ("https://me:secret@host/{", "'https://host/{' has braces"),
    ],
)
def test_a_text_that_names_no_list_of_shards_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        expand(text, VARIABLES)
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("shard", "url"),
    [
        ("s3://b/k.tar", "s3://b/k.tar"),
        ("pipe:aws s3 cp s3://b/k-{0}.tar -", "s3://b/k-{0}.tar"),
        ("pipe:aws s3 cp --quiet s3://b/k.tar /dev/stdout", "s3://b/k.tar"),
        ("pipe: aws s3 cp 's3://b/a b.tar' - --only-show-errors", "s3://b/a b.tar"),
        ("pipe:gsutil cat gs://b/k.tar", "gs://b/k.tar"),
        ("pipe:gsutil -q cat 'gs://b/k.tar'", "gs://b/k.tar"),
        ("pipe:gcloud storage cat gs://b/k.tar", "gs://b/k.tar"),
        ("pipe:curl -s -L https://host/k.tar", "https://host/k.tar"),
        ("pipe:curl -fsSL --silent 'http://host/k.tar?a=1&b=2#c'", "http://host/k.tar?a=1&b=2#c"),
        ("pipe:cat /data/k.tar", "/data/k.tar"),
        ("pipe:cat data/k.tar", "data/k.tar"),
    ],
)
def test_a_command_that_only_prints_an_object_names_it(shard: str, url: str) -> None:
    assert url_of(shard) == url


@pytest.mark.parametrize(
    "command",
    [
        "aws s3 cp s3://b/k.tar",
        "aws s3 cp s3://b/k.tar k.tar",
        "aws s3 cp k.tar -",
        "aws s3 cp s3://b/k.tar - --no-sign-request",
        "aws --profile x s3 cp s3://b/k.tar -",
        "aws s3 cp s3://b/k.tar - | zstd -dcq",
        "curl -s https://host/k.tar | tee x",
        "curl -s https://host/k.tar > x",
        "curl -s https://host/k.tar; rm -rf /",
        "curl -s https://host/k.tar?a=1&b=2",
        "curl -H 'Authorization: Bearer x' https://host/k.tar",
        "curl -s https://host/a.tar https://host/b.tar",
        "curl -sO https://host/a.tar",
        "curl -s file:///etc/passwd",
        "cat a.tar b.tar",
        "cat ~/a.tar",
        "cat $(ls)",
        "cat '$HOME/a.tar",
        "cat -n",
        "cat",
        "zstd -dcq x.tar.zst",
        "",
    ],
)
def test_any_other_command_is_an_error(command: str) -> None:
    with pytest.raises(ConfigError, match="is a command"):
        url_of(f"pipe:{command}")


def test_a_command_is_shown_without_what_is_secret_in_it() -> None:
    with pytest.raises(ConfigError) as caught:
        url_of("pipe:wget -qO- https://me:secret@host/x.tar?token=secret")
    assert "secret" not in str(caught.value)
