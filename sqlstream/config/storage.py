"""How bytes are read from storage."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlstream.config.checks import check_at_least, is_word
from sqlstream.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How bytes are read from storage: who reads where, which chooses the helper process, and how, which goes with requests."""

    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Backend settings as fsspec users write them: `key`, `secret`, `endpoint_url`, `region`, `anon`, `token`, `backend`, …;
    copied with the dicts and lists in them: a later change would change the server, and not the keys of objects."""
    credential_hosts: tuple[str, ...] = ()
    """Hosts and buckets that credentials and headers go to, beside those of the source (`storage.credentials.belongs_to`)."""
    is_signed: bool = True
    """False: for places that credentials do not belong to; `storage_options` has none then, and none are looked for."""
    num_retries: int = 3
    """Tries after the first one, on faults that can pass; 3 as in `sds`."""
    connect_timeout_seconds: float = 10.0
    """Time to a connection; 10 s is the least that survives a cold DNS and a TLS handshake on a busy node."""
    read_timeout_seconds: float = 60.0
    """Longest silence within a body, not the whole download; 60 s as botocore has it."""
    total_timeout_seconds: float = 600.0
    """Longest time of one request, its body included; what came is kept and the rest asked for, where the server allows it.
    600 s bring 6 GB at 10 MB/s; it is there for servers that drip."""
    num_threads: int | Literal["auto"] = "auto"
    """Downloads at a time of a dataset in a process; "auto" follows object size and latency (`storage.base.concurrency`)."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """`module:function` by scheme: what turns URLs of that scheme into bytes, a file or another URL, in the helper process."""

    def __post_init__(self) -> None:
        """Copy `storage_options`, take the settings of ours among them, and check ranges."""
        given: object = self.storage_options
        if not isinstance(given, Mapping):  # it is not shown: it may be a password
            raise ConfigError(
                f"storage_options are a {type(given).__name__}, and no dict: give options by name, {{'region': 'eu'}}"
            )
        if wrong := [key for key in self.storage_options if not isinstance(key, str)]:
            raise ConfigError(
                f"storage_options has the key {wrong[0]!r}, which is no text: give options by name, {{'region': 'eu'}}"
            )
        object.__setattr__(self, "storage_options", copied(self.storage_options))
        if (hosts := self.storage_options.get("credential_hosts")) is not None:
            if not isinstance(hosts, (list, tuple, set, frozenset)) or not all(
                isinstance(host, str) and host for host in hosts
            ):
                raise ConfigError(
                    f"storage_options['credential_hosts']={hosts!r} is no list of hosts: give ['api.example.org', 's3://bucket']"
                )
            object.__setattr__(self, "credential_hosts", tuple(hosts))
        for key, name in _STORAGE_KEYS.items():
            value: Any = self.storage_options.get(key)
            if value is not None:
                seconds = float(check_at_least(f"storage_options[{key!r}]", value, 0.001))
                object.__setattr__(self, name, min(seconds, _MOST_SECONDS))
        object.__setattr__(self, "num_retries", check_at_least("num_downloading_retries", self.num_retries, 0))
        threads: Any = self.num_threads
        if not is_word(threads, "auto"):
            object.__setattr__(self, "num_threads", check_at_least("num_downloading_workers", threads, 1))
        backend = self.storage_options.get("backend", "obstore")
        if backend not in ("obstore", "fsspec"):
            raise ConfigError(f"storage_options['backend']={backend!r} is not one of 'obstore', 'fsspec'")
        _check_credentials(self.storage_options)
        _check_providers(self.providers)
        object.__setattr__(self, "providers", dict(self.providers))


def _check_credentials(options: Mapping[str, object]) -> None:
    """Raise if `credentials` names no function; what it holds instead is not shown."""
    name = options.get("credentials")
    if name is None:
        return
    if not _is_function(name):
        raise ConfigError(
            f"storage_options['credentials'] is a {type(name).__name__}, and not 'module:function': name a function "
            "that returns storage_options; a file system with credentials of its own is given as storage_options['filesystem']"
        )
    if options.get("filesystem") is not None:
        raise ConfigError("storage_options has 'credentials' and 'filesystem', which has its own: leave one of them out")


def _check_providers(providers: object) -> None:
    """Raise if providers are not named as functions, by scheme; which schemes may be, `storage.base.access` says."""
    cure = "give {'asset': 'module:function'}, a scheme and the function that turns its URLs into bytes, a file or another URL"
    if not isinstance(providers, Mapping):
        raise ConfigError(f"providers={providers!r} is no dict: {cure}")
    for kind, name in providers.items():
        if not isinstance(kind, str):
            raise ConfigError(f"providers has {kind!r} for a scheme, which is no text: {cure}")
        if not _is_function(name):
            more = "; the helper process imports it by its name" if callable(name) else ""
            raise ConfigError(f"providers[{kind!r}]={name!r} is not 'module:function': {cure}{more}")


def _is_function(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name) is not None


def copied(value: object) -> object:
    """Return a value with containers of its own."""
    if isinstance(value, Mapping):
        return {key: copied(inner) for key, inner in value.items()}
    return [copied(inner) for inner in value] if type(value) is list else value


_MOST_SECONDS = 1e9
"""30 years, which stand for all longer times: no client takes infinity."""
_STORAGE_KEYS = {
    "connect_timeout": "connect_timeout_seconds",
    "read_timeout": "read_timeout_seconds",
    "timeout": "total_timeout_seconds",
}
"""Keys of `storage_options` that are fields of `StorageOptions`: there they reach the helper through every constructor."""
