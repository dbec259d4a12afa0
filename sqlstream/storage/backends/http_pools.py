"""Connections of urllib3: made in one place, few of them idle, none used beyond the deadline of its request.

Proxies and certificates: what the user names goes before the environment.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import resource
import socket
import ssl
import threading
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import lru_cache, partial
from typing import Any
from urllib.parse import urlsplit

import urllib3
import urllib3.connection
import urllib3.exceptions
from urllib3.util import parse_url
from urllib3.util.connection import allowed_gai_family

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError
from sqlstream.storage.backends.answers import PlainUrl, plain_url, without_user
from sqlstream.storage.backends.http_response import HttpResponse, deadline_of_request
from sqlstream.storage.backends.judged import check_proxied, public_only
from sqlstream.storage.base.addresses import is_public
from sqlstream.storage.base.concurrency import MOST_THREADS
from sqlstream.storage.base.settings import Network, network_settings

_logger = logging.getLogger(__name__)


def proxy_for(network: Network, scheme: str, host: str) -> str:
    """Return the URL of the proxy for a host, `''` for none: that of the options, else the environment's.

    Both lists of exceptions are read in the same way, and as obstore reads them: `*`, names with or without a dot before them,
    in any case, addresses and their networks (10.0.0.0/8).

    Raises:
        ConfigError: It is no URL, or of a proxy of another kind.
    """
    proxies = urllib.request.getproxies()
    of_environment = "" if network.proxy_url else proxies.get("no", "")
    excludes = (*network.proxy_excludes, *map(str.strip, of_environment.split(",")))
    if "*" in excludes or _is_in(host, excludes) or any(_is_name_in(host, name) for name in excludes if name):
        return ""
    kind = scheme if proxies.get(scheme) else "all"
    proxy = network.proxy_url or proxies.get(kind, "")
    proxy = proxy if "://" in proxy or not proxy else f"http://{proxy}"
    name = "storage_options['proxy_url']" if network.proxy_url else f"{kind.upper()}_PROXY in the environment"
    try:
        parse_url(proxy)
        urlsplit(proxy)
    except (ValueError, urllib3.exceptions.HTTPError):  # it may hold a password
        raise ConfigError(f"{name} is no URL of a proxy: give http://host:port") from None
    if proxy and (spoken := proxy.partition("://")[0].lower()) not in ("http", "https"):
        more = "" if network.proxy_url else f", or name {host} in NO_PROXY"
        raise ConfigError(
            f"{name} is a proxy that speaks {spoken}, through which http(s) is not read: give http://host:port{more}"
        )
    return proxy


def _is_name_in(host: str, domain: str) -> bool:
    return f".{host.lower()}".endswith(f".{domain.lower().lstrip('.')}")


def _is_in(host: str, networks: Iterable[str]) -> bool:
    """Return whether a host is an address in one of some networks; what is no network has none."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host.strip("[]"))
        for name in networks:
            with contextlib.suppress(ValueError):
                if address in ipaddress.ip_network(name, strict=False):
                    return True
    return False


def tls_context(network: Network) -> ssl.SSLContext:
    """Return what certificates are checked with.

    Raises:
        ConfigError: The option that names another one holds none.
    """
    try:
        context = ssl.create_default_context(cadata=network.root_certificate)
    except (ssl.SSLError, ValueError):  # beyond ASCII
        name = "storage_options['root_certificate'] (or the file of ['verify'])"
        raise ConfigError(f"{name} holds no certificate: give it as PEM text, from BEGIN to END CERTIFICATE") from None
    if network.root_certificate:
        context.load_default_certs()
    if network.allows_invalid_certificates:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


MAX_HOSTS = 256
"""Hosts whose pools are kept, about 10 KiB each; twice as many as there are threads."""
MAX_IDLE = 256
"""Connections that wait for their next request, of all hosts; as many as all downloads of a node."""
_NO_RETRIES = urllib3.Retry(False, redirect=False)  # errors as they come, and answers that redirect, too
IDLE_SECONDS = 30.0  # arbitrary, below the 60 to 75 s after which servers end them


