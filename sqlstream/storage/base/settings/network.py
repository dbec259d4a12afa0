"""Proxies, certificates and headers that `storage_options` name, for the clients beside obstore."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sqlstream.errors import ConfigError
from sqlstream.storage.base.settings.keys import check_known, flatten, headers_over, read_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Proxies and certificates, for the clients beside obstore."""

    proxy_url: str | None = field(default=None, repr=False)
    """URL of the proxy; it may hold a password."""
    proxy_excludes: tuple[str, ...] = ()
    root_certificate: str | None = None
    """Certificates in PEM form, beside those that the system trusts."""
    allows_invalid_certificates: bool = False


def network_settings(options: Mapping[str, object]) -> Network:
    """Return the proxies and certificates that options name."""
    flat = flatten(options)
    certificate = flat.get("root_certificate")
    if isinstance(flat.get("verify"), str):
        certificate = read_option("verify", str(flat["verify"]))
    return Network(
        proxy_url=str(flat["proxy_url"]) if flat.get("proxy_url") else None,
        proxy_excludes=tuple(name.strip() for name in str(flat.get("proxy_excludes") or "").split(",") if name.strip()),
        root_certificate=str(certificate) if certificate else None,
        allows_invalid_certificates=bool(flat.get("allow_invalid_certificates")) or flat.get("verify") is False,
    )


def http_headers(options: Mapping[str, object]) -> dict[str, str]:
    """Return the headers for each request over http(s).

    Raises:
        ConfigError: They are no dict, one of them would not be one line of a request, or an option is not known.
    """
    flat = flatten(options)
    if options.get("backend") != "fsspec":  # else they may be meant for any file system
        check_known("http", flat)
    given = flat.get("headers") or {}
    if not isinstance(given, Mapping):
        raise ConfigError("storage_options['headers'] is not a dict of names and values")
    for name, value in given.items():
        if not isinstance(value, str | int | float):  # `str` would send "None", or "b'…'"
            raise ConfigError(f"storage_options['headers'][{str(name)!r}] is a {type(value).__name__}: give a text")
    own = {"User-Agent": str(flat.get("user_agent") or "sqlstream")}
    headers = headers_over(own, {str(name): str(given[name]) for name in given})
    for name, value in headers.items():
        if not (name + value).isprintable() or not name or ":" in name or max(name + value) > "\xff":
            raise ConfigError(f"storage_options['headers'] has {name!r}, which or whose value is not one line of Latin-1 text")
    return headers
