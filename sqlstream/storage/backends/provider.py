"""Providers: functions of the user, each of which turns the URLs of a scheme into bytes, an open file or another URL."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeAlias

from sqlstream.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
    text_of,
)
from sqlstream.storage.backends.functions import load_function
from sqlstream.storage.base.access import OWN, Access, provided_scheme
from sqlstream.storage.base.protocols import ObjectInfo, ObjectStream, RangeBytes, Storage, read_range
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.urls import host, is_remote, redact, redact_text, scheme

PIECE_BYTES = 1 << 20
"""Bytes of one read of a file; arbitrary: as much as may be in memory for each download."""

_logger = logging.getLogger(__name__)

_KINDS: tuple[tuple[type[BaseException], type[StorageError]], ...] = (
    (FileNotFoundError, ObjectNotFoundError),
    (IsADirectoryError, ObjectNotFoundError),
    (NotADirectoryError, ObjectNotFoundError),
    (PermissionError, AccessDeniedError),
    (ObjectChangedError, ObjectChangedError),
    (TransientStorageError, TransientStorageError),
    (StorageError, StorageError),
    (OSError, TransientStorageError),  # network and time-outs, those of requests too
    (BaseException, StorageError),
)
"""What a function may raise, and our error for it: the first that fits."""
_Follow: TypeAlias = Callable[[str, Access], AbstractContextManager[Storage]]
"""Gives what reads a URL, and explains its refusals."""


class Provider:
    """The function of one scheme; asked by as many threads as download.

    Args:
        kind: The scheme.
        name: `module:function`; imported when it is first asked.
        search_path: Where the reading process looks for modules.
    """

    def __init__(self, kind: str, name: str, search_path: Sequence[str]) -> None:
        self.name = f"providers[{kind!r}]={name!r}"
        """What messages call it."""
        self._load = partial(load_function, f"providers[{kind!r}]", name, search_path)
        self._lock = threading.Lock()
        self._function: Callable[..., object] | None = None

    def check(self) -> Callable[..., object]:
        """Return the function.

        Raises:
            ConfigError: It is not there.
        """
        with self._lock:
            if self._function is None:
                self._function = self._load()
            return self._function

    def ask(self, url: str) -> Any:
        """Return what it makes of a URL: a text that is another URL, something like bytes, or something with a `read`.

        Raises:
            StorageError: It raised, or returned something else.
        """
        function = self.check()
        with self.named(url):
            given = function(url)
        if isinstance(given, os.PathLike):
            given = os.fsdecode(given)
            given = given if is_remote(given) else str(Path(given).absolute())
        if isinstance(given, str):
            if scheme(given) != "file" or given.startswith(("/", "file:")):
                return given
            raise StorageError(
                f"{redact(url)}: {self.name} returned the text {redact_text(given[:80])!r}, which is no URL and no absolute "
                "path: return content as bytes",
                url=redact(url),
            )
        if isinstance(given, bytes | bytearray | memoryview) or callable(getattr(given, "read", None)):
            return given
        if inspect.iscoroutine(given):
            given.close()
        raise StorageError(
            f"{redact(url)}: {self.name} returned a {type(given).__name__}: return bytes, a file that is open in binary mode, "
            "or a URL, and raise FileNotFoundError where there is nothing",
            url=redact(url),
        )

    @contextmanager
    def named(self, url: str) -> Iterator[None]:
        """Raise our error in place of the function's own, with its name and the URL."""
        try:
            yield
        except BaseException as error:  # sys.exit, too: only the function raises in the helper's threads
            where = redact(url)
            said = redact_text(text_of(error))
            text = f"{self.name} raised {said}"
            ours = _kind_of(error, url)
            if callable(close := getattr(error, "close", None)):  # urllib's is an open answer
                close()
            raise ours(f"{where}: {text}", url=where) from error


class Providers:
    """The functions of all schemes.

    Args:
        names: `module:function` by scheme.
        search_path: Where the reading process looks for modules.
    """

    def __init__(self, names: Mapping[str, str] | None = None, search_path: Sequence[str] = ()) -> None:
        self._providers = {kind: Provider(kind, name, search_path) for kind, name in (names or {}).items()}

    def check(self) -> None:
        """Import all of them.

        Raises:
            ConfigError: One is not there.
        """
        for provider in self._providers.values():
            provider.check()

    def of(self, url: str) -> Provider | None:
        """Return what serves a URL; None: a backend does."""
        return self._providers.get(provided_scheme(url)) if self._providers else None

    def asked(self, url: str) -> str:
        """Return what is asked for a URL, for counting and waiting: its host, or the scheme of its provider."""
        return host(url) if self.of(url) is None else f"{provided_scheme(url)}://"


