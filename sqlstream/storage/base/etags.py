"""ETags as servers spell them, and which of them name one version."""

from __future__ import annotations

import re

_STRONG = re.compile(r'"[^\x00-\x20"\x7f]+"')
BY_TIME = 'W/"modified '
"""How a time of change begins as the name of a version: weak, since two changes within a second have one (RFC 9110, 8.8.2)."""


def is_weak(etag: str) -> bool:
    """Return whether an ETag is marked as the name of several sequences of bytes; some servers write the mark in lower case."""
    return etag[:2].upper() == "W/"


def is_strong(etag: str) -> bool:
    """Return whether an ETag is written as the name of one sequence of bytes (RFC 9110, 8.8.3): what If-Match takes.

    One without its quotes names a version as any other, but servers that read If-Match by its grammar (Go's `net/http`) find no
    name there, and answer 412 to the very version that they serve.

    Example:
        >>> [is_strong(etag) for etag in ('"a"', 'W/"a"', "a", '"a", "b"')]
        [True, False, False, False]
    """
    return _STRONG.fullmatch(etag) is not None


def bare(etag: str) -> str:
    """Return an ETag without quotes and without the mark of a weak one: servers and clients spell them differently."""
    return etag[2 * is_weak(etag) :].strip('"')


def has_own_version(version: str | None) -> bool:
    """Return whether a version is one that the server gives to contents, and not their time of change or nothing."""
    return version is not None and not version.startswith(BY_TIME)


def same_version(one: str | None, two: str | None) -> bool:
    """Return whether two ETags name one version, or one of them is not known.

    Servers spell them with and without quotes, weak and strong, in listings and in answers.

    Example:
        >>> same_version('W/"a"', "a"), same_version('"a"', '"b"'), same_version(None, '"b"')
        (True, False, True)
    """
    return one is None or two is None or bare(one) == bare(two)
