"""The keys of `storage_options`: which there are, and what each family of schemes calls them. Pure but for files they name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from sqlstream.errors import ConfigError

_Value = TypeVar("_Value")
SCHEMES = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gs",
    "gcs": "gs",
    "az": "az",
    "abfs": "az",
    "abfss": "az",
    "http": "http",
    "https": "http",
}
"""Schemes that obstore serves, and the family of each."""
OWN_KEYS = frozenset("backend filesystem credentials credential_hosts verify_etag connect_timeout read_timeout timeout".split())
"""Options that sqlstream itself acts on, for every scheme."""
CLIENT_KEYS = frozenset(
    "allow_http allow_invalid_certificates http1_only http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate "
    "proxy_excludes proxy_url root_certificate user_agent".split()
)
STORE_KEYS = {
    "s3": frozenset(
        "access_key_id secret_access_key session_token region default_region endpoint skip_signature request_payer role_arn "
        "role_session_name sts_endpoint web_identity_token_file metadata_endpoint imdsv1_fallback virtual_hosted_style_request "
        "s3_express sse_customer_key_base64 unsigned_payload".split()
    ),
    "gs": frozenset("service_account service_account_key base_url bearer_token application_credentials skip_signature".split()),
    "az": frozenset(
        "account_name account_key client_id client_secret tenant_id authority_host sas_key use_emulator use_fabric_endpoint "
        "endpoint msi_endpoint object_id msi_resource_id federated_token_file use_azure_cli skip_signature "
        "credential_type".split()
    ),
    "http": frozenset[str](),
}
TEXT_KEYS = frozenset(
    "access_key_id secret_access_key session_token service_account service_account_key bearer_token application_credentials "
    "account_key client_id client_secret tenant_id sas_key sse_customer_key_base64".split()
)
"""Options that obstore would take `True` for the text "true" of, and send it."""
ALIASES = {
    "s3": {
        "key": "access_key_id",
        "aws_access_key_id": "access_key_id",
        "username": "access_key_id",
        "secret": "secret_access_key",
        "aws_secret_access_key": "secret_access_key",
        "password": "secret_access_key",
        "token": "session_token",
        "aws_session_token": "session_token",
        "endpoint_url": "endpoint",
        "region_name": "region",
        "anon": "skip_signature",
        "requester_pays": "request_payer",
    },
    "gs": {"endpoint_url": "base_url", "anon": "skip_signature"},
    "az": {"anon": "skip_signature", "sas_token": "sas_key", "endpoint_url": "endpoint", "account_url": "endpoint"},
    "http": dict[str, str](),
}
HANDLED_KEYS = {
    "s3": {"profile", "client_kwargs", "verify"},
    "gs": {"token", "project"},
    "az": set[str](),
    "http": {"headers", "verify"},
}
"""Keys with a meaning of their own; `project` is for billing of writes, reading needs none."""


def check_known(scheme: str, flat: Mapping[str, object]) -> None:
    """Raise for a key that means nothing to any scheme."""
    family = SCHEMES[scheme]
    for key in flat.keys() - known_keys():
        if flat[key] is not None:
            known = ", ".join(sorted(STORE_KEYS[family] | set(ALIASES[family]) | HANDLED_KEYS[family] | CLIENT_KEYS | OWN_KEYS))
            raise ConfigError(f"storage_options[{key!r}] is not known for {scheme}://: use one of {known}; or backend='fsspec'")


def check_options_of_sources(schemes: Iterable[str], options: Mapping[str, object]) -> None:
    """Raise for an option that means nothing to any scheme, before a source of files of this machine hides that.

    File systems of fsspec take options of their own: nothing is refused where one of them reads.

    Args:
        schemes: Of the sources; `'file'` for a local one, or for a table in memory.
        options: `storage_options`.

    Raises:
        ConfigError: An option is not known.
    """
    if options.get("backend") == "fsspec" or options.get("filesystem") is not None or not set(schemes) <= {"file", *SCHEMES}:
        return
    known = known_keys()
    for key, value in flatten(options).items():
        if value is not None and key not in known:
            from difflib import get_close_matches  # not at each start of a helper

            near = get_close_matches(key, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else "correct it, or leave it out."
            more = "Options of a file system of fsspec need backend='fsspec' beside them"
            raise ConfigError(f"storage_options[{key!r}] is not known: {cure} {more}")


def flatten(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with s3fs's `client_kwargs` lifted to the top, and without `backend`."""
    flat = {key: value for key, value in options.items() if key not in OWN_KEYS and key != "client_kwargs"}
    nested = options.get("client_kwargs") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"storage_options['client_kwargs'] is a {type(nested).__name__}: give a dict")
    return {**flat, **nested}


def known_keys() -> set[str]:
    """Return every key of `storage_options` that means something to some scheme that obstore serves."""
    known = set(CLIENT_KEYS | OWN_KEYS)
    for family, own in STORE_KEYS.items():
        known |= own | set(ALIASES[family]) | HANDLED_KEYS[family]
    return known


def options_over(given: Mapping[str, object], more: Mapping[str, object]) -> dict[str, object]:
    """Return `storage_options` with others put over them; headers are put over headers, in whatever case their names are."""
    merged = {**given, **more}
    below, above = given.get("headers"), more.get("headers")
    if isinstance(below, Mapping) and isinstance(above, Mapping):
        merged["headers"] = headers_over(below, above)
    return merged


def headers_over(*layers: Mapping[str, _Value]) -> dict[str, _Value]:
    """Return the headers of all layers: of one whose names differ only in case, the last, for two of a name are two lines.

    Example:
        >>> headers_over({"User-Agent": "a", "Accept": "b"}, {"user-agent": "c"})
        {'Accept': 'b', 'user-agent': 'c'}
    """
    merged: dict[str, tuple[str, _Value]] = {}
    for layer in layers:
        for name, value in layer.items():
            merged.pop(str(name).lower(), None)
            merged[str(name).lower()] = (name, value)
    return dict(merged.values())


def read_option(key: str, path: str) -> str:
    """Return the text of the file that an option names.

    Raises:
        ConfigError: It cannot be read.
    """
    try:
        return Path(path).read_text()
    except (OSError, ValueError) as error:  # no text, or a name that no file has
        why = (error.strerror if isinstance(error, OSError) else None) or "it is no text"
        raise ConfigError(
            f"storage_options[{key!r}] names the file {path!r}, which cannot be read ({why}): correct it"
        ) from error
