"""Which of the addresses that a name leads to may be connected to, where strangers named it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import urllib3.exceptions

from sqlstream.storage.base.addresses import is_private_literal, is_public, plain_host


class PrivateAddressError(urllib3.exceptions.LocationValueError):
    """A name leads to no public address. No OSError: urllib3 would take it for a failed connection."""


def public_only(host: str, found: Sequence[Any]) -> list[Any]:
    """Return those answers of `getaddrinfo` whose address is public; who connects to one of them asks for the name no more.

    Raises:
        PrivateAddressError: There is none.
    """
    public = [place for place in found if is_public(str(place[4][0]))]
    if not public:
        raise PrivateAddressError(f"{plain_host(host)} has no public address")
    return public


def check_proxied(host: str) -> None:
    """Raise if a host that a proxy will look up is private by its spelling, or by what this machine's resolver says.

    Raises:
        PrivateAddressError: It is.
    """
    plain = plain_host(host)
    try:
        found = {str(place[0]) for *_, place in socket.getaddrinfo(plain, None, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError):
        found = set()  # behind a proxy there need be no resolver
    if is_private_literal(plain) or not all(map(is_public, found)):
        raise PrivateAddressError(f"{plain} has no public address")
