"""Identity of an object, and what it costs on disk. Pure.

Names from an index never become local paths: a file's name is the hash of the object's identity.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from sqlstream.storage import urls

KEY_BYTES = 16
_KEY = struct.Struct(f"{KEY_BYTES}s")
MADE_EXTENSION = ".sample.safetensors"
"""Of files that hold a stored sample; extensions of URLs have one part, so a file's name tells what it is."""
BLOCK_BYTES = 4096
"""Unit of the account: the block of every file system in use; a smaller one would count too little."""
_CREDENTIALS = frozenset(
    # Query parameters of signed URLs (S3 v2 and v4, GCS v2 and v4, Azure SAS): another signature is the same object.
    "x-amz-algorithm x-amz-credential x-amz-date x-amz-expires x-amz-signature x-amz-signedheaders x-amz-security-token "
    "x-goog-algorithm x-goog-credential x-goog-date x-goog-expires x-goog-signature x-goog-signedheaders "
    "awsaccesskeyid googleaccessid signature expires sv sr sig se sp st spr skoid sktid skt ske sks skv".split()
)


def object_key(url: str, version: str = "") -> bytes:
    """Return the 16 bytes that name an object.

    Args:
        url: Where it is; credentials and signatures in it do not count.
        version: An etag that the index pins, else empty: learned etags go to the row, not into the key.
    """
    return hashlib.blake2b(f"{without_credentials(url)}\0{version}".encode(), digest_size=KEY_BYTES).digest()


def without_credentials(url: str) -> str:
    """Return `url` without user, password and signature parameters."""
    if "@" not in url and "?" not in url:
        return url
    parts = urlsplit(url)
    query = parts.query
    if query:
        pairs = parse_qsl(query, keep_blank_values=True)
        kept = [(name, value) for name, value in pairs if name.lower() not in _CREDENTIALS]
        query = query if len(kept) == len(pairs) else urlencode(kept)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, query, ""))


def charged_bytes(size_bytes: int) -> int:
    """Return what a file of `size_bytes` counts against the limit: whole blocks.

    Example:
        >>> charged_bytes(1), charged_bytes(4096), charged_bytes(4097)
        (4096, 4096, 8192)
    """
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def split_keys(body: bytes) -> list[bytes]:
    """Return the keys that were joined to `body`; the rest of one that was cut off is none."""
    return [key for (key,) in _KEY.iter_unpack(body[: len(body) // KEY_BYTES * KEY_BYTES])]


@dataclass(slots=True, unsafe_hash=True, kw_only=True)
class ObjectRef:
    """An object as an acquirer names it. Never changed once it is made; a frozen one takes four times as long to make."""

    url: str
    """Where it is, as the client needs it: it may carry a signature, and is never stored like that."""
    key: bytes
    ext: str
    size_bytes: int | None = None
    """Its size if the index knows it."""
    etag: str | None = None
    """The version that the index pins."""
    dataset: int | None = None
    span: tuple[int, int] | None = None
    """Which bytes of the object it is, half open; None: all."""
    must_be_here: bool = False
    """It was made on this node and cannot be fetched: a hold on it is void if it is not in the cache."""
    next_use: int | None = field(default=None, compare=False)
    """After how many further uses of this cache, counted from this one, it is used again; None: not known."""

    @classmethod
    def of(cls, url: str, *, size_bytes: int | None = None, etag: str | None = None, dataset: int | None = None) -> ObjectRef:
        """Return the reference of the object at `url`."""
        key = object_key(url, etag or "")
        return cls(url=url, key=key, ext=urls.extension(url), size_bytes=size_bytes, etag=etag, dataset=dataset)

    @classmethod
    def part_of(cls, url: str, span: tuple[int, int], *, etag: str | None = None, dataset: int | None = None) -> ObjectRef:
        """Return the reference of the bytes `[start, stop)` of the object at `url`, an entry of their own."""
        key = object_key(url, f"{etag or ''}\0{span[0]}-{span[1]}")
        size_bytes = span[1] - span[0]
        return cls(url=url, key=key, ext=urls.extension(url), size_bytes=size_bytes, etag=etag, dataset=dataset, span=span)
