"""What identifies an object: its URL without a signature, and whatever else chooses which bytes are behind it.

    what counts                                                   what does not
    scheme, user, host, container or bucket, path                 signatures that are recognised as a whole (`signatures`)
    the rest of the query, byte for byte                          the fragment of a web address
    endpoint and account, as options, environment and             access keys, tokens, cookies, passwords in `storage_options`
    profile resolve them                                          (`credentials`), proxies, timeouts, certificates
    headers that are no credentials
    options of a file system, or the file system object
    the function of a provider
    `cache_namespace`

Where nothing but defaults is in force, what an `Identity` adds is empty: such objects have the key of their URL alone.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from sqlstream.config import StorageOptions
from sqlstream.environment import environment, whole_environment
from sqlstream.errors import ConfigError
from sqlstream.storage.base.access import Access
from sqlstream.storage.base.credentials import CREDENTIAL_HEADERS, CREDENTIAL_OPTIONS, without_credentials
from sqlstream.storage.base.settings import OWN_KEYS, SCHEMES, connection_place, http_headers, options_over, place_settings
from sqlstream.storage.base.signatures import without_signature
from sqlstream.storage.base.urls import is_command

logger = logging.getLogger(__name__)

_CREDENTIAL_HEADER = re.compile(
    r"date|x-(ms|goog|oss)-date|x-amz-content-sha256"
    r"|(.*[-_])?(authorization|cookies?|token|jwt|bearer|secret|password|passwd|signature|credentials?|apikey)"
    r"|(.*[-_])?(api|access|auth|private|secret|session|subscription|functions)[-_]?key|(.*[-_])?session[-_]?id"
)
_CREDENTIAL_OPTION = re.compile(
    r"anon|skip_signature|pass|pwd|key_file|private_key_file|identity_file|(.*_)?cookies?"
    r"|.*_(token|secret|password|passphrase|api_key|access_key|account_key|private_key|secret_key)"
)
_PRINCIPALS = frozenset("username user login connection_string".split())
"""Options that say who asks, and by that what `~` or an account is: they count."""
_WEB = re.compile(r"https?://", re.IGNORECASE)
_TRANSPORT = frozenset(
    "asynchronous auto_mkdir batch_size block_size cache_storage cache_type check_connection config_kwargs consistency "
    "default_block_size default_cache_type default_fill_cache listings_expiry_time loop max_concurrency max_paths proxies "
    "proxy requests_timeout retries skip_instance_cache timeout use_listings_cache verify worker_kwargs"
    .split()
)  # fmt: skip
"""Options of fsspec's file systems that say how, and not what, is read; one that is missing here only makes more keys."""
_VARIABLES = {"hf": ("HF_ENDPOINT",), "webhdfs": ("HADOOP_USER_NAME",), "hdfs": ("HADOOP_USER_NAME",)}
"""Environment variables that choose what a file system reads, beside those of the object stores and fsspec's own."""


def object_name(url: str) -> str:
    """Return what of a URL names the object: all of it, but a recognised signature and the fragment of a web address.

    In object stores '?', '#' and '@' are part of a name. Without any of these a URL is its own name, as it is spelled.

    Example:
        >>> object_name("https://h/x?id=1&GoogleAccessId=me&Expires=1&Signature=abc"), object_name("s3://b/track#1.mp3")
        ('https://h/x?id=1', 's3://b/track#1.mp3')
    """
    head, separator, rest = url.partition("://")
    if not separator or ("@" not in url and "?" not in url) or is_command(url):
        return url
    if not _WEB.match(url):
        return f"{head.lower()}://{rest}"
    address, mark, query = rest.partition("#")[0].partition("?")
    kept = without_signature(query)
    return f"{head.lower()}://{address}{mark if kept or not query else ''}{kept}"


