"""URL → backends, best first."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from sqlstream.config import StorageOptions
from sqlstream.storage.base import Storage
from sqlstream.storage.fsspec_backend import FsspecStorage
from sqlstream.storage.http_backend import HttpStorage
from sqlstream.storage.obstore_backend import ObstoreStorage, spells_exactly
from sqlstream.storage.settings import SCHEMES
from sqlstream.storage.urls import redact, scheme

_logger = logging.getLogger(__name__)


class Resolver:
    """Knows which backends can read a URL; thread safe.

    obstore serves s3, gs, az and http(s); behind it, for http(s), stands urllib3, which reads what obstore cannot. All else,
    local files too, goes through fsspec.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._prefers_fsspec = options.storage_options.get("backend") == "fsspec"
        self._obstore = ObstoreStorage(options)
        self._http = HttpStorage(options)
        self._fsspec = FsspecStorage(options)
        self._exact_hosts: set[str] = set()
        self._lock = threading.Lock()

    def candidates(self, url: str) -> Sequence[Storage]:
        """Return the backends for a URL, from fast to exact; see `retry.with_retries`."""
        kind = scheme(url)
        if kind not in SCHEMES or self._prefers_fsspec:
            return (self._fsspec,)
        if SCHEMES[kind] != "http":
            return (self._obstore,)
        is_fast = spells_exactly(url) and _host(url) not in self._exact_hosts
        return (self._obstore, self._http) if is_fast else (self._http,)

    def prefer_exact(self, url: str) -> None:
        """Remember that obstore cannot read what this URL's host answers, so that the next object costs one request."""
        with self._lock:
            if not self._exact_hosts:
                _logger.warning("%s: obstore cannot read this server's answers; urllib3 reads them, more slowly", redact(url))
            self._exact_hosts.add(_host(url))


def _host(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]