class Pools:
    """One manager of connections for each proxy, and for connections that are judged, made on first use; thread safe.

    With a proxy, the address that is connected to is the proxy's, which the user named: what a host's name leads to is the
    proxy's to judge. A host that this machine's own resolver knows as private is refused nevertheless.

    Args:
        options: Timeouts, proxies, certificates.
        max_idle: Connections that wait for their next request, of all hosts; None: `MAX_IDLE`, and at most a quarter of the
            descriptors that this process may have.
    """

    def __init__(self, options: StorageOptions, max_idle: int | None = None) -> None:
        self._options = options
        self._network: Network = network_settings(options.storage_options)
        # Once for each host: to read the environment takes as long as a tenth of a request.
        self._proxy_for = lru_cache(MAX_HOSTS)(partial(proxy_for, self._network))
        self._managers: dict[tuple[str, bool, bool], urllib3.PoolManager] = {}
        """By proxy, whether connections are judged, and whether some are encrypted."""
        self._lock = threading.Lock()
        most = min(MAX_IDLE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4) if max_idle is None else max_idle
        idle = _IdleConnections(most, IDLE_SECONDS)
        self._classes = {is_judged: _pool_classes(idle, is_judged=is_judged) for is_judged in (False, True)}

    def request(
        self, method: str, url: str, headers: Mapping[str, str], *, deadline: float, is_judged: bool = False
    ) -> urllib3.BaseHTTPResponse:
        """Return the open answer to one request; redirects are not followed.

        Args:
            method: GET or HEAD.
            url: Without user and fragment.
            headers: All of them.
            deadline: Time by which head and body must have come, by the monotonic clock.
            is_judged: Connect to a public address only.

        Raises:
            PrivateAddressError: It is judged, and the host has none.
            urllib3.exceptions.HTTPError: It failed.
        """
        parts = plain_url(url) or urlsplit(url)
        host = parts.hostname or ""
        proxy = self._proxy_for(parts.scheme, host)
        manager = self._manager(proxy, parts.scheme, host, is_judged=is_judged)
        token = deadline_of_request.set(deadline)
        try:
            while True:
                left = max(0.001, deadline - time.monotonic())
                options = self._options
                timeout = urllib3.Timeout(
                    connect=min(left, options.connect_timeout_seconds), read=min(left, options.read_timeout_seconds)
                )
                sent: dict[str, Any] = {
                    "headers": headers,
                    "timeout": timeout,
                    "preload_content": False,
                    "retries": _NO_RETRIES,
                }
                try:
                    if proxy or not isinstance(parts, PlainUrl):
                        return manager.urlopen(method, url, redirect=False, **sent)
                    pool = manager.connection_from_host(host, parts.port, parts.scheme)  # what the manager would do
                    return pool.urlopen(method, parts.target, redirect=False, assert_same_host=False, **sent)
                except urllib3.exceptions.ClosedPoolError:
                    continue  # many other hosts came between taking the host's pool and taking a connection out of it
        finally:
            deadline_of_request.reset(token)

    def _manager(self, proxy: str, scheme: str, host: str, *, is_judged: bool) -> urllib3.PoolManager:
        if proxy and is_judged:
            check_proxied(host)
        is_encrypted = "https" in (scheme, urlsplit(proxy).scheme)
        key = (proxy, is_judged, is_encrypted)
        with self._lock:
            if key not in self._managers:
                self._managers[key] = self._open(proxy, is_judged=is_judged, is_encrypted=is_encrypted)
            return self._managers[key]

    def _open(self, proxy: str, *, is_judged: bool, is_encrypted: bool) -> urllib3.PoolManager:
        num_threads = self._options.num_threads
        context = tls_context(self._network) if is_encrypted else None  # it reads all certificates: a fifth of a start
        shared: dict[str, Any] = {
            "num_pools": MAX_HOSTS,
            "maxsize": MOST_THREADS if num_threads == "auto" else num_threads,
            "ssl_context": context,
        }
        manager = (
            urllib3.ProxyManager(proxy, proxy_ssl_context=context, proxy_headers=_proxy_headers(proxy), **shared)
            if proxy
            else urllib3.PoolManager(**shared)
        )
        manager.pool_classes_by_scheme = self._classes[is_judged and not proxy]
        return manager


def _proxy_headers(proxy: str) -> dict[str, str]:
    """Return the authorization that a proxy's URL carries; its escapes stand for what a URL cannot hold."""
    _, headers = without_user(proxy)
    return {f"Proxy-{name}": value for name, value in headers.items()}


class _IdleConnections:
    """Connections that wait for their next request: those used last, of all hosts.

    A connection is closed in the pool that has it. The pool opens it again when it takes it out.
    """

    def __init__(self, limit: int, seconds: float) -> None:
        self._limit = limit
        self._seconds = seconds
        self._since: OrderedDict[Any, float] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, connection: Any) -> None:
        """Note a connection; close those that are too many or too old."""
        now = time.monotonic()
        with self._lock:
            self._since[connection] = now
            while self._since:
                oldest, since = next(iter(self._since.items()))
                if len(self._since) <= self._limit and now - since <= self._seconds:
                    return
                del self._since[oldest]
                oldest.close()

    def remove(self, connection: Any) -> None:
        """Forget a connection that is used again; from here on it is closed by its user alone."""
        with self._lock:
            self._since.pop(connection, None)


class _Pool:
    """Adds to both kinds of urllib3's pools that `idle` knows the connections that they keep."""

    idle: _IdleConnections

    def _get_conn(self, timeout: float | None = None) -> Any:
        connection = super()._get_conn(timeout)  # type: ignore[misc]  # of urllib3's class beside this one
        self.idle.remove(connection)
        return connection

    def _put_conn(self, conn: Any) -> None:
        pool = self.pool  # type: ignore[attr-defined]  # of urllib3's class beside this one
        if conn is not None and not conn.is_closed:
            if pool is None or pool.full():
                conn.close()  # urllib3 does so too, with a warning in the user's log
            else:
                self.idle.add(conn)
        super()._put_conn(conn)  # type: ignore[misc]  # of urllib3's class beside this one


