"""What of `storage_options`, environment and profile chooses the server, account or tenant that answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from sqlstream.environment import environment
from sqlstream.storage.base.settings.aws import complete_s3, region_variable
from sqlstream.storage.base.settings.keys import ALIASES, SCHEMES, flatten

_PLACES = {
    "s3": ("endpoint", "virtual_hosted_style_request"),
    "gs": ("base_url", "project"),
    "az": ("account_name", "endpoint", "use_emulator", "use_fabric_endpoint"),
}
"""Settings of a family that choose which server, account or tenant answers; no other does."""
_PLACE_VARIABLES = {
    "s3": {"AWS_ENDPOINT": "endpoint", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "virtual_hosted_style_request"},
    "gs": {"GOOGLE_BASE_URL": "base_url"},
    "az": {
        "AZURE_STORAGE_ACCOUNT_NAME": "account_name",
        "AZURE_STORAGE_ENDPOINT": "endpoint",
        "AZURE_ENDPOINT": "endpoint",
        "AZURE_STORAGE_USE_EMULATOR": "use_emulator",
        "AZURE_USE_FABRIC_ENDPOINT": "use_fabric_endpoint",
    },
}
"""Environment variables of these, as obstore reads them beside `complete_s3`."""
_KEY_FILES = (
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_APPLICATION_CREDENTIALS",
)


def place_settings(scheme: str, options: Mapping[str, object], variables: Mapping[str, str]) -> dict[str, str]:
    """Return what of options, environment and profile chooses where an object store is: nothing that says who asks.

    Args:
        scheme: Of `SCHEMES`, not http(s).
        options: `storage_options`.
        variables: The environment.

    Raises:
        ConfigError: A profile that does not exist.
    """
    family = SCHEMES[scheme]
    flat = flatten(options)
    config = {ALIASES[family].get(key, key): value for key, value in flat.items() if value is not None}
    places: dict[str, object] = {}
    if family == "s3":
        complete_s3(config, flat, variables)
        region = str(config.get("region") or config.get("default_region") or region_variable(variables))
        places = {"profile": flat.get("profile"), "partition": _partition(region)}
    elif family == "gs":
        places = {"key_file": _gcs_key_place(config, variables)}
    for name, value in environment(*_PLACE_VARIABLES[family], of=variables).items():
        config.setdefault(_PLACE_VARIABLES[family][name], value)
    places |= {key: config[key] for key in _PLACES[family] if key in config}
    texts = {key: str(value).rstrip("/") for key, value in places.items() if value is not None}
    return {key: text for key, text in texts.items() if text.lower() not in ("", "false", "0")}


def _partition(region: str) -> str:
    """Return the part of AWS that a region is in, `''` for the usual one: buckets of one name are one in each partition."""
    for partition, starts in (("aws-cn", ("cn-",)), ("aws-us-gov", ("us-gov-",)), ("aws-iso", ("us-iso", "eu-iso"))):
        if region.startswith(starts):
            return partition
    return ""


def _gcs_key_place(config: Mapping[str, object], variables: Mapping[str, str]) -> str:
    """Return the `gcs_base_url` that a service account's key may hold, as those of emulators do; `''` without one."""
    env = environment(*_KEY_FILES, of=variables)
    keys = [config.get(name) for name in ("token", "service_account_key", "service_account", "application_credentials")]
    for key in (*keys, *env.values()):
        values: object = key
        if isinstance(key, str):
            text = key
            if not key.lstrip().startswith("{"):
                try:
                    text = Path(key).read_text()
                except (OSError, ValueError):
                    continue
            try:
                values = json.loads(text)
            except ValueError:
                continue
        if isinstance(values, Mapping) and values.get("gcs_base_url"):
            return str(values["gcs_base_url"])
    return ""


def connection_place(text: object) -> dict[str, object]:
    """Return account and endpoint out of an Azure connection string."""
    fields = dict(field.split("=", 1) for field in str(text or "").split(";") if "=" in field)
    named = {"account_name": fields.get("AccountName"), "endpoint": fields.get("BlobEndpoint") or fields.get("EndpointSuffix")}
    if fields.get("UseDevelopmentStorage", "").lower() == "true":
        named["use_emulator"] = "true"
    return {key: value for key, value in named.items() if value}
