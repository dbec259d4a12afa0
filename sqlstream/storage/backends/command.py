"""Commands as objects: what another program prints, for sources that are spelled `pipe:…`."""

from __future__ import annotations

import re
import shlex
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from sqlstream.config import StorageOptions
from sqlstream.errors import ConfigError, StorageError
from sqlstream.process.programs import Program
from sqlstream.storage.base.checksum import new_digest
from sqlstream.storage.base.protocols import ObjectInfo, RangeBytes
from sqlstream.storage.base.urls import COMMAND, redact, redact_text

MAX_COMMANDS = 16
"""Commands that run at a time in a helper process, each perhaps a pipeline of several programs. Arbitrary."""
_QUOTED = re.compile(r"""'[^']*'|"[^"$`\\]*\"""")
"""What a shell takes as it stands."""
_OF_A_SHELL = re.compile(r"""[$`*?\[\]~#!{}()<>|&;\n\\'"]""")
_WAIT_SECONDS = 0.5


def words_of(command: str) -> list[str] | None:
    """Return the words of a command that needs no shell; None: it is more than one program, or a shell replaces some of it.

    Example:
        >>> words_of("zstd -dcq 'a b.tar.zst'"), words_of("cat x.tar | head"), words_of("LANG=C cat x.tar")
        (['zstd', '-dcq', 'a b.tar.zst'], None, None)
    """
    if _OF_A_SHELL.search(_QUOTED.sub("_", command)):
        return None
    words = shlex.split(command)
    return None if "=" in words[0] else words


class CommandStorage:
    """What commands print, as a backend: whole, once for each time that it is asked for.

    Args:
        options: How long a command may be silent, and take.
    """

    _running = threading.BoundedSemaphore(MAX_COMMANDS)

    def __init__(self, options: StorageOptions) -> None:
        self._options = options

    def head(self, url: str) -> ObjectInfo:
        """Return what is known of an object whose command is not run."""
        return ObjectInfo(url=url, size_bytes=None, etag=None)

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> CommandStream:
        """Open the output of a command, which is run as it is read; its version is known at its end."""
        del etag
        if start or stop is not None:
            raise StorageError(
                f"{redact(url)} prints a whole object, and a part of it is asked for", url=redact(url), status=501
            )
        return CommandStream(url, self._options, self._running)

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Raise: there are no parts."""
        del start, stop, etag
        raise StorageError(f"{redact(url)} prints a whole object, and a part of it is asked for", url=redact(url), status=501)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Raise: a command prints one object."""
        del after
        raise ConfigError(f"{redact(prefix)} is a command, which prints one object: name a command for each shard")


class CommandStream:
    """What a command prints, from its start to its end; a command that fails at any time raises."""

    start = 0
    num_extra_requests = 0

    def __init__(self, url: str, options: StorageOptions, running: threading.BoundedSemaphore) -> None:
        self.info = ObjectInfo(url=url, size_bytes=None, etag=None)
        """Size, and a hash of the content as its version, once it is read to its end."""
        self._options, self._running = options, running
        self._program: Program | None = None

    def chunks(self) -> Iterator[memoryview]:
        """Yield the output; empty chunks while nothing comes, so that who waits may give up.

        Raises:
            StorageError: The command is not there, fails, is killed, is silent for too long, or prints nothing.
        """
        while not self._running.acquire(timeout=_WAIT_SECONDS):
            yield memoryview(b"")
        try:
            self._program = self._started()
            digest, num_bytes = new_digest(), 0
            with self._named_timeouts():
                for piece in self._program.output(self._options.read_timeout_seconds, self._options.total_timeout_seconds):
                    digest.update(piece)
                    num_bytes += len(piece)
                    yield memoryview(piece)
            failure = self._program.failure
            if failure or not num_bytes:
                raise self._error(failure or "printed nothing")
            self.info = replace(self.info, size_bytes=num_bytes, etag=digest.hexdigest())
        finally:
            self.close()
            self._running.release()

    def close(self) -> None:
        """End the command, and all that it started."""
        if self._program is not None:
            self._program.end()

    def _started(self) -> Program:
        command = self.info.url.removeprefix(COMMAND)
        words = words_of(command)
        is_program = words is not None and shutil.which(words[0]) is not None  # else a shell may have it, or says what is wrong
        try:
            return Program(words if words is not None and is_program else ["/bin/sh", "-c", command])
        except OSError as error:
            where = redact(self.info.url)
            raise StorageError(
                f"{where}: the command cannot be run: {error.strerror}: see ulimit -u and -n, and its file", url=where
            ) from error

    @contextmanager
    def _named_timeouts(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            cure = "storage_options['read_timeout'] bounds silence, ['timeout'] the whole"
            raise self._error(f"{error}, and was ended ({cure})") from error

    def _error(self, what: str) -> StorageError:
        where = redact(self.info.url)
        assert self._program is not None
        said = redact_text(self._program.said.decode(errors="replace").strip())
        return StorageError(f"{where}: the command {what}; it said: {said or 'nothing'}", url=where)
