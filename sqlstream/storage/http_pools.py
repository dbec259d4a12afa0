"""Connection pools of urllib3, with the proxies and certificates that the user and the environment name."""

from __future__ import annotations

import threading

import urllib3

from sqlstream.config import StorageOptions
from sqlstream.storage.routes import proxy_for, tls_context
from sqlstream.storage.settings import Network, network_settings


class Pools:
    """One pool of connections for each proxy, made on first use; thread safe."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._network: Network = network_settings(options.storage_options)
        self._pools: dict[str, urllib3.PoolManager] = {}
        self._lock = threading.Lock()

    def pool(self, scheme: str, host: str) -> urllib3.PoolManager:
        """Return the pool for a host: direct, or through the proxy that holds for it."""
        proxy = self.proxy(scheme, host)
        with self._lock:
            if proxy not in self._pools:
                self._pools[proxy] = self._open(proxy)
            return self._pools[proxy]

    def proxy(self, scheme: str, host: str) -> str:
        """Return the proxy for a host, `''` for none: that of the options, else the environment's."""
        return proxy_for(self._network, scheme, host)

    def _open(self, proxy: str) -> urllib3.PoolManager:
        options = self._options
        context = tls_context(self._network)
        num_connections = 64 if options.num_threads == "auto" else options.num_threads
        timeout = urllib3.Timeout(connect=options.connect_timeout_seconds, read=options.read_timeout_seconds)
        if not proxy:
            return urllib3.PoolManager(
                num_pools=64, maxsize=num_connections, timeout=timeout, retries=False, ssl_context=context
            )
        return urllib3.ProxyManager(
            proxy,
            num_pools=64,
            maxsize=num_connections,
            timeout=timeout,
            retries=False,
            ssl_context=context,
            proxy_ssl_context=context,
            proxy_headers=_proxy_headers(proxy),
        )


def _proxy_headers(proxy: str) -> dict[str, str]:
    """Return the authorization that a proxy's URL carries."""
    auth = urllib3.util.parse_url(proxy).auth
    return dict(urllib3.util.make_headers(proxy_basic_auth=auth)) if auth else {}
