"""How sources are reached: local files in place, remote ones through the helper process, errors with the source's name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SourceChangedError, StorageError
from sqlstream.index.models import SourceFile
from sqlstream.storage import urls
from sqlstream.storage.base import RemoteReader


@contextlib.contextmanager
def named_errors(src: str) -> Iterator[None]:
    """Say which source it was, and the cure, in what storage or the disk raises."""
    name = urls.redact(src)
    try:
        yield
    except (ObjectNotFoundError, FileNotFoundError, NotADirectoryError) as error:
        raise ObjectNotFoundError(
            f"the source {name} does not exist ({error}): check src and the spelling", url=name
        ) from error
    except (AccessDeniedError, PermissionError) as error:
        raise AccessDeniedError(
            f"the source {name} may not be read ({error}): check its permissions, or the credentials in storage_options",
            url=name,
        ) from error
    except StorageError as error:
        raise type(error)(f"the source {name} cannot be read: {error}", **{**error.context, "url": name}) from error


def local_file(path: Path) -> SourceFile:
    """Return a local file with its version."""
    status = path.stat()
    return SourceFile(url=str(path), size_bytes=status.st_size, etag=str(status.st_mtime_ns))


def stat_file(url: str, remote: RemoteReader) -> SourceFile:
    """Return one file, local or remote, with its version."""
    with named_errors(url):
        if not urls.is_remote(url):
            path = urls.local_path(url).absolute()
            os.close(os.open(path, os.O_RDONLY))  # a file that may not be read is refused here, by name
            return local_file(path)
        info = remote.head(url)
        return SourceFile(url=url, size_bytes=info.size_bytes, etag=info.etag)


@contextlib.contextmanager
def local_copy(file: SourceFile, temporary: Path, remote: RemoteReader) -> Iterator[Path]:
    """Yield a local path with the content of `file`: itself if it is local, else a download that is removed afterwards.

    Raises:
        SourceChangedError: It is not the version that was found before.
    """
    if not urls.is_remote(file.url):
        yield Path(file.url)
        with named_errors(file.url):
            _check_same(file, local_file(Path(file.url)))
        return
    try:
        with named_errors(file.url):
            info = remote.download(file.url, temporary)
        _check_same(file, SourceFile(url=file.url, size_bytes=info.size_bytes, etag=info.etag))
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _check_same(before: SourceFile, now: SourceFile) -> None:
    for was, is_now in ((before.etag, now.etag), (before.size_bytes, now.size_bytes)):
        if None not in (was, is_now) and was != is_now:
            raise SourceChangedError(
                f"{urls.redact(before.url)} changed while it was indexed ({was} is now {is_now}): "
                "wait until its writer is done, and start again"
            )
