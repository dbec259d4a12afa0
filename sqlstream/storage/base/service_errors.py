"""What an object store says of a failure in the body of its answer: a code and a sentence. Pure.

S3, GCS (in its XML interface) and Azure send `<Error><Code>…</Code><Message>…</Message>…`; botocore writes a sentence of these.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_CODE = re.compile(r"<Code>\s*([A-Za-z][\w.]{1,80})\s*</Code>")
_MESSAGE = re.compile(r"<Message>\s*(.*?)\s*</Message>", re.DOTALL)
_SENTENCE = re.compile(
    r"An error occurred \(([A-Za-z][\w.]{1,80})\) when calling the \w+ operation(?: \([^)]*\))?:(.*)", re.DOTALL
)
_MOST_LETTERS = 300  # of a message; arbitrary
NO_BUCKET = frozenset("NoSuchBucket ContainerNotFound ContainerBeingDeleted".split())
"""Codes for a bucket or container that is not there."""
CREDENTIALS_ENDED = frozenset("ExpiredToken ExpiredTokenException TokenRefreshRequired InvalidToken RequestExpired".split())
"""Codes for credentials that were good for a time."""
BAD_CREDENTIALS = CREDENTIALS_ENDED | frozenset(
    "InvalidAccessKeyId SignatureDoesNotMatch AuthenticationFailed InvalidAuthenticationInfo".split()
)
"""Codes for credentials that are refused wherever they are sent, with 400 or 403."""
CURES = {
    **dict.fromkeys(CREDENTIALS_ENDED, "give new credentials, or a function that renews them (storage_options['credentials'])"),
    "RequestTimeTooSkewed": "set the clock of this machine",
    "AuthorizationHeaderMalformed": "set storage_options['region']",
    "InvalidObjectState": "it is archived: restore it first",
}
"""What to do, by code, where it is not what the status alone says."""


class ServiceError(NamedTuple):
    """A store's own words."""

    code: str
    message: str
    """One line without a full stop."""

    def __str__(self) -> str:
        """Return `Code: Message`."""
        return f"{self.code}: {self.message}" if self.message else self.code


def read_error(text: str) -> ServiceError | None:
    """Return what a store says in a text that holds the body of its answer, or botocore's sentence; None: nothing.

    Example:
        >>> str(read_error("400 Bad Request: <Error><Code>ExpiredToken</Code><Message>It has expired.</Message></Error>"))
        'ExpiredToken: It has expired'
    """
    if code := _CODE.search(text):
        import html  # not at each start of a helper

        message = _MESSAGE.search(text)
        return _error(code[1], html.unescape(message[1]) if message else "")
    if sentence := _SENTENCE.search(text):
        return _error(sentence[1], sentence[2])
    return None


def _error(code: str, message: str) -> ServiceError:
    line = (message.strip().splitlines() or [""])[0]  # Azure adds the request's number and time
    return ServiceError(code, line.rstrip(". ")[:_MOST_LETTERS])