def connect(
    host: str, port: int, *, timeout_seconds: float, deadline: float, options: Iterable[Any], is_judged: bool = False
) -> socket.socket:
    """Return a socket that is connected to a host or proxy: the one place where HTTP connections are made.

    Args:
        host: Name or address, IPv6 in brackets or not.
        port: Its port.
        timeout_seconds: For each address of the host.
        deadline: For all of them, by the monotonic clock.
        options: For `setsockopt`.
        is_judged: Connect to a public address only: the one that was judged, without another look-up.

    Raises:
        PrivateAddressError: It is judged, and the host has none.
        OSError: No address of it can be reached in time.
    """
    error: OSError = OSError(f"{host} has no address")
    found = socket.getaddrinfo(host.strip("[]"), port, allowed_gai_family(), socket.SOCK_STREAM)
    for family, kind, protocol, _, address in public_only(host, found) if is_judged else found:
        left = min(timeout_seconds, deadline - time.monotonic())
        if left <= 0:
            raise TimeoutError("the timeout of the request is over")
        made = socket.socket(family, kind, protocol)
        try:
            for option in options:
                made.setsockopt(*option)
            made.settimeout(left)
            made.connect(address)
        except OSError as caught:
            made.close()
            error = caught
        else:
            return made
    raise error


class _Connection:
    """Adds to both kinds of urllib3's connections how they are made."""

    response_class = HttpResponse
    is_judged = False
    is_private = False
    """True: its peer has no public address."""

    def _new_conn(self: Any) -> socket.socket:
        try:
            made = connect(
                self._dns_host,
                self.port,
                timeout_seconds=self.timeout,
                deadline=deadline_of_request.get(),
                options=self.socket_options or (),
                is_judged=self.is_judged,
            )
            self.is_private = not is_public(str(made.getpeername()[0]))
        except (socket.gaierror, UnicodeError) as error:
            raise urllib3.exceptions.NameResolutionError(self.host, self, error) from error  # type: ignore[arg-type]  # or a name too long
        except TimeoutError as error:
            text = f"Connection to {self.host} timed out. (connect timeout={self.timeout})"
            raise urllib3.exceptions.ConnectTimeoutError(self, text) from error
        except OSError as error:
            text = f"Failed to establish a new connection: {error}"
            raise urllib3.exceptions.NewConnectionError(self, text) from error
        return made


def _pool_classes(idle: _IdleConnections, *, is_judged: bool) -> dict[str, Any]:
    """Return urllib3's classes of pools, by scheme, and with them its classes of connections."""
    bases = {
        "http": (urllib3.HTTPConnectionPool, urllib3.connection.HTTPConnection),
        "https": (urllib3.HTTPSConnectionPool, urllib3.connection.HTTPSConnection),
    }
    classes: dict[str, Any] = {}
    for scheme, (pool, connection) in bases.items():
        made = type(f"{scheme.title()}Connection", (_Connection, connection), {"is_judged": is_judged})
        classes[scheme] = type(f"{scheme.title()}Pool", (_Pool, pool), {"idle": idle, "ConnectionCls": made})
    return classes


def is_private_answer(response: urllib3.BaseHTTPResponse) -> bool | None:
    """Return whether an open answer came from a private address; None: through a proxy, which alone knows."""
    connection: Any = response.connection
    is_direct = isinstance(connection, _Connection) and getattr(connection, "proxy", None) is None
    return connection.is_private if is_direct else None


def discover_region(
    bucket: str, pools: Pools, *, endpoint: str = "https://s3.amazonaws.com", timeout_seconds: float = 10.0
) -> str | None:
    """Return the region of a bucket, None when the server does not say it (then requests will say what is wrong).

    Args:
        bucket: Its name.
        pools: Makes the request.
        endpoint: The S3 that is asked.
        timeout_seconds: For all of it.
    """
    try:
        answer = _asked(pools, f"{endpoint}/{bucket}", time.monotonic() + timeout_seconds)
    except urllib3.exceptions.HTTPError as error:
        _logger.warning("the region of bucket %s cannot be asked for (%s): set storage_options['region']", bucket, error)
        return None
    answer.close()
    headers: Mapping[str, str] = answer.headers
    return headers.get("x-amz-bucket-region")


def _asked(pools: Pools, url: str, deadline: float) -> urllib3.BaseHTTPResponse:
    try:
        return pools.request("HEAD", url, {}, deadline=deadline)
    except urllib3.exceptions.HTTPError:  # once more: what is not found out here is not asked for again
        return pools.request("HEAD", url, {}, deadline=deadline)
