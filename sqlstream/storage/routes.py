"""The way to a host: through which proxy, trusting which certificates. What the user names goes before the environment."""

from __future__ import annotations

import ssl
import urllib.request

from sqlstream.storage.settings import Network


def proxy_for(network: Network, scheme: str, host: str) -> str:
    """Return the URL of the proxy for a host, `''` for none: that of the options, else the environment's."""
    if any(host == name or host.endswith(f".{name}") for name in network.proxy_excludes):
        return ""
    if network.proxy_url:
        return network.proxy_url
    return "" if urllib.request.proxy_bypass(host) else urllib.request.getproxies().get(scheme, "")


def tls_context(network: Network) -> ssl.SSLContext:
    """Return what certificates are checked with."""
    context = ssl.create_default_context(cadata=network.root_certificate)
    if network.root_certificate:
        context.load_default_certs()
    if network.allows_invalid_certificates:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context
