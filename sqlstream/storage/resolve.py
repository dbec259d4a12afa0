"""URL → backends, best first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import cached_property

from sqlstream.config import StorageOptions
from sqlstream.storage.base import Storage
from sqlstream.storage.policy import host_name, is_private_literal
from sqlstream.storage.settings import SCHEMES
from sqlstream.storage.spelling import spells_exactly
from sqlstream.storage.urls import redact, scheme

_logger = logging.getLogger(__name__)


class Resolver:
    """Knows which backends can read a URL; thread safe.

    obstore serves s3, gs, az and http(s); behind it, for http(s), stands urllib3, which reads what obstore cannot. All else,
    local files too, goes through fsspec, and everything when a file system object is given.
    """

    def __init__(self, options: StorageOptions) -> None:
        given = options.storage_options
        self._prefers_fsspec = given.get("backend") == "fsspec" or given.get("filesystem") is not None
        self._options = options
        self._exact_hosts: set[str] = set()
        self._lock = threading.Lock()

    # Each is imported when a URL first needs it: together they take as long as all the rest of a start (m).

    @cached_property
    def _obstore(self) -> Storage:
        from sqlstream.storage.obstore_backend import ObstoreStorage

        return ObstoreStorage(self._options)

    @cached_property
    def _http(self) -> Storage:
        from sqlstream.storage.http_backend import HttpStorage

        return HttpStorage(self._options)

    @cached_property
    def _fsspec(self) -> Storage:
        from sqlstream.storage.fsspec_backend import FsspecStorage

        return FsspecStorage(self._options)

    def candidates(self, url: str) -> Sequence[Storage]:
        """Return the backends for a URL, from fast to exact; see `retry.with_retries`."""
        kind = scheme(url)
        if kind not in SCHEMES or self._prefers_fsspec:
            return (self._fsspec,)
        if SCHEMES[kind] != "http":
            return (self._obstore,)
        # obstore follows redirects without asking us. Over https it stays with https, where a certificate must fit; in the
        # clear a public server could send it to any address in here.
        is_safe = kind == "https" or is_private_literal(host_name(url))
        is_fast = is_safe and spells_exactly(url) and _host(url) not in self._exact_hosts
        return (self._obstore, self._http) if is_fast else (self._http,)

    def prefer_exact(self, url: str) -> None:
        """Remember that obstore cannot read what this URL's host answers, so that the next object costs one request."""
        with self._lock:
            if not self._exact_hosts:
                _logger.warning("%s: obstore cannot read this server's answers; urllib3 reads them, more slowly", redact(url))
            self._exact_hosts.add(_host(url))


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
