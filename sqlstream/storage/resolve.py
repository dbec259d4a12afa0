"""URL → backends, best first."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

from sqlstream.config import StorageOptions
from sqlstream.storage.base import Storage
from sqlstream.storage.policy import host_name
from sqlstream.storage.settings import SCHEMES, network_settings
from sqlstream.storage.spelling import is_plain
from sqlstream.storage.urls import host, scheme

_logger = logging.getLogger(__name__)


class Resolver:
    """Knows which backends can read a URL; thread safe.

    obstore serves s3, gs and az; http(s) the direct client, and behind it urllib3, which reads what that one leaves. All else,
    local files too, goes through fsspec, and everything when a file system object is given. fsspec's own http client is not
    chosen for anybody: it follows redirects into private networks, and gives whole objects for ranges.
    """

    def __init__(self, options: StorageOptions) -> None:
        given = options.storage_options
        self._has_file_system = given.get("filesystem") is not None
        self._prefers_fsspec = given.get("backend") == "fsspec"
        self._options = options
        self._is_direct: dict[str, bool] = {}
        self._has_warned = False

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
    def _direct(self) -> Storage:
        from sqlstream.storage.direct_backend import DirectHttpStorage

        return DirectHttpStorage(self._options)

    @cached_property
    def _fsspec(self) -> Storage:
        from sqlstream.storage.fsspec_backend import FsspecStorage

        return FsspecStorage(self._options)

    def candidates(self, url: str) -> Sequence[Storage]:
        """Return the backends for a URL, from fast to exact; see `retry.with_retries`."""
        kind = scheme(url)
        is_http = SCHEMES.get(kind) == "http"
        if kind not in SCHEMES or self._has_file_system or (self._prefers_fsspec and not is_http):
            return (self._fsspec,)
        if not is_http:
            return (self._obstore,)
        return (self._direct, self._http) if is_plain(url) and self._host_is_direct(url) else (self._http,)

    def prefer_exact(self, url: str) -> None:
        """Remember that the direct client cannot read the answers of this host: the next object costs one request again."""
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("%s: redirects, compression, no lengths or HTTP/1.0: urllib3 reads it, more slowly", host(url))
        self._is_direct[host(url)] = False

    def _host_is_direct(self, url: str) -> bool:
        """Whether a host is reached without a proxy, and its answers are read by the direct client."""
        if (known := self._is_direct.get(host(url))) is None:
            from sqlstream.storage.routes import proxy_for  # Python's own http client: no object store needs it

            network = network_settings(self._options.storage_options)
            known = self._is_direct[host(url)] = not proxy_for(network, scheme(url), host_name(url))
        return known
