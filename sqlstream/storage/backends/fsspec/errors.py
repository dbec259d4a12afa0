"""Errors of fsspec's file systems, and ours for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from sqlstream.errors import (
    AccessDeniedError,
    ConfigError,
    MissingDependencyError,
    ObjectNotFoundError,
    SqlStreamError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.base.retry import error_for_status
from sqlstream.storage.base.service_errors import read_error
from sqlstream.storage.base.urls import redact, redact_text, scheme

_PACKAGES = {
    **dict.fromkeys(("s3", "s3a"), "'sqlstream-data[s3]'"),
    **dict.fromkeys(("gs", "gcs"), "'sqlstream-data[gcs]'"),
    **dict.fromkeys(("az", "abfs", "abfss"), "adlfs"),
    "hf": "huggingface_hub",
    "sftp": "paramiko",
}
"""What pip installs for a scheme, where it is more than fsspec."""

ERRORS: dict[str, type[SqlStreamError]] = {
    "builtins.FileNotFoundError": ObjectNotFoundError,
    "builtins.IsADirectoryError": ObjectNotFoundError,
    "builtins.NotADirectoryError": ObjectNotFoundError,
    "builtins.PermissionError": AccessDeniedError,
    "botocore.exceptions.NoCredentialsError": AccessDeniedError,
    "botocore.exceptions.PartialCredentialsError": AccessDeniedError,
    "botocore.exceptions.ProfileNotFound": ConfigError,
    "builtins.TimeoutError": TransientStorageError,  # asyncio's and fsspec's too
    "builtins.ConnectionError": TransientStorageError,
    "builtins.EOFError": TransientStorageError,  # asyncio.IncompleteReadError
    "socket.gaierror": TransientStorageError,
    "aiohttp.client_exceptions.ClientSSLError": StorageError,
    "aiohttp.client_exceptions.InvalidURL": StorageError,
    "aiohttp.client_exceptions.ClientError": TransientStorageError,
    "botocore.exceptions.SSLError": StorageError,
    "botocore.exceptions.HTTPClientError": TransientStorageError,
    "botocore.exceptions.IncompleteReadError": TransientStorageError,
    "botocore.exceptions.ResponseStreamingError": TransientStorageError,
    "gcsfs.retry.ChecksumError": TransientStorageError,
    "ftplib.error_temp": TransientStorageError,
    "paramiko.ssh_exception.AuthenticationException": AccessDeniedError,
    "paramiko.ssh_exception.BadHostKeyException": StorageError,
    "paramiko.ssh_exception.NoValidConnectionsError": TransientStorageError,
    "paramiko.ssh_exception.SSHException": TransientStorageError,
    "fsspec.exceptions.BlocksizeMismatchError": StorageError,
    "builtins.ImportError": MissingDependencyError,
    "builtins.TypeError": ConfigError,  # an option that the file system's constructor does not know
    "builtins.Exception": StorageError,
}
"""Every error that we know and ours for it, by name, since the packages may be missing; the nearest base class holds."""


def map_error(error: Exception, url: str) -> SqlStreamError:
    """Return our error for one of a file system's, from its HTTP status if it or its cause has one."""
    where = redact(url)
    cause: BaseException | None = error
    while cause is not None:
        is_of_client = type(cause).__module__ == "aiohttp.http_exceptions"  # its own 400 for what it cannot read, or is cut
        if not is_of_client and (status := _status_of(cause)) is not None and status >= 300:
            said = cause if read_error(str(cause)) else error  # s3fs keeps the message alone
            return error_for_status(status, url, detail=redact_text(str(said)))
        cause = cause.__cause__
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__]
    ours = next(ERRORS[name] for name in names if name in ERRORS)
    if ours is StorageError and isinstance(error, OSError) and error.errno is None:  # of a client: "Socket is closed"
        ours = TransientStorageError
    if ours is MissingDependencyError:
        package = _PACKAGES.get(scheme(url))
        cure = f"pip install {package}" if package else "install the package that it names"
        return MissingDependencyError(f"{where}: {error}: {cure}", url=where)
    text = redact_text(str(error)) or type(error).__name__
    if isinstance(error, FileNotFoundError):  # of gcsfs the text is a path of its own requests, and no more
        return ours(f"{where} does not exist ({text}): check the URL", url=where)
    return ours(f"{where}: {text}", url=where)


def _status_of(error: BaseException) -> int | None:
    """Return the HTTP status in an error of botocore (`response`), aiohttp (`status`) or gcsfs (`code`)."""
    response = getattr(error, "response", None)
    metadata = response.get("ResponseMetadata", {}) if isinstance(response, Mapping) else {}
    for status in (metadata.get("HTTPStatusCode"), getattr(error, "status", None), getattr(error, "code", None)):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


@contextmanager
def mapped(url: str) -> Iterator[None]:
    """Raise our error in place of a file system's."""
    try:
        yield
    except SqlStreamError:
        raise
    except Exception as error:
        raise map_error(error, url) from error
