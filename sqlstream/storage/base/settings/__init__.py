"""`storage_options` as users write them, and what they mean to the clients.

Keys are taken in fsspec's words (`key`, `secret`, `endpoint_url`, `anon`, …) and in obstore's own. A key that no
scheme knows is an error; one that another scheme knows is left alone, since one dataset may read from several.
"""

from __future__ import annotations

from sqlstream.storage.base.settings.aws import has_region
from sqlstream.storage.base.settings.keys import (
    OWN_KEYS,
    SCHEMES,
    check_options_of_sources,
    headers_over,
    known_keys,
    options_over,
)
from sqlstream.storage.base.settings.network import Network, http_headers, network_settings
from sqlstream.storage.base.settings.places import connection_place, place_settings
from sqlstream.storage.base.settings.stores import StoreSettings, store_settings

__all__ = [
    "OWN_KEYS",
    "SCHEMES",
    "Network",
    "StoreSettings",
    "check_options_of_sources",
    "connection_place",
    "has_region",
    "headers_over",
    "http_headers",
    "known_keys",
    "network_settings",
    "options_over",
    "place_settings",
    "store_settings",
]
