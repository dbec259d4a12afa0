"""`storage_options` as users write them → settings of an obstore store. Pure but for the AWS profile files.

Keys are taken in fsspec's words (`key`, `secret`, `endpoint_url`, `anon`, …) and in obstore's own. A key that no
scheme knows is an error; one that another scheme knows is left alone, since one dataset may read from several.
"""

from __future__ import annotations

import configparser
import datetime
import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import TypeVar
from urllib.parse import urlsplit

from sqlstream.environment import environment
from sqlstream.errors import ConfigError
from sqlstream.storage.base.urls import redact

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
_CLIENT = frozenset(
    "allow_http allow_invalid_certificates http1_only http2_only pool_idle_timeout pool_max_idle_per_host proxy_ca_certificate "
    "proxy_excludes proxy_url root_certificate user_agent".split()
)
_OWN = {
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
_TEXTS = frozenset(
    "access_key_id secret_access_key session_token service_account service_account_key bearer_token application_credentials "
    "account_key client_id client_secret tenant_id sas_key sse_customer_key_base64".split()
)
"""Options that obstore would take `True` for the text "true" of, and send it."""
_ALIASES = {
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
_HANDLED = {
    "s3": {"profile", "client_kwargs", "verify"},
    "gs": {"token", "project"},
    "az": set[str](),
    "http": {"headers", "verify"},
}
"""Keys with a meaning of their own; `project` is for billing of writes, reading needs none."""


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
    flat = _flatten(options)
    _check_known(scheme, flat)
    config: dict[str, object] = {}
    client: dict[str, object] = {}
    for key, value in flat.items():
        name = _ALIASES[family].get(key, key)
        if value is None:
            continue
        if name in _OWN[family]:
            config[name] = _taken(key, value, is_text=name in _TEXTS)
        elif key in _CLIENT:
            client[key] = _taken(key, value)
    if flat.get("verify") is False:
        client["allow_invalid_certificates"] = True
    elif isinstance(flat.get("verify"), str):
        client["root_certificate"] = _read_option("verify", str(flat["verify"]))
    if family == "s3":
        _complete_s3(config, flat)
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


def _read_option(key: str, path: str) -> str:
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
"""Environment variables of these, as obstore reads them beside `_complete_s3`."""
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
    flat = _flatten(options)
    config = {_ALIASES[family].get(key, key): value for key, value in flat.items() if value is not None}
    places: dict[str, object] = {}
    if family == "s3":
        _complete_s3(config, flat, variables)
        region = str(config.get("region") or config.get("default_region") or _region_variable(variables))
        places = {"profile": flat.get("profile"), "partition": _partition(region)}
    elif family == "gs":
        places = {"key_file": _gcs_key_place(config, variables)}
    for name, value in environment(*_PLACE_VARIABLES[family], of=variables).items():
        config.setdefault(_PLACE_VARIABLES[family][name], value)
    places |= {key: config[key] for key in _PLACES[family] if key in config}
    texts = {key: str(value).rstrip("/") for key, value in places.items() if value is not None}
    return {key: text for key, text in texts.items() if text.lower() not in ("", "false", "0")}


def _region_variable(variables: Mapping[str, str]) -> str:
    return next(iter(environment("AWS_REGION", "AWS_DEFAULT_REGION", of=variables).values()), "")


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


def _check_known(scheme: str, flat: Mapping[str, object]) -> None:
    """Raise for a key that means nothing to any scheme."""
    family = SCHEMES[scheme]
    for key in flat.keys() - known_keys():
        if flat[key] is not None:
            known = ", ".join(sorted(_OWN[family] | set(_ALIASES[family]) | _HANDLED[family] | _CLIENT | OWN_KEYS))
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
    for key, value in _flatten(options).items():
        if value is not None and key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            cure = f"did you mean {near[0]!r}?" if near else "correct it, or leave it out."
            more = "Options of a file system of fsspec need backend='fsspec' beside them"
            raise ConfigError(f"storage_options[{key!r}] is not known: {cure} {more}")


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
    flat = _flatten(options)
    certificate = flat.get("root_certificate")
    if isinstance(flat.get("verify"), str):
        certificate = _read_option("verify", str(flat["verify"]))
    return Network(
        proxy_url=str(flat["proxy_url"]) if flat.get("proxy_url") else None,
        proxy_excludes=tuple(name.strip() for name in str(flat.get("proxy_excludes") or "").split(",") if name.strip()),
        root_certificate=str(certificate) if certificate else None,
        allows_invalid_certificates=bool(flat.get("allow_invalid_certificates")) or flat.get("verify") is False,
    )


def _flatten(options: Mapping[str, object]) -> dict[str, object]:
    """Return the options with s3fs's `client_kwargs` lifted to the top, and without `backend`."""
    flat = {key: value for key, value in options.items() if key not in OWN_KEYS and key != "client_kwargs"}
    nested = options.get("client_kwargs") or {}
    if not isinstance(nested, Mapping):
        raise ConfigError(f"storage_options['client_kwargs'] is a {type(nested).__name__}: give a dict")
    return {**flat, **nested}


def known_keys() -> set[str]:
    """Return every key of `storage_options` that means something to some scheme that obstore serves."""
    known = set(_CLIENT | OWN_KEYS)
    for family, own in _OWN.items():
        known |= own | set(_ALIASES[family]) | _HANDLED[family]
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


def http_headers(options: Mapping[str, object]) -> dict[str, str]:
    """Return the headers for each request over http(s).

    Raises:
        ConfigError: They are no dict, one of them would not be one line of a request, or an option is not known.
    """
    flat = _flatten(options)
    if options.get("backend") != "fsspec":  # else they may be meant for any file system
        _check_known("http", flat)
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


def _complete_s3(config: dict[str, object], flat: Mapping[str, object], variables: Mapping[str, str] | None = None) -> None:
    """Add what the environment and the AWS profile say, where the options say nothing."""
    env = environment(
        *(
            "AWS_ENDPOINT_URL_S3",
            "AWS_ENDPOINT_URL",
            "S3_ENDPOINT_URL",
            "AWS_ACCESS_KEY_ID",
            "AWS_REGION",
            "AWS_DEFAULT_REGION",
        ),
        of=variables,
    )
    named = flat.get("profile")
    has_credentials = "access_key_id" in config or bool(config.get("skip_signature")) or "AWS_ACCESS_KEY_ID" in env
    profile = read_aws_profile(str(named) if named else None, variables) if named or not has_credentials else {}
    if named or not has_credentials:
        for key in ("access_key_id", "secret_access_key", "session_token"):
            if key in profile:
                config.setdefault(key, profile[key])
    if "region" in profile and not {"AWS_REGION", "AWS_DEFAULT_REGION"} & set(env):
        config.setdefault("region", profile["region"])
    # S3_ENDPOINT_URL is MosaicML Streaming's name for it
    endpoint = env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or env.get("S3_ENDPOINT_URL")
    if endpoint := endpoint or profile.get("endpoint"):
        config.setdefault("endpoint", endpoint)


def has_region() -> bool:
    """Return True if the environment names the AWS region."""
    return bool(environment("AWS_REGION", "AWS_DEFAULT_REGION"))


def read_aws_profile(name: str | None, variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return access_key_id, secret_access_key, session_token, region and endpoint of an AWS profile, those that it has.

    Args:
        name: The profile; None: `$AWS_PROFILE`, else the default one, which may be missing.
        variables: The environment; None: as it is now.

    Raises:
        ConfigError: A profile that was named does not exist.
    """
    env = environment("AWS_PROFILE", "AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE", of=variables)
    explicit = name or env.get("AWS_PROFILE")
    profile = explicit or "default"
    directory = Path.home() / ".aws"
    files = {
        env.get("AWS_CONFIG_FILE", str(directory / "config")): (f"profile {profile}", profile),
        env.get("AWS_SHARED_CREDENTIALS_FILE", str(directory / "credentials")): (profile,),
    }
    values: dict[str, str] = {}
    found = False
    for path, sections in files.items():
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read(path)
        except (configparser.Error, UnicodeDecodeError) as error:
            why = str(error).splitlines()[0].partition(": ")[0] if isinstance(error, configparser.Error) else "it is no text"
            raise ConfigError(
                f"{path} is no configuration of AWS that can be read ({why}): mend it, or set AWS_CONFIG_FILE"
            ) from None
        for section in filter(parser.has_section, sections):
            found = True
            values.update(parser.items(section))
    if explicit and not found:
        raise ConfigError(
            f"AWS profile {explicit!r} is in none of {', '.join(files)}: check storage_options['profile'], AWS_PROFILE"
        )
    names = {
        "aws_access_key_id": "access_key_id",
        "aws_secret_access_key": "secret_access_key",
        "aws_session_token": "session_token",
    }
    names |= {"region": "region", "endpoint_url": "endpoint"}
    return {ours: values[theirs] for theirs, ours in names.items() if theirs in values}
