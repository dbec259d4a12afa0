"""The clock of the server that a source is read from, by the `Date` of one small answer."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from sqlstream.config import StorageOptions
from sqlstream.environment import environment, whole_environment
from sqlstream.storage.base import urls
from sqlstream.storage.base.settings import SCHEMES, place_settings, store_settings

TIMEOUT_SECONDS = 10.0
"""For all of the request; arbitrary: a person waits."""


def server_of(url: str, options: Mapping[str, object]) -> str | None:
    """Return the origin of the server that a URL is read from; None where no request tells it, and for other schemes.

    Args:
        url: Of a source.
        options: `storage_options`.

    Raises:
        ConfigError: A profile that does not exist, or an option that is not known.

    Example:
        >>> server_of("https://me:word@host:8443/a/t.csv?sig=1", {}), server_of("s3://b/t.csv", {"endpoint_url": "http://m:9000/"})
        ('https://host:8443', 'http://m:9000')
    """
    kind = urls.scheme(url)
    if SCHEMES.get(kind) == "http":
        return _origin(url)
    if SCHEMES.get(kind) not in ("s3", "gs"):
        return None
    places = place_settings(kind, options, whole_environment())
    if SCHEMES[kind] == "gs":
        return _origin(places.get("base_url") or places.get("key_file") or "https://storage.googleapis.com")
    if "endpoint" in places:
        return _origin(places["endpoint"])
    config = store_settings(kind, options).config
    region = config.get("region") or config.get("default_region")
    region = region or next(iter(environment("AWS_REGION", "AWS_DEFAULT_REGION").values()), "us-east-1")
    return f"https://s3.{region}.amazonaws.com{'.cn' if str(region).startswith('cn-') else ''}"


def seconds_ahead(origin: str, options: Mapping[str, Any], now: Callable[[], float] = time.time) -> float | None:
    """Return by how much a server's clock is ahead of this machine's; None if it does not tell the time.

    It is asked for its root, without credentials: whatever it answers has a date, exact to a second.

    Args:
        origin: Scheme, host and port.
        options: `storage_options`, for proxies and certificates.
        now: This machine's clock.

    Raises:
        HTTPError: Of urllib3: it does not answer.
    """
    from sqlstream.storage.backends.http_pools import Pools

    began = now()
    pools = Pools(StorageOptions(storage_options=dict(options)))
    answer = pools.request("HEAD", f"{origin}/", {}, deadline=time.monotonic() + TIMEOUT_SECONDS)
    answer.close()
    try:
        told = email.utils.parsedate_to_datetime(answer.headers["Date"]).timestamp()
        told += int(answer.headers.get("Age", "0"))  # a cache on the way answered: the date is that of its copy
    except (KeyError, ValueError):
        return None
    return told - (began + now()) / 2


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"
