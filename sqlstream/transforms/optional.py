"""Optional packages: imported when they are needed, and one clear error that names the extra when they are not there."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from sqlstream.errors import MissingDependencyError

_FAILURES = (ImportError, OSError, RuntimeError)
"""What an import of a package with native parts raises when its libraries are missing: torchaudio OSError, torchcodec
RuntimeError."""


@functools.cache
def _attempt(module: str) -> tuple[Any, str]:
    try:
        return importlib.import_module(module), ""
    except _FAILURES as error:
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


PILLOW = ("PIL.Image", *(f"PIL.{name}ImagePlugin" for name in ("Bmp", "Gif", "Jpeg", "Ppm", "Png", "WebP", "Avif", "Tiff")))
"""Pillow with what opens the usual formats: it brings the first five with the first image of a process, and with the first
one of another format all of some forty, which takes 0.2 s."""


def import_ahead(*modules: str) -> None:
    """Import what is there of optional modules where a transform is made: forked workers would, each in each epoch."""
    for module in modules:
        find(module)


def find(module: str) -> Any | None:
    """Return an optional module, or None if it cannot be imported here; the answer is remembered."""
    return _attempt(module)[0]


def require(module: str, extra: str, purpose: str) -> Any:
    """Return an optional module.

    Args:
        module: Its import name.
        extra: The extra of sqlstream that installs it.
        purpose: What it is needed for, e.g. `to decode images`.

    Raises:
        MissingDependencyError: It cannot be imported; the message has the command that installs it.
    """
    found, reason = _attempt(module)
    if found is None:
        raise MissingDependencyError(
            f"{module.partition('.')[0]} is needed {purpose} and does not import ({reason}): "
            f"pip install 'sqlstream-data[{extra}]'",
            module=module,
            extra=extra,
        )
    return found
