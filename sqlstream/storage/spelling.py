"""Whether obstore would ask for an object by the very name that the URL spells. Pure."""

from __future__ import annotations

import re

from sqlstream.storage.settings import SCHEMES
from sqlstream.storage.urls import scheme

_PLAIN_HTTP_PATH = re.compile(r"[A-Za-z0-9._~!$&'()*+,;=:@/-]*")  # nothing that object_store would escape or cut off


def spells_exactly(url: str) -> bool:
    """Return True if obstore asks for this very name: it drops or refuses empty and dot segments, and escapes HTTP paths."""
    authority, _, key = url.partition("://")[2].partition("/")
    if {"", ".", ".."} & set(key.split("/")):
        return False
    return SCHEMES[scheme(url)] != "http" or ("@" not in authority and _PLAIN_HTTP_PATH.fullmatch(key) is not None)