class ProvidedStorage:
    """What a provider gives, as a backend.

    Args:
        provider: The function.
        access: How the rows that name these URLs may go on from there.
        follow: Gives what reads a URL that the function returned.
        timeout_seconds: Longest time of reading one file.
    """

    def __init__(self, provider: Provider, access: Access, follow: _Follow, timeout_seconds: float) -> None:
        self._provider = provider
        self._access = access
        self._follow = follow
        self._timeout_seconds = timeout_seconds

    def head(self, url: str) -> ObjectInfo:
        """Return size and version of one object: those of the URL that it leads to, else a hash of all its content."""
        given = self._provider.ask(url)
        if isinstance(given, str):
            with self._followed(url, given) as (target, storage):
                return replace(storage.head(target), url=url)
        digest, num_bytes = blake2b(digest_size=16), 0
        with contextlib.closing(self._opened(url, given)) as stream:
            for chunk in stream.chunks():
                digest.update(chunk)
                num_bytes += len(chunk)
        return ObjectInfo(url=url, size_bytes=num_bytes, etag=digest.hexdigest())

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> ObjectStream:
        """Open the object; a range of it only where it is at another URL."""
        given = self._provider.ask(url)
        if isinstance(given, str):
            with self._followed(url, given) as (target, storage):
                return _FollowedStream(storage.get(target, start=start, stop=stop, etag=etag), url, self._explained)
        stream = self._opened(url, given)
        if start or stop is not None:
            stream.close()
            raise StorageError(
                f"{redact(url)}: {self._provider.name} gives whole objects, and a part of one is asked for, as lazy indexes "
                "do: have it return a URL that can be read in parts, or read the object whole",
                url=redact(url),
                status=501,  # as of a server without ranges: what goes on behind a failed try begins anew
            )
        return stream

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`, where the object is at another URL."""
        return read_range(self, url, start, stop, etag)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Raise: a provider is asked for one object at a time."""
        del after
        raise ConfigError(f"{redact(prefix)}: {self._provider.name} cannot list objects: name them in a table")

    def _opened(self, url: str, given: Any) -> ObjectStream:
        if isinstance(given, bytes | bytearray | memoryview):
            return _BytesStream(url, memoryview(given))
        return _FileStream(url, given, self._provider, time.monotonic() + self._timeout_seconds)

    @contextmanager
    def _followed(self, url: str, given: str) -> Iterator[tuple[str, Storage]]:
        """Give the URL that the function returned, and what reads it, judged as the row that named it is."""
        with self._explained(url):
            target, access = given, OWN if self._access.onward is None else self._access
            if self._access.onward is not None:
                target, access = self._access.onward.judge(given, redact(url))
            with self._follow(target, access) as storage:
                if isinstance(storage, ProvidedStorage):
                    raise StorageError(
                        f"{redact(given)} has the scheme of a provider, which is not asked for it: return content"
                    )
                yield target, storage

    @contextmanager
    def _explained(self, url: str) -> Iterator[None]:
        """Say for which object another URL was read."""
        try:
            yield
        except StorageError as error:
            where = redact(url)
            text = f"{error} ({self._provider.name} returned it for {where})"
            raise type(error)(text, **{**error.context, "url": where}) from error


class _BytesStream:
    """Bytes that are here."""

    start = 0
    num_extra_requests = 0

    def __init__(self, url: str, content: memoryview) -> None:
        self._content = content.cast("B") if content.c_contiguous else memoryview(content.tobytes())
        self.info = ObjectInfo(url=url, size_bytes=len(self._content), etag=None)

    def chunks(self) -> Iterator[memoryview]:
        """Yield them in pieces."""
        for start in range(0, len(self._content), PIECE_BYTES):
            yield self._content[start : start + PIECE_BYTES]

    def close(self) -> None:
        """Do nothing."""


class _FileStream:
    """A file that the function opened, from where it stands to its end."""

    start = 0
    num_extra_requests = 0

    def __init__(self, url: str, file: Any, provider: Provider, deadline: float) -> None:
        self.info = ObjectInfo(url=url, size_bytes=None, etag=None)
        self._file = file
        self._provider = provider
        self._deadline = deadline

    def chunks(self) -> Iterator[memoryview]:
        """Yield its bytes as they are read."""
        where, name = redact(self.info.url), self._provider.name
        while True:
            with self._provider.named(self.info.url):
                piece = self._file.read(PIECE_BYTES)
            if not isinstance(piece, bytes | bytearray | memoryview):
                text = f"{where}: the file that {name} returned gave a {type(piece).__name__}: open it in binary mode"
                raise StorageError(text, url=where)
            if not len(piece):
                break
            yield memoryview(piece).cast("B")
            if time.monotonic() > self._deadline:
                raise TransientStorageError(f"{where}: reading the file that {name} returned took too long", url=where)
        from http.client import HTTPResponse  # a tenth of a helper's start

        if isinstance(self._file, HTTPResponse) and self._file.length:  # `read` says nothing of a body that breaks off
            raise TransientStorageError(f"{where}: the answer that {name} returned lacks {self._file.length} bytes", url=where)

    def close(self) -> None:
        """Close the file."""
        close = getattr(self._file, "close", None)
        try:
            if close is not None:
                close()
        except Exception as error:
            where, said = redact(self.info.url), redact_text(text_of(error))
            _logger.warning("%s: the file that %s returned cannot be closed: %s", where, self._provider.name, said)


class _FollowedStream:
    """An answer for the URL that the function returned, as one for its own."""

    def __init__(self, stream: ObjectStream, url: str, explained: Callable[[str], AbstractContextManager[None]]) -> None:
        self._stream = stream
        self._explained = explained
        self.info = replace(stream.info, url=url)
        self.start = stream.start

    @property
    def num_extra_requests(self) -> int:
        """Requests beside the one that opened it."""
        return self._stream.num_extra_requests

    def chunks(self) -> Iterator[memoryview]:
        """Yield the object's bytes in order."""
        with self._explained(self.info.url):
            yield from self._stream.chunks()

    def close(self) -> None:
        """Give the connection back."""
        self._stream.close()


def _kind_of(error: BaseException, url: str) -> type[StorageError]:
    """Return our error for one of a function; for one of urllib or requests with an HTTP status, by that."""
    response = getattr(error, "response", None)
    for status in (getattr(error, "code", None), getattr(response, "status_code", None)):
        if isinstance(error, OSError) and isinstance(status, int) and 400 <= status < 600:
            return type(error_for_status(status, url))
    from http.client import IncompleteRead  # a tenth of a helper's start

    if isinstance(error, IncompleteRead):
        return TransientStorageError
    return next(ours for theirs, ours in _KINDS if isinstance(error, theirs))
