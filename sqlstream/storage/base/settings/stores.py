"""`storage_options` as the settings of an obstore store."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from urllib.parse import urlsplit

from sqlstream.errors import ConfigError
from sqlstream.storage.base.settings.aws import complete_s3
from sqlstream.storage.base.settings.keys import (
    ALIASES,
    CLIENT_KEYS,
    SCHEMES,
    STORE_KEYS,
    TEXT_KEYS,
    check_known,
    flatten,
    read_option,
)
from sqlstream.storage.base.urls import redact


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """The settings of an obstore store."""

    config: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Settings of the store's class (S3Config, …); holds secrets."""
    client: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Settings of its HTTP client (ClientConfig); the backend adds timeouts."""


def store_settings(scheme: str, options: Mapping[str, object]) -> StoreSettings:
    """Return the settings for a scheme of `SCHEMES`, from the user's options, the environment and the AWS profile.

    Raises:
        ConfigError: An option that is not known, or a profile that does not exist.
    """
    family = SCHEMES[scheme]
    flat = flatten(options)
    check_known(scheme, flat)
    config: dict[str, object] = {}
    client: dict[str, object] = {}
    for key, value in flat.items():
        name = ALIASES[family].get(key, key)
        if value is None:
            continue
        if name in STORE_KEYS[family]:
            config[name] = _taken(key, value, is_text=name in TEXT_KEYS)
        elif key in CLIENT_KEYS:
            client[key] = _taken(key, value)
    if flat.get("verify") is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(flat.get("verify"), str):
        client["root_certificate"] = read_option("verify", str(flat["verify"]))
    if family == "s3":
        complete_s3(config, flat)
    elif family == "gs" and flat.get("token") is not None:
        config.update(_gcs_token(flat["token"]))
    endpoint = config.get("endpoint") or config.get("base_url")
    if isinstance(endpoint, str):
        _check_endpoint(endpoint)
        if endpoint.startswith("http://"):
            client["allow_http"] = True
    if scheme == "http":
        client["allow_http"] = True
    return StoreSettings(config=config, client=client)


def _taken(key: str, value: object, *, is_text: bool = False) -> object:
    """Return the value of an option as obstore takes it; its own error would not name the option.

    Raises:
        ConfigError: It takes no such value, or it `is_text` and the value says yes or no.
    """
    if isinstance(value, str) or (isinstance(value, bool | datetime.timedelta) and not is_text):
        return value
    if isinstance(value, int | float | PurePath) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"storage_options[{key!r}] is a {type(value).__name__}: give a text")


def _check_endpoint(endpoint: str) -> None:
    """Raise if an endpoint is no address that a name can be put behind: obstore panics, or asks for the part before a query."""
    cure = "give https://host, with a port or path where it has one (storage_options['endpoint_url'], AWS_ENDPOINT_URL)"
    try:
        parts = urlsplit(endpoint)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_address = False
    if not is_address or set("?#\\ \t\r\n") & set(endpoint):
        raise ConfigError(f"the endpoint {redact(endpoint)!r} is no address of a server: {cure}")


def _gcs_token(token: object) -> dict[str, object]:
    """Return what gcsfs's `token` means: 'anon', a path to a key file, a key as a dict, or one of the default ways.

    Raises:
        ConfigError: It is none of these.
    """
    if token == "anon":  # noqa: S105 - gcsfs's word for no token
        return {"skip_signature": True}
    if isinstance(token, Mapping):
        try:
            return {"service_account_key": json.dumps(dict(token))}
        except TypeError as error:
            raise ConfigError(
                f"storage_options['token'] is a dict that is no JSON ({error}): give a key as Google wrote it"
            ) from None
    if token in ("google_default", "cloud"):
        return {}  # obstore's own way: environment, well-known file, metadata server
    if not isinstance(token, str | PurePath):
        kind = type(token).__name__
        raise ConfigError(f"storage_options['token'] is a {kind}: give the path or dict of a key, or a text as 'bearer_token'")
    return {"service_account": str(token)}
