"""obstore (Rust object_store): s3, gs and az.

Not http(s): it follows redirects without asking, hides what a server says with an error, and fails on answers without a length.
Names that it would spell otherwise (empty or dot segments) are refused, not changed.
Import this in the helper process only: obstore hangs in a forked child whose parent has used it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

from sqlstream.config import StorageOptions
from sqlstream.errors import (
    AccessDeniedError,
    ConfigError,
    ObjectChangedError,
    ObjectNotFoundError,
    SqlStreamError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.backends.answers import BodyRange, check_part, exact
from sqlstream.storage.backends.coding import check_uncoded
from sqlstream.storage.backends.listing import PAGE, Level, behind, once, spread
from sqlstream.storage.base.credentials import without_credentials
from sqlstream.storage.base.protocols import ObjectInfo, RangeBytes, read_range
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.settings import SCHEMES, StoreSettings, has_region, store_settings
from sqlstream.storage.base.urls import redact, redact_text, scheme, spells_exactly

CHUNK_BYTES = 1 << 20  # one pwrite each; larger ones gained nothing (m), smaller ones cost a switch of threads each
_ACCEPTED = {"gs": "gzip"}
"""Codings that are asked for. Stored objects come as they are stored; GCS unfolds those that were stored as gzip, without a
length and without ranges, for clients that do not take gzip."""
_PART_BYTES = 8 << 20  # as s3transfer cuts its parts; twelve are under way at a time
_MAX_PARTS = 9_000  # S3 takes 10 000
_RANGE_IGNORED, _RANGE_BEYOND_END = 200, 416  # answers to `bytes=0-`; the second means an empty object
_RANGE_OF_NOTHING = '"bytes 0--1/0"'  # what Azurite says instead
_MAX_STORES = 64  # of buckets, each with its client and connections; a dataset reads from few at a time
_STATUS = re.compile(r"status code: (\d{3})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*([^\s,)]+)")
_CAUSE = re.compile(r'(?:error|message): "([^"]*)"')  # of a connection; what obstore says aloud is "error sending request"

ERRORS: dict[type[BaseException], type[SqlStreamError]] = {
    FileNotFoundError: ObjectNotFoundError,  # what NotFoundError is raised as
    obstore.exceptions.NotFoundError: ObjectNotFoundError,
    obstore.exceptions.PermissionDeniedError: AccessDeniedError,
    obstore.exceptions.UnauthenticatedError: AccessDeniedError,
    obstore.exceptions.PreconditionError: ObjectChangedError,
    obstore.exceptions.NotModifiedError: ObjectChangedError,
    obstore.exceptions.NotSupportedError: StorageError,
    obstore.exceptions.UnknownConfigurationKeyError: ConfigError,
    obstore.exceptions.InvalidPathError: StorageError,
    ValueError: StorageError,  # what InvalidPathError is raised as
    obstore.exceptions.AlreadyExistsError: StorageError,
    obstore.exceptions.JoinError: TransientStorageError,
    obstore.exceptions.GenericError: TransientStorageError,  # no status: connection, timeout, short body
    obstore.exceptions.BaseError: StorageError,
}
"""Every error of obstore and ours for it; those that carry an HTTP status go by the status instead."""

_SAID: dict[str, tuple[type[SqlStreamError], str]] = {
    "Content-Length Header missing": (StorageError, "the server does not say the length; storage_options backend='fsspec' can"),
    "redirect without LOCATION": (StorageError, "the bucket is in another region: set storage_options['region']"),
    "Unable to open service account file": (  # its name is not shown: as `token` it may be an access token
        ConfigError,
        "the file of its key cannot be opened: give its path as storage_options['token'] or ['service_account'] (or in "
        "GOOGLE_APPLICATION_CREDENTIALS), and an access token as ['bearer_token']",
    ),
    "Account must be specified": (
        ConfigError,
        "no storage account is named: set storage_options['account_name'] or AZURE_STORAGE_ACCOUNT_NAME, or write "
        "abfs://container@account.dfs…",
    ),
}
"""What obstore says without a status, and our error for it."""


def map_error(error: Exception, url: str) -> SqlStreamError:
    """Return our error for one of obstore's."""
    said, _, details = str(error).partition("\n\nDebug source")
    text = redact_text(said).strip()
    where = redact(url)
    if certificate := _CERTIFICATE.search(details):
        fact = certificate[1].split("(")[0]
        return StorageError(
            f"{where}: the server's certificate is not valid ({fact}): see storage_options['verify']", url=where
        )
    if cause := _CAUSE.search(details):
        text += f": {redact_text(cause[1])}"
    if status := _STATUS.search(text):
        detail = text[status.end() :].strip(" :")
        return error_for_status(int(status[1]), url, detail=detail)
    if "non-partial response" in text:
        return StorageError(f"{where}: the server ignores ranges", url=where, status=200)
    if "object with invalid path" in text:  # in a listing
        return StorageError(f"{where}: {text}. obstore cannot spell it: set storage_options['backend'] to 'fsspec'", url=where)
    for words, (kind, fact) in _SAID.items():
        if words in text:
            return kind(f"{where}: {fact}", url=where)
    kind = next(ours for theirs, ours in ERRORS.items() if isinstance(error, theirs))
    return kind(f"{where}: {text}", url=where)


