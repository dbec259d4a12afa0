"""The head of an answer: read at once where it is plain, else by the standard library, to the same message."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable
from io import BufferedReader
from types import FunctionType
from typing import Any

# Fields of one line, of visible ASCII; fewer than the 100 lines that http.client takes. The parser of the email package looks
# for parts behind a head whose type begins with `multipart/` or `message/`.
_PLAIN_HEAD = re.compile(rb"(?:(?!(?i:content-type): *[mM])[!#$%&'*+.^_`|~0-9A-Za-z-]+:[ -~]*\r\n){0,99}\r\n")
_MOST_BYTES = 1 << 14  # arbitrary, below the 65536 of a line that http.client takes


def read_head(lines: BufferedReader[Any], **options: Any) -> http.client.HTTPMessage:
    """Return what `http.client.parse_headers` returns, and leave the same bytes unread.

    That one reads a head with the parser for e-mail, in a fifth of the calls of a small download. Here a plain head is taken
    apart; one with anything else, or one that has not come as a whole, is left to that parser.

    Args:
        lines: The head, and what follows.
        options: For `parse_headers`; later versions of Python have some.

    Raises:
        http.client.HTTPException: A line or the head is too long.
    """
    match = _PLAIN_HEAD.match(lines.peek(), 0, _MOST_BYTES)
    if match is None:
        parsed: http.client.HTTPMessage = http.client.parse_headers(lines, **options)
        return parsed
    message = http.client.HTTPMessage()
    for line in lines.read(match.end()).decode("ascii").split("\r\n")[:-2]:
        name, _, value = line.partition(":")
        message.set_raw(name, value.lstrip(" "))
    message.set_payload("")
    return message


def reading_heads(begin: Callable[[http.client.HTTPResponse], None]) -> Callable[[http.client.HTTPResponse], None]:
    """Return `HTTPResponse.begin` with `read_head` for the function of its module that no class can override.

    Rejected: to write `begin` anew, which says what each header means for the body; to replace the function in the module,
    for all users of http.client in this process.
    """
    assert isinstance(begin, FunctionType), "http.client is written in Python"
    made = FunctionType(begin.__code__, {**begin.__globals__, "parse_headers": read_head}, closure=begin.__closure__)
    made.__kwdefaults__ = begin.__kwdefaults__
    return made
