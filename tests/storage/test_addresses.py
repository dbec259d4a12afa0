from __future__ import annotations

import pytest

from sqlstream.storage.base.addresses import is_private_literal, is_public, origin_of, server_of

PRIVATE = [
    *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.100.100.200", "0.0.0.0", "255.255.255.255"),
    *("168.63.129.16", "224.0.0.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fd00:ec2::254", "fec0::1", "ff02::1"),
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::1", "2002:7f00:1::1"),
    *("192.0.0.192", "192.0.0.1", "::ffff:192.0.0.192", "64:ff9b::c000:c0", "3fff::1", "5f00::1"),
    *("2001:0:4136:e378:8000:63bf:80ff:fffe", "2606:4700::5efe:127.0.0.1", "2606:4700::200:5efe:10.0.0.1"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_leads_inside_is_not_public_however_it_is_wrapped(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "::ffff:8.8.8.8", "64:ff9b::808:808", "2002:808:808::1", "2606:4700::1111"])
def test_an_address_that_leads_outside_is_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "url",
    [
        "http://%6cocalhost/",
        "http://%31%32%37.0.0.1/",
        "http://127.0.0.%31/",
        "http://LOCALHOST./",
        "http://a.localhost:8080/",
        "http://１２７.0.0.1/",
        "http://127。0．0｡1/",
        "http://⑯⑨.254.169.254/",
        "http://ⓛocalhost/",
        "http://127.1/",
        "http://0177.0.0.1/",
        "http://0x7f.1/",
        "http://2130706433/",
        "http://127.0.0.1./",
        "http://me:secret@127.0.0.1/",
        "http://example.org@127.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]:80/",
        "http://[fe80::1%25eth0]/",
        "http://[64:ff9b::7f00:1]/",
        "ftp://127.0.0.1/",
        "webhdfs://169.254.169.254:9870/",
        "http://metadata.google.internal/",
        "http://nas.local/",
        "http://router.lan/",
    ],
)
def test_a_private_host_is_known_in_every_spelling(url: str) -> None:
    server = server_of(origin_of(url))
    assert server is not None
    assert is_private_literal(server.host)


@pytest.mark.parametrize(
    "url",
    ["http://a@b@127.0.0.1/", "http://exa mple.org/", "http://[::1/", "http://example.org%2f@127.0.0.1%2f/", "http://a:b:c/"],
)
def test_a_host_that_clients_read_in_two_ways_is_none(url: str) -> None:
    assert server_of(origin_of(url)) is None


def test_a_backslash_makes_a_host_unclear() -> None:
    for url in ("http://example.org\\@127.0.0.1/x", "http://example.org\\x/", "http://me\\you@example.org/"):
        assert server_of(origin_of(url)) is None
