"""The MD5 that an ETag may be, and the hash that names what a command prints. Pure."""

from __future__ import annotations

import hashlib
import re

_MD5_ETAG = re.compile(r'"?([0-9a-f]{32})"?')  # a multipart upload's has "-<parts>" behind it, a weak one W/ before


def new_digest() -> hashlib.blake2b:
    """Return what makes the hash of the output of a command: longer than an MD5, for which it would be taken as an ETag."""
    return hashlib.blake2b(digest_size=20)


def is_content_hash(etag: str | None) -> bool:
    """Return whether an ETag has the form of a hash of the content: an MD5, or that of MD5s that S3 makes of parts.

    Example:
        >>> is_content_hash('"900150983cd24fb0d6963f7d28e17f72-3"'), is_content_hash('"v1"'), is_content_hash(None)
        (True, False, False)
    """
    return re.fullmatch(r'"?[0-9a-f]{32}(-\d+)?"?', etag or "") is not None


def md5_of(etag: str | None) -> str | None:
    """Return the MD5 that an ETag is, in hexadecimal (S3 and GCS: of an object uploaded in one part); None if it is none.

    Example:
        >>> md5_of('"900150983cd24fb0d6963f7d28e17f72"'), md5_of('W/"900150983cd24fb0d6963f7d28e17f72"')
        ('900150983cd24fb0d6963f7d28e17f72', None)
    """
    match = _MD5_ETAG.fullmatch(etag or "")
    return match[1] if match else None
