"""Whether a client would ask for an object by the very name that the URL spells. Pure."""

from __future__ import annotations

import re

_PLAIN_TARGET = re.compile(r"/[A-Za-z0-9._~!$&'()*+,;=:@/?%-]*")  # what a request may hold as it is
_PLAIN_AUTHORITY = re.compile(r"(?:[^@/?#]*@)?(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?")
_DOTS = re.compile(r"(?:^|/)\.\.?(?:[/?]|$)")  # segments that every client resolves in its own way


def spells_exactly(url: str) -> bool:
    """Return True if obstore asks for this very name: it drops or refuses empty and dot segments."""
    return not {"", ".", ".."} & set(url.partition("://")[2].partition("/")[2].split("/"))


def is_plain(url: str) -> bool:
    """Return True if a URL can be asked for as it is spelled; urllib3 escapes and normalises the others.

    Example:
        >>> [is_plain(url) for url in ("http://h:1/a%20b?x=1", "http://h/a b", "http://h/../x", "https://h")]
        [True, False, False, False]
    """
    rest = url.partition("://")[2].partition("#")[0]
    authority, slash, path = rest.partition("/")
    target = slash + path
    is_spelled = _PLAIN_AUTHORITY.fullmatch(authority) is not None and _PLAIN_TARGET.fullmatch(target) is not None
    return is_spelled and not ("/." in target and _DOTS.search(target))
