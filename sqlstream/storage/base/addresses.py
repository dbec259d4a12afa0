"""Hosts in URLs and the addresses that they lead to: what is public, and what is this machine or its private network. Pure."""

from __future__ import annotations

import ipaddress
import re
import socket
import unicodedata
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

# No backslash: some clients take it for a slash, others for part of a user.
_AUTHORITY = re.compile(r"(?:[^@\s\\]*@)?(?P<host>\[[^\]\s\\]*\]|[^@:\[\]\s\\]*)(?::(?P<port>[0-9]{0,5}))?")
_END_OF_AUTHORITY = re.compile(r"[/?#]")
_DEFAULT_PORTS = {"http": 80, "https": 443, "ftp": 21, "ftps": 990, "sftp": 22, "ssh": 22, "webdav": 80, "webdavs": 443}
_DOTS = str.maketrans("。", ".")  # the other full stops of IDNA become this one, or a dot, by NFKC
_PRIVATE_SUFFIXES = (".localhost", ".localdomain", ".local", ".internal", ".intranet", ".lan", ".home.arpa")
_PRIVATE_NAMES = frozenset(suffix[1:] for suffix in _PRIVATE_SUFFIXES) | {"ip6-localhost", "ip6-loopback"}
_PLATFORM = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Addresses that are public by their number, and yet the platform's own services on the node: Azure's WireServer."""
_NOT_GLOBAL = tuple(map(ipaddress.ip_network, ("192.0.0.0/24", "3fff::/20", "5f00::/16")))
"""Not globally reachable by IANA's registries of special addresses, and yet public to older Pythons. In the first one lies the
metadata service of Oracle's cloud (192.0.0.192)."""
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # RFC 6052; a network's own prefix for it cannot be known
_ISATAP = (0x0000_5EFE, 0x0200_5EFE)  # RFC 5214: the upper half of the interface's identifier; the lower is an IPv4 address


class Server(NamedTuple):
    """Host and port of a URL."""

    host: str
    """Host as clients read it: escapes decoded, lower case, without user, brackets, zone and last dot; `''`: it has none."""
    port: int | None
    """The port that is written, else the scheme's; None: neither."""


@lru_cache(maxsize=1024)  # the objects of an index lie on few hosts
def server_of(origin: str) -> Server | None:
    """Return host and port of `scheme://authority`; None if clients could read different hosts in it.

    Example:
        >>> server_of("http://me:secret@%31%32%37.0.0.1:8080"), server_of("https://[::FFFF:7f00:1]"), server_of("http://a@b@c")
        (Server(host='127.0.0.1', port=8080), Server(host='::ffff:7f00:1', port=443), None)
    """
    head, _, authority = origin.partition("://")
    match = _AUTHORITY.fullmatch(authority)
    if match is None or authority.count("@") > 1:
        return None
    host = plain_host(match["host"])
    port = int(match["port"]) if match["port"] else _DEFAULT_PORTS.get(head.lower())
    return None if re.search(r"[\s/?#@\\:\[\]]", host) and not _is_ipv6(host) else Server(host, port)


def plain_host(host: str) -> str:
    """Return a host as it is looked up: escapes and full-width characters decoded, lower case, no brackets, zone or last dot.

    Example:
        >>> [plain_host(host) for host in ("%6cocalhost", "１２７。0.0.1", "LOCALHOST.", "[fe80::1%25eth0]")]
        ['localhost', '127.0.0.1', 'localhost', 'fe80::1']
    """
    text = unicodedata.normalize("NFKC", unquote(host)).translate(_DOTS).lower()
    if text.startswith("["):
        text = text.strip("[]").partition("%")[0]
    return text.rstrip(".")


def origin_of(url: str) -> str:
    """Return `scheme://authority` of a URL as it is spelled, `''` if it has none."""
    head, separator, rest = url.partition("://")
    return f"{head}{separator}{_END_OF_AUTHORITY.split(rest, maxsplit=1)[0]}" if separator else ""


@lru_cache(maxsize=1024)
def is_private_literal(host: str) -> bool:
    """Return True if a host is this machine or an address of a private network, judged by its spelling alone.

    Example:
        >>> [is_private_literal(host) for host in ("localhost", "169.254.169.254", "::1", "example.org", "0x7f000001")]
        [True, True, True, False, True]
    """
    host = plain_host(host)
    if host in _PRIVATE_NAMES or host.endswith(_PRIVATE_SUFFIXES):
        return True
    try:
        return not is_public(host)
    except ValueError:
        pass
    try:  # the forms that C libraries take: 127.1, 0x7f000001, 2130706433
        return not is_public(socket.inet_ntoa(socket.inet_aton(host)))
    except (OSError, ValueError):
        return False


def is_public(address: str) -> bool:
    """Return whether anyone on the internet reaches an IP address; of one that holds another (NAT64, 6to4, …) the inner, too.

    Raises:
        ValueError: It is no address.

    Example:
        >>> [is_public(address) for address in ("8.8.8.8", "::ffff:127.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::")]
        [True, False, False, False]
    """
    found = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None or found in _NAT64:
            return is_public(str(_last_four(found)))
        if found.sixtofour is not None:
            return is_public(str(found.sixtofour))
        if found.is_site_local or (int(found) >> 32 & 0xFFFF_FFFF in _ISATAP and not is_public(str(_last_four(found)))):
            return False
    is_special = found.is_multicast or found.is_reserved or found.is_unspecified
    is_special |= found in _PLATFORM or any(found in network for network in _NOT_GLOBAL)
    return found.is_global and not is_special


def _last_four(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address:
    return ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