def _info(root: str, meta: obstore.ObjectMeta) -> ObjectInfo:
    return _info_of(f"{root}{meta['path']}", meta)


def _info_of(url: str, meta: obstore.ObjectMeta) -> ObjectInfo:
    return ObjectInfo(url=url, size_bytes=meta["size"], etag=meta["e_tag"], last_modified=meta["last_modified"].isoformat())


def _is_unordered(prefix: str) -> bool:
    """Return whether objects may have another order than their names: in directory buckets, in accounts with folders.

    Rejected for these: obstore's `offset`, which leaves out what has a smaller name, wherever it would have come.
    """
    return SCHEMES[scheme(prefix)] == "az" or prefix.split("/")[2].endswith("--x-s3")


def _info_by_get(store: Any, key: str, url: str, refused: StorageError) -> ObjectInfo:
    """Return what a GET of one byte says of an object whose HEAD failed: only the answer to a GET has a body that says why.

    Raises:
        StorageError: That of the GET; that of the HEAD where the GET failed for its range.
    """
    try:
        with _mapped(url):
            return _info_of(url, obstore.get(store, key, options={"range": (0, 1)}).meta)
    except StorageError as error:
        if error.context.get("status") in (_RANGE_IGNORED, _RANGE_BEYOND_END):
            raise refused from error
        raise


