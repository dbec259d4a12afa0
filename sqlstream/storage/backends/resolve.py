"""URL → backend."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, StorageError
from sqlstream.storage.backends.provider import ProvidedStorage, Providers
from sqlstream.storage.backends.renewal import CredentialSource, Granted, RenewedStorage
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.credentials import place_of, without_credentials
from sqlstream.storage.base.protocols import Storage
from sqlstream.storage.base.settings import SCHEMES, options_over
from sqlstream.storage.base.urls import is_command, is_remote, redact, scheme

if TYPE_CHECKING:
    from sqlstream.storage.backends.fsspec.storage import FsspecStorage
    from sqlstream.storage.backends.http_pools import Pools
    from sqlstream.storage.base.identity import PartingOptions

_DENIED = frozenset({401, 403, 409})  # 409 is Azure's answer where a container may not be read without a signature
_AS_GIVEN = Granted(number=0, options={})  # where no function gives credentials


class Resolver:
    """Chooses the backend for a URL and its access; thread safe.

    Commands are run, where their access says so (`command`). The user's functions serve their schemes (`provider`), obstore s3,
    gs and az, urllib3 http(s). All else, local files too, goes through fsspec, and everything when a file system object is
    given. fsspec's own http client is never chosen: it follows redirects into private networks, and gives whole objects for
    ranges.

    Args:
        options: The server, who asks it, and how.
        credentials: Gives what is put over the options for places that credentials belong to; None: they hold as they are.
        providers: Functions of the user that serve schemes; None: there are none.
    """

    def __init__(
        self, options: StorageOptions, credentials: CredentialSource | None = None, providers: Providers | None = None
    ) -> None:
        given = options.storage_options
        self._credentials = credentials
        self.providers = providers or Providers()
        self._has_file_system = given.get("filesystem") is not None
        self._prefers_fsspec = given.get("backend") == "fsspec"
        self._options = options
        self._backends: dict[Access, _Backends] = {}
        self._parting: tuple[int, PartingOptions] | None = None
        """Number of the last credentials, and which of them choose what is read."""
        self._lock = threading.Lock()

    @cached_property
    def _pools(self) -> Pools:
        from sqlstream.storage.backends.http_pools import Pools

        return Pools(self._options)

    def storage(self, url: str, access: Access = OWN) -> Storage:
        """Return the backend for a URL.

        Raises:
            AccessDeniedError: It is a command that may not be run, or the user's file system object would send credentials to a
                place that they do not belong to.
        """
        if is_command(url):
            return self._command(url, access)
        if (provider := self.providers.of(url)) is not None:
            return ProvidedStorage(provider, access, self._followed, self._options.total_timeout_seconds)
        if self._has_file_system and not access.is_signed:
            where = redact(url)
            raise AccessDeniedError(
                f"{where} would be read with the credentials of storage_options['filesystem'], which belong to the source's "
                f"places: pass storage_options['credential_hosts']=[{redact(place_of(url))!r}] if you trust it",
                url=where,
            )
        if self._credentials is not None and access.is_signed and is_remote(url):
            source = self._credentials
            return RenewedStorage(source, lambda granted: self._renewed(url, access, granted, source))
        return self._backend(url, access, _AS_GIVEN)

    def _command(self, url: str, access: Access) -> Storage:
        if not access.runs_command:
            where = redact(url)
            raise AccessDeniedError(
                f"{where} is a command, and those are run that src names with source_options={{'allow_pipes': True}} alone",
                url=where,
            )
        from sqlstream.storage.backends.command import CommandStorage  # few helpers run commands

        return CommandStorage(self._options)

    def is_by_urllib3(self, url: str) -> bool:
        """Return whether the URL itself is read by urllib3; False for what a provider may return for it."""
        return SCHEMES.get(scheme(url)) == "http" and self.providers.of(url) is None and not self._has_file_system

    @contextmanager
    def _followed(self, url: str, access: Access) -> Iterator[Storage]:
        """Give the backend for a URL that a provider returned."""
        with explained(url, access):
            yield self.storage(url, access)

    def _renewed(self, url: str, access: Access, granted: Granted, source: CredentialSource) -> Storage:
        """Return the backend with what the function gave, which must read the objects that the cache names without it.

        Raises:
            ConfigError: It gave an option that chooses what is read.
        """
        known = self._parting
        if known is None or known[0] != granted.number:
            from sqlstream.storage.base.identity import PartingOptions  # few helpers have such a function

            known = self._parting = granted.number, PartingOptions(self._options.storage_options, granted.options)
        if parting := known[1].at(url):
            text = f"{source.name} gave storage_options['{parting[0]}'], which chooses what is read"
            raise ConfigError(f"{text}: give it in storage_options")
        return self._backend(url, access, granted)

    def _backend(self, url: str, access: Access, granted: Granted) -> Storage:
        """Return the backend for a URL with these credentials, or newer ones."""
        kind = scheme(url)
        is_http = SCHEMES.get(kind) == "http"
        with self._lock:
            backends = self._backends.get(access)
            if backends is None or backends.number < granted.number:
                if backends is not None:
                    backends.end()
                backends = self._backends[access] = _Backends(self._options, access, lambda: self._pools, granted)
            if kind not in SCHEMES or self._has_file_system or (self._prefers_fsspec and not is_http):
                return backends.fsspec
            return backends.http if is_http else backends.obstore


class _Backends:
    """The backends for one access: what is read with credentials shares nothing with what is read without.

    Each is imported when a URL first needs it: together they take as long as all the rest of a start (m).
    """

    def __init__(self, options: StorageOptions, access: Access, pools: Callable[[], Pools], granted: Granted) -> None:
        self._access, self._pools = access, pools
        self.number = granted.number
        """Number of the credentials that they were made with."""
        if not access.is_signed:
            options = replace(options, storage_options=without_credentials(options.storage_options), is_signed=False)
        elif granted.options:
            options = replace(options, storage_options=options_over(options.storage_options, granted.options))
        self._options = options

    def end(self) -> None:
        """Have fsspec forget its file systems, whose credentials ended; one that is read from ends with its last reader."""
        if "fsspec" in vars(self):
            self.fsspec.forget()

    @cached_property
    def obstore(self) -> Storage:
        from sqlstream.storage.backends.obstore import ObstoreStorage

        return ObstoreStorage(self._options)

    @cached_property
    def http(self) -> Storage:
        from sqlstream.storage.backends.http import HttpStorage

        return HttpStorage(self._options, self._pools(), is_judged=self._access.is_judged)

    @cached_property
    def fsspec(self) -> FsspecStorage:
        from sqlstream.storage.backends.fsspec.storage import FsspecStorage

        return FsspecStorage(self._options)


class explained:  # noqa: N801 - reads as a statement
    """Says, where a place that got no credentials refuses to answer, how it would get them."""

    __slots__ = ("_access", "_url")

    def __init__(self, url: str, access: Access) -> None:
        self._url, self._access = url, access

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, StorageError) or self._access.is_signed or error.context.get("status") not in _DENIED:
            return
        raise type(error)(
            f"{error}. It was asked without credentials, since a row of another place names it: pass "
            f"storage_options['credential_hosts']=[{redact(place_of(self._url))!r}] to send yours there",
            **error.context,
        ) from error