class Identity:
    """What options, environment and profile add to the names of objects; frozen, picklable, the same in every process.

    The environment is that of the moment when this is made, as it is for the helper process (`storage.client.helpers`); a
    profile is read when an object of its scheme is first named.

    Args:
        options: What objects are read with.
        namespace: Parts what different users of one cache see under one URL; None: nothing to part.

    Raises:
        ConfigError: `namespace` is no text, or an empty one.
    """

    __slots__ = ("_by_scheme", "_namespace", "_onward", "_options", "_signed_places", "_unsigned", "_variables", "plain")

    def __init__(self, options: StorageOptions, namespace: str | None = None) -> None:
        if namespace is not None and (not isinstance(namespace, str) or not namespace):
            raise ConfigError(f"cache_namespace={namespace!r} is not a text, or an empty one: give a name, or None")
        self._options = options
        self._namespace = namespace
        self._variables = whole_environment()
        self._by_scheme: dict[str, str] = {}
        self._unsigned: Identity | None = None
        self._onward: dict[tuple[str, ...], Identity] = {}
        self._signed_places: tuple[str, ...] = ()
        """Places that headers are sent to, if not to all."""
        self.plain: tuple[str, ...] = ()
        """Starts of URLs whose prefix is known to be empty; asked for each object: a call would be a tenth of the time."""

    def __reduce__(self) -> tuple[object, ...]:
        return (Identity, (self._options, self._namespace))

    def with_access(self, access: Access) -> Identity:
        """Return the identity of what is read with this access: without headers, or with headers in some places only."""
        if access.onward is None:
            return self if access.is_signed else self.unsigned
        rules = access.onward.rules
        places = tuple(sorted({*rules.places, *rules.credential_hosts}))
        if (known := self._onward.get(places)) is None:
            known = self._onward[places] = Identity(self._options, self._namespace)
            known._variables, known._signed_places = self._variables, places
        return known

    @property
    def unsigned(self) -> Identity:
        """The identity of what is read without headers and credentials (`access.Access`), which other bytes may answer."""
        if self._unsigned is None:
            options = without_credentials(self._options.storage_options)
            self._unsigned = Identity(replace(self._options, storage_options=options), self._namespace)
            self._unsigned._variables = self._variables
        return self._unsigned

    def prefix(self, url: str) -> str:
        """Return what goes before the name of the object at `url`; `''` where nothing but defaults is in force.

        Raises:
            ConfigError: A profile that is asked for does not exist.
        """
        known = None if "::" in url else self._by_scheme.get(url[: url.find(":")])
        return self._prefix(url) if known is None else known

    def _prefix(self, url: str) -> str:
        """Compute the prefix, once for a scheme (for Azure with and without an account) and for each kind of chain."""
        start = url[: url.find(":")]
        provider = self._options.providers.get(start.lower())
        is_known = start.lower() in SCHEMES and self._options.storage_options.get("backend") != "fsspec"
        reads_whole_name = is_known or provider is not None or is_command(url)
        is_chain = url.startswith(f"{start}::") or ("::" in url and not reads_whole_name)
        kinds = _kinds(url) if is_chain else [start.lower()]
        names_account = SCHEMES.get(kinds[0]) == "az" and "@" in url.partition("://")[2].partition("/")[0]
        is_simple = not is_chain and SCHEMES.get(kinds[0]) != "az"
        place = start if is_simple else f"{'::'.join(kinds)}{'@' if names_account else ''}::"
        if (known := self._by_scheme.get(place)) is not None:
            return known
        given, variables = self._options.storage_options, self._variables
        if provider is not None:
            facts = _provided_facts(provider, given, variables, self._signed_places)
        elif is_command(url):  # its text says all: no option reaches it
            facts = {}
        else:
            facts = _facts(kinds, given, variables, names_account=names_account)
        if self._namespace is not None:
            facts["namespace"] = self._namespace
        # A name begins with its scheme, and JSON holds no NUL: no other pair of prefix and name makes the same text.
        prefix = f"\0{json.dumps(facts, sort_keys=True)}\0" if facts else ""
        self._by_scheme[place] = prefix
        if is_simple and not prefix and reads_whole_name:
            self.plain = (*self.plain, f"{start}://")
        return prefix


class PartingOptions:
    """Says which options would make other objects of those at URLs, were they put over those that are given.

    Args:
        given: What objects are named by.
        more: Options that may come over them.

    Example:
        >>> more = {"headers": {"Authorization": "me", "X-Tenant": "a"}}
        >>> PartingOptions({}, more).at("https://h/x"), PartingOptions({}, more).at("s3://b/x")
        (["headers']['X-Tenant"], [])
    """

    def __init__(self, given: Mapping[str, object], more: Mapping[str, object]) -> None:
        headers = more.get("headers")
        singly = [
            (name, {name: value}) for name, value in more.items() if name != "headers" or not isinstance(headers, Mapping)
        ]
        if isinstance(headers, Mapping):
            singly += [(f"headers']['{name}", {"headers": {name: value}}) for name, value in headers.items()]
        self._before = Identity(StorageOptions(storage_options=given))
        self._after = [(name, Identity(StorageOptions(storage_options=options_over(given, option)))) for name, option in singly]

    def at(self, url: str) -> list[str]:
        """Return those that part the object at a URL."""
        before = self._before.prefix(url)
        return [name for name, after in self._after if after.prefix(url) != before]


def _kinds(url: str) -> list[str]:
    """Return the schemes of a chained URL (`zip://a.txt::s3://bucket/b.zip`)."""
    return [link.partition("://")[0].lower() for link in url.split("::")]


