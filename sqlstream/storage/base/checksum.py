"""The MD5 that an ETag may be, and that of the bytes so far. Pure."""

from __future__ import annotations

import hashlib
import re

_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')  # a multipart upload's has "-<parts>" behind it, a weak one W/ before


def is_content_hash(etag: str | None) -> bool:
    """Return whether an ETag has the form of a hash of the content: an MD5, or that of MD5s that S3 makes of parts.

    Example:
        >>> is_content_hash('"900150983cd24fb0d6963f7d28e17f72-3"'), is_content_hash('"v1"'), is_content_hash(None)
        (True, False, False)
    """
    return re.fullmatch(r'"?[0-9a-f]{32}(-\d+)?"?', etag or "") is not None


class EtagDigest:
    """The MD5 that was expected, and that of the bytes so far; both in hexadecimal."""

    def __init__(self, expected: str) -> None:
        self.expected = expected
        self._md5 = hashlib.md5(usedforsecurity=False)

    @classmethod
    def of(cls, etag: str | None) -> EtagDigest | None:
        """Return the digest that an ETag is (S3 and GCS: of an object uploaded in one part); None if it is none.

        Example:
            >>> digest = EtagDigest.of('"900150983cd24fb0d6963f7d28e17f72"')
            >>> digest.update(b"abc")
            >>> digest.found == digest.expected
            True
        """
        match = _MD5_ETAG.fullmatch(etag or "")
        return cls(match[1]) if match else None

    def update(self, data: bytes | memoryview) -> None:
        """Count the next bytes in."""
        self._md5.update(data)

    @property
    def found(self) -> str:
        """MD5 of the bytes so far."""
        return self._md5.hexdigest()