class ObstoreStorage:
    """One store per bucket, account or host, made on first use; those used last are kept."""

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._stores: OrderedDict[tuple[str, str], Any] = OrderedDict()
        self._lock = threading.Lock()

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        store, key = self._locate(url)
        try:
            with _mapped(url):
                return _info_of(url, obstore.head(store, key))
        except TransientStorageError:
            raise
        except StorageError as refused:
            return _info_by_get(store, key, url, refused)

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> ObstoreStream:
        """Open the object, whole or a range.

        All of it is asked for as a range, too: the answer then says which bytes it holds, which obstore checks. Without one, it
        takes whatever comes for the whole. A server that ignores ranges costs a second request each time; remembering it was
        rejected, since one answer of a bad proxy would end the check for all that follow.
        """
        store, key = self._locate(url)
        options: obstore.GetOptions = {"range": {"offset": start} if stop is None else (start, stop)}
        if etag:
            options["if_match"] = etag
        is_whole = start == 0 and stop is None
        num_extra_requests = 0
        try:
            with _mapped(url):
                try:
                    result = obstore.get(store, key, options=options)
                except obstore.exceptions.BaseError as error:
                    status = map_error(error, url).context.get("status")
                    is_empty = status == _RANGE_BEYOND_END or _RANGE_OF_NOTHING in str(error)
                    if not (is_whole and (is_empty or status == _RANGE_IGNORED)):
                        raise
                    del options["range"]
                    num_extra_requests = 1
                    result = obstore.get(store, key, options=options)
                    if status == _RANGE_IGNORED:
                        check_uncoded(url, str(result.attributes.get("Content-Encoding", "")))
        except StorageError as error:
            error.context["num_extra_requests"] = num_extra_requests
            raise
        return ObstoreStream(url, result, start=start, stop=stop, num_extra_requests=num_extra_requests)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`."""
        return read_range(self, url, start, stop, etag)

    def put(self, url: str, path: Path) -> None:
        """Store a local file as an object; a large one in parts, which are an object once all are there.

        The signature covers each part's bytes. Rejected: `checksum_algorithm`, by which the store keeps a checksum beside the
        object: S3 itself answers BadDigest as parts are joined (apache/arrow-rs-object-store#709), others refuse the header.
        """
        store, key = self._locate(url)
        chunk_bytes = max(_PART_BYTES, -(-path.stat().st_size // _MAX_PARTS))
        with _mapped(url):
            obstore.put(store, key, path, chunk_size=chunk_bytes)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`, by name; folders are listed side by side."""
        if after and _is_unordered(prefix):
            yield from behind(prefix, after, spread(prefix, self._listed, self._level))
        else:
            yield from spread(prefix, self._listed, self._level, after=after)

    def _listed(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        yield from once(prefix, self._pages(prefix, after))

    def _pages(self, prefix: str, after: str) -> Iterator[Sequence[ObjectInfo]]:
        """Yield the pages of one listing.

        S3 that ends with a whole page is asked what follows: obstore takes an answer without a token for the last one, and one
        to ListObjects, the first version, has none, whatever follows.
        """
        store, key = self._locate(prefix, is_prefix=True)
        root = prefix.removesuffix(key)
        is_ordered = SCHEMES[scheme(prefix)] == "s3" and not _is_unordered(prefix)
        last: str | None = after.removeprefix(root) or None
        num_objects = PAGE
        with _mapped(prefix):
            while num_objects == PAGE:
                num_objects = 0
                for metas in obstore.list(store, prefix=key or None, offset=last, chunk_size=PAGE):
                    last, num_objects = metas[-1]["path"], len(metas) if is_ordered else 0
                    yield [_info(root, meta) for meta in metas]

    def _level(self, prefix: str) -> Level:
        store, key = self._locate(prefix, is_prefix=True)
        root = prefix.removesuffix(key)
        with _mapped(prefix):
            found = obstore.list_with_delimiter(store, prefix=key or None)
        return Level(
            objects=tuple(info for meta in found["objects"] if (info := _info(root, meta)).url.startswith(prefix)),
            folders=tuple(f"{root}{folder}/" for folder in found["common_prefixes"]),
        )

    def _locate(self, url: str, *, is_prefix: bool = False) -> tuple[Any, str]:
        """Return the store of a URL and its key there."""
        authority, _, key = url.partition("://")[2].partition("/")
        kind = scheme(url)
        if not spells_exactly(url.removesuffix("/") if is_prefix and key else url) and (key or not is_prefix):
            where = redact(url)
            raise StorageError(
                f"{where}: obstore cannot spell this name: set storage_options['backend'] to 'fsspec'", url=where
            )
        with self._lock:
            store = self._stores.get((kind, authority))
            if store is None:
                try:
                    with _mapped(url):
                        store = self._stores[kind, authority] = self._open(kind, authority)
                except TransientStorageError as error:  # nothing was asked yet: the options are at fault, and stay so
                    raise ConfigError(f"{error}: check storage_options", **error.context) from error
                while len(self._stores) > _MAX_STORES:
                    self._stores.popitem(last=False)  # its client ends with the last answer that is read from it
            self._stores.move_to_end((kind, authority))
        return store, key

    def _open(self, kind: str, authority: str) -> Any:
        settings = store_settings(kind, self._options.storage_options)
        config: Any = dict(settings.config)  # obstore checks the keys
        if not self._options.is_signed:  # what the environment, a profile or the machine's role offers does not count either
            config = {**without_credentials(config), "skip_signature": True}
        shared: dict[str, Any] = {"client_options": self._client(SCHEMES[kind], settings), "retry_config": {"max_retries": 0}}
        if SCHEMES[kind] == "s3":
            if not {"region", "default_region", "endpoint"} & config.keys() and not has_region():
                from sqlstream.storage.backends.http_pools import Pools, discover_region  # a quarter of a helper's start (m)

                config["region"] = discover_region(authority, Pools(self._options))
                config = {key: value for key, value in config.items() if value is not None}
            return obstore.store.S3Store(authority, config=config, **shared)
        if SCHEMES[kind] == "gs":
            return obstore.store.GCSStore(authority, config=config, **shared)
        container, _, host = authority.partition("@")  # abfs://container@account.dfs.core.windows.net/…
        if host:
            config.setdefault("account_name", host.partition(".")[0])
        return obstore.store.AzureStore(container, config=config, **shared)

    def _client(self, family: str, settings: StoreSettings) -> dict[str, object]:
        client = dict(settings.client)
        client["default_headers"] = {"Accept-Encoding": _ACCEPTED.get(family, "identity")}
        client["connect_timeout"] = f"{round(self._options.connect_timeout_seconds * 1000)}ms"
        client["read_timeout"] = f"{round(self._options.read_timeout_seconds * 1000)}ms"
        client["timeout"] = f"{round(self._options.total_timeout_seconds * 1000)}ms"  # its default is 30 s
        return client


class ObstoreStream:
    """An open answer of obstore."""

    def __init__(
        self, url: str, result: obstore.GetResult, *, start: int, stop: int | None, num_extra_requests: int = 0
    ) -> None:
        meta = result.meta
        self.info = _info_of(url, meta)
        self.start = result.range[0]
        self.num_extra_requests = num_extra_requests
        self._part = BodyRange(start=result.range[0], stop=result.range[1], total_bytes=meta["size"])
        check_part(url, self._part, start=start, stop=stop)
        self._url = url
        self._result: obstore.GetResult | None = result
        self._is_small = result.range[1] - result.range[0] <= CHUNK_BYTES

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order."""
        yield from exact(self._url, self._received(), self._part)

    def _received(self) -> Iterator[memoryview]:
        assert self._result is not None, "chunks() may be called once"
        result, self._result = self._result, None
        with _mapped(self._url):
            if self._is_small:  # in one piece: half the switches to obstore's own threads
                yield memoryview(result.bytes())
                return
            for chunk in result.stream(CHUNK_BYTES):
                yield memoryview(chunk)

    def close(self) -> None:
        """Drop the answer; obstore closes the connection with it."""
        self._result = None


class _mapped:  # noqa: N801 - reads as a statement
    """Raises our error in place of obstore's."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if type(error).__name__ == "PanicException":  # of pyo3, which no module has: obstore cannot put such a URL together
            where = redact(self._url)
            raise StorageError(
                f"{where}: obstore makes no request of it: check its bucket, and the endpoint", url=where
            ) from error
        if isinstance(error, tuple(ERRORS)) and not isinstance(error, SqlStreamError) and isinstance(error, Exception):
            raise map_error(error, self._url) from error
