"""What users import from `streaming.base.hashing`."""

from __future__ import annotations

import hashlib

from sqlstream.errors import ConfigError, MissingDependencyError
from sqlstream.write.formats.whole_files import XXHASHES, digest_of

__all__ = ["get_hash", "get_hashes", "is_hash"]


def get_hashes() -> set[str]:
    """Return the names of all algorithms."""
    return {name for name in (*hashlib.algorithms_available, *XXHASHES) if is_hash(name)}


def is_hash(algo: str) -> bool:
    """Return whether an algorithm is known here."""
    try:
        digest_of(algo)
    except (ConfigError, MissingDependencyError):
        return False
    return True


def get_hash(algo: str, data: bytes) -> str:
    """Return the digest of some bytes, in hexadecimal.

    Raises:
        ConfigError: The algorithm is not known.
        MissingDependencyError: It needs xxhash, which is not installed.
    """
    digest = digest_of(algo)
    digest.update(data)
    found: str = digest.hexdigest()
    return found