def _facts(
    kinds: Sequence[str], given: Mapping[str, object], variables: Mapping[str, str], *, names_account: bool
) -> dict[str, Any]:
    """Return what chooses content beside the URL (JSON)."""
    if (file_system := given.get("filesystem")) is not None:
        return {"filesystem": _description(file_system, "filesystem")}
    if len(kinds) == 1 and SCHEMES.get(kinds[0]) == "http":
        headers = http_headers(given)
        if not given.get("user_agent") and "user-agent" not in map(str.lower, _headers_of(given)):
            del headers["User-Agent"]
        kept = {name.lower(): value for name, value in headers.items() if not _is_credential_header(name)}
        return {"headers": kept} if kept else {}
    facts: dict[str, Any] = {}
    for kind in kinds:
        if SCHEMES.get(kind) in ("s3", "gs", "az"):
            facts |= place_settings(kind, given, variables)
            if names_account and given.get("account_name") is None:
                facts.pop("account_name", None)  # the URL's own holds, not that of the environment
        facts |= environment(*_VARIABLES.get(kind, ()), of=variables)
    if len(kinds) > 1 or kinds[0] not in SCHEMES or given.get("backend") == "fsspec":
        facts |= _file_system_facts(kinds, given, variables)
    return facts


def _provided_facts(
    name: str, given: Mapping[str, object], variables: Mapping[str, str], signed_places: Sequence[str]
) -> dict[str, Any]:
    """Return what chooses the content that a provider gives: the function, and what would choose that of its URLs (JSON)."""
    facts: dict[str, Any] = {"provider": name}
    reached = {kind: _facts([kind], given, variables, names_account=False) for kind in ("https", "s3", "gs", "az", "hf")}
    if any(reached.values()):
        facts["reached"] = {kind: of_kind for kind, of_kind in reached.items() if of_kind}
    if reached["https"] and signed_places:
        facts["headers for"] = list(signed_places)
    return facts


def _is_credential_header(name: str) -> bool:
    """Return whether a header only says who asks, so that it may change from hour to hour.

    `credentials.is_credential_header` decides what is sent to whom, and takes more names for credentials (`X-Author`,
    `X-Tokenizer`): in doubt nothing is sent there, and in doubt it is another object here.
    """
    return name.lower() in CREDENTIAL_HEADERS or _CREDENTIAL_HEADER.fullmatch(name.lower()) is not None


def _is_credential_option(name: str) -> bool:
    """Return the same of an option."""
    is_known = name in CREDENTIAL_OPTIONS or _CREDENTIAL_OPTION.fullmatch(name.lower()) is not None
    return is_known and name not in _PRINCIPALS


def _headers_of(given: Mapping[str, object]) -> list[str]:
    headers = given.get("headers")
    return [str(name) for name in headers] if isinstance(headers, Mapping) else []


def _file_system_facts(kinds: Sequence[str], given: Mapping[str, object], variables: Mapping[str, str]) -> dict[str, Any]:
    """Return what options and fsspec's configuration say to file systems that it makes."""
    dropped = OWN_KEYS | ({"username", "region", "client_kwargs", "profile"} if SCHEMES.get(kinds[-1]) == "s3" else set())
    facts: dict[str, Any] = {}
    if options := _described({key: value for key, value in given.items() if key not in dropped}):
        facts["options"] = options
    is_configured = any(name.startswith(f"FSSPEC_{kind.upper()}") for kind in kinds for name in variables)
    directory = variables.get("FSSPEC_CONFIG_DIR") or os.path.expanduser("~/.config/fsspec")
    if is_configured or os.path.isdir(directory):  # a user without a home directory has none
        import fsspec.config  # used here alone

        configured = {kind: _described(fsspec.config.conf.get(kind, {})) for kind in kinds}
        if any(configured.values()):
            facts["fsspec"] = configured
    return facts


def _described(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a file system's options chooses content (JSON)."""
    facts: dict[str, Any] = {}
    for key, value in options.items():
        if key == "connection_string":
            facts[key] = connection_place(value)
        elif key == "auth" and isinstance(value, list | tuple) and value:
            facts[key] = str(value[0])  # user and password
        elif key not in _TRANSPORT and not _is_credential_option(str(key)) and value is not None:
            facts[str(key)] = _description(value, str(key))
    return facts


def _description(value: Any, name: str) -> Any:  # noqa: PLR0911 - one line for each kind of value
    """Return what JSON can say of an option, the same in every process."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Mapping):
        return _described(value)
    if isinstance(value, set | frozenset):
        return sorted(str(_description(item, name)) for item in value)
    if isinstance(value, list | tuple):
        return [_description(item, name) for item in value]
    kind = value if isinstance(value, type) or callable(value) else type(value)
    label = f"{getattr(kind, '__module__', '')}.{getattr(kind, '__qualname__', type(value).__qualname__)}"
    if hasattr(value, "storage_args") and hasattr(value, "storage_options"):  # an fsspec file system: what it is pickled as
        return [label, _described({**_named(type(value), value.storage_args), **value.storage_options})]
    if label not in _unseen and kind is not value:
        _unseen.add(label)
        logger.warning(
            "storage_options[%r] is a %s, and the cache cannot tell what it leads to: give cache_namespace= a name of its own "
            "if another one reads other objects under the same URLs",
            *(name, label),
        )
    return [label]


def _named(kind: type, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return positional arguments of a file system by the names of its parameters."""
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):
        names = []
    return {names[at] if at < len(names) else f"argument {at}": value for at, value in enumerate(arguments)}


_unseen: set[str] = set()
"""Kinds of objects that the warning was given for."""
