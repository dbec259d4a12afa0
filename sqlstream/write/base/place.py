"""Where a dataset goes: a directory, a URL, or both."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sqlstream.errors import ConfigError
from sqlstream.storage.base import urls
from sqlstream.storage.base.settings import SCHEMES
from sqlstream.write.base.options import Out


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputPlace:
    """A directory, a URL, or both."""

    local: Path | None
    """Where files stay; None: they go to `remote` alone."""
    remote: str | None
    """URL of the directory, with '/' at its end."""

    def __str__(self) -> str:
        """Return what messages call it, without credentials."""
        return urls.redact(self.remote) if self.remote is not None else str(self.local)

    def part(self, name: str) -> OutputPlace:
        """Return the directory of that name below it; an empty name: itself."""
        if not name:
            return self
        return OutputPlace(
            local=None if self.local is None else self.local / name,
            remote=None if self.remote is None else f"{self.remote}{name}/",
        )


def place_of(out: Out) -> OutputPlace:
    """Return where a dataset goes.

    Raises:
        ConfigError: It is no directory, no URL that can be written to, and no pair of them.
    """
    if isinstance(out, tuple):
        if len(out) != 2:
            raise ConfigError(f"out={out!r} has {len(out)} places: give a directory, a URL, or (directory, URL)")
        local, remote = place_of(out[0]), place_of(out[1])
        if local.local is None:
            raise ConfigError(f"out: {local} is no local directory: give (directory, URL)")
        return OutputPlace(local=local.local, remote=remote.remote or f"{remote.local}/")
    if not isinstance(out, str | os.PathLike) or not os.fspath(out):
        raise ConfigError(f"out={out!r} is no place: give a directory, a URL, or (directory, URL)")
    text = os.fspath(out)
    if "\0" in text:
        raise ConfigError(f"out={text!r} has a NUL in it: give another place")
    if not urls.is_remote(text):
        return OutputPlace(local=Path(os.path.expanduser(urls.local_path(text))).absolute(), remote=None)
    if SCHEMES.get(urls.scheme(text)) == "http":
        raise ConfigError(
            f"out={urls.redact(text)} can only be read: give an object store (s3://, gs://, az://) or a directory"
        )
    return OutputPlace(local=None, remote=text.rstrip("/") + "/")
