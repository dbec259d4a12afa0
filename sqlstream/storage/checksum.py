"""Checksums of what was downloaded, checked while it is written. Pure but for the optional crc32c package."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from typing import Any

from sqlstream.errors import ConfigError, MissingDependencyError

_SIZES = {"md5": 16, "sha1": 20, "sha256": 32, "crc32c": 4}  # bytes of a digest
_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')  # a multipart upload's has "-<parts>" behind it, a weak one W/ before


class Checksum:
    """One expected digest, and the digest of the bytes so far.

    Args:
        expected: `"<algorithm>:<digest>"` with md5, sha1, sha256 or crc32c; the digest in hexadecimal or base64.

    Raises:
        ConfigError: Another algorithm, or no digest of its length.
        MissingDependencyError: crc32c without the package `google-crc32c`.

    Example:
        >>> checksum = Checksum("md5:900150983cd24fb0d6963f7d28e17f72")
        >>> checksum.update(b"abc")
        >>> checksum.is_right
        True
    """

    def __init__(self, expected: str) -> None:
        self.algorithm, _, digest = expected.partition(":")
        self.algorithm = self.algorithm.lower()
        if self.algorithm not in _SIZES:
            raise ConfigError(f"hash {expected!r} has no known algorithm: give '<algorithm>:<digest>' with {', '.join(_SIZES)}")
        self.expected = _digest_bytes(digest, _SIZES[self.algorithm])
        if self.expected is None:
            raise ConfigError(f"hash {expected!r} is no {self.algorithm} digest in hexadecimal or base64")
        self.restart()

    def restart(self) -> None:
        """Forget what came: the object is read from its start again."""
        if self.algorithm == "crc32c":
            try:
                import google_crc32c
            except ImportError as error:
                raise MissingDependencyError("crc32c needs a package: pip install google-crc32c") from error
            self._state: Any = google_crc32c.Checksum()  # type: ignore[no-untyped-call]  # not typed
        else:
            self._state = hashlib.new(self.algorithm, usedforsecurity=False)

    def update(self, data: bytes | memoryview) -> None:
        """Count the next bytes in."""
        self._state.update(bytes(data) if self.algorithm == "crc32c" else data)

    @property
    def digest(self) -> bytes:
        """Digest of the bytes so far."""
        found: bytes = self._state.digest()
        return found

    @property
    def is_right(self) -> bool:
        """Whether the bytes so far have the digest that was expected."""
        return self.digest == self.expected


def from_etag(etag: str | None) -> Checksum | None:
    """Return the checksum that an ETag is (S3 and GCS: the MD5 of an object uploaded in one part); None if it is none."""
    match = _MD5_ETAG.fullmatch(etag or "")
    return Checksum(f"md5:{match[1]}") if match else None


def _digest_bytes(text: str, num_bytes: int) -> bytes | None:
    try:
        return bytes.fromhex(text) if len(text) == 2 * num_bytes else _checked(base64.b64decode(text, validate=True), num_bytes)
    except (ValueError, binascii.Error):
        return None


def _checked(digest: bytes, num_bytes: int) -> bytes | None:
    return digest if len(digest) == num_bytes else None
