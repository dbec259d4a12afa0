"""A server whose tokens are good for some requests, and functions that get them, as users write them."""

from __future__ import annotations

import os
import threading
import urllib.request

from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, Request

PLACE = "TOKENS_OF_A_TEST"
"""Environment variable with the URL of the server."""
EXPIRED = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"


class TokenServer(FaultyHttpServer):
    """Answers `/token` with a new token, and everything else to those who send one that is still good.

    Args:
        num_uses: Requests that a token is good for.
    """

    def __init__(self, num_uses: int) -> None:
        super().__init__()
        self.num_uses = num_uses
        self.num_tokens = 0
        self.num_refused = 0
        self._uses: dict[str, int] = {}
        self._tokens_lock = threading.Lock()

    def next_answer(self, request: Request) -> FaultyAnswer | None:
        """Hand a token out, or count a use of one."""
        answer = super().next_answer(request)
        token = request.headers.get("x-amz-security-token") or request.headers.get("authorization", "").removeprefix("Bearer ")
        with self._tokens_lock:
            if request.path == "/token":
                self.num_tokens += 1
                self.objects["/token"] = f"token-{self.num_tokens}".encode()
                self._uses[f"token-{self.num_tokens}"] = self.num_uses
            elif self._uses.get(token, 0):
                self._uses[token] -= 1
            else:
                self.num_refused += 1
                is_s3 = "x-amz-date" in request.headers
                return FaultyAnswer(fault=Fault.STATUS, status=400 if is_s3 else 401, body=EXPIRED if is_s3 else b"")
        return answer


def bearer() -> dict[str, object]:
    """Return a header with a new token."""
    return {"headers": {"Authorization": f"Bearer {_token()}"}}


def keys() -> dict[str, object]:
    """Return keys of S3 with a new token."""
    return {"key": "me", "secret": "hidden", "token": _token()}


def nothing_new() -> dict[str, object]:
    """Return the same keys each time."""
    return {"key": "me", "secret": "hidden", "token": "old"}


def failing() -> dict[str, object]:
    """Raise, with a secret in the text."""
    raise RuntimeError("https://me:hidden@sts.example.org says password=hidden is wrong")


def _token() -> str:
    with urllib.request.urlopen(f"{os.environ[PLACE]}/token") as answer:
        text: str = answer.read().decode()
        return text
