"""Identity of an object, and what it costs on disk. Pure.

Names from an index never become local paths: a file's name is the hash of the object's identity.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.identity import Identity, object_name
from sqlstream.storage.base.protocols import Unpack

KEY_BYTES = 16
_KEY = struct.Struct(f"{KEY_BYTES}s")
STORED_SAMPLE_EXTENSION = ".sample.safetensors"
"""Of files that hold a stored sample; extensions of URLs have one part, so a file's name tells what it is."""
BLOCK_BYTES = 4096
"""Least unit of the account: the block of most file systems; those of larger clusters show theirs (`files.layout`)."""


def object_key(url: str, version: str = "", prefix: str = "") -> bytes:
    """Return the 16 bytes that name an object.

    Args:
        url: Where it is; a signature in it does not count (`storage.base.identity`).
        version: An etag that the index pins, else empty: learned etags go to the row, not into the key.
        prefix: What options, environment and profile add (`Identity.prefix`).
    """
    name = url if "@" not in url and "?" not in url else object_name(url)
    return blake2b(f"{prefix}{name}\0{version}".encode(), digest_size=KEY_BYTES).digest()


def charged_bytes(size_bytes: int, unit_bytes: int = BLOCK_BYTES) -> int:
    """Return what a file of `size_bytes` counts against the limit: whole units of its file system.

    Example:
        >>> charged_bytes(1), charged_bytes(4096), charged_bytes(4097), charged_bytes(1, 65536)
        (4096, 4096, 8192, 65536)
    """
    return -(-size_bytes // unit_bytes) * unit_bytes


def split_keys(body: bytes) -> list[bytes]:
    """Return the keys that were joined to `body`; the rest of one that was cut off is none."""
    return [key for (key,) in _KEY.iter_unpack(body[: len(body) // KEY_BYTES * KEY_BYTES])]


class ListedObject(NamedTuple):
    """What a listing says of an object."""

    size_bytes: int | None
    etag: str | None


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
    """The version that the index pins, or that its listing named."""
    is_listed: bool = False
    """Size and version are those of a listing: the key does not hold them, and an entry of another version is not it."""
    dataset: int | None = None
    span: tuple[int, int] | None = None
    """Which bytes of the object it is, half open; None: all."""
    whole_bytes: int | None = field(default=None, compare=False)
    """Size of the object at `url` that `span` is a part of, or that is unpacked, if the index knows it."""
    unpack: Unpack | None = field(default=None, compare=False)
    """How its content is made of what is stored at `url`; None: that is the content."""
    is_stored_sample: bool = False
    """It was made on this node and cannot be fetched: a hold on it is void if it is not in the cache."""
    access: Access = field(default=OWN, compare=False)
    """On whose word it is read, if it must be fetched."""

    @classmethod
    def of(
        cls,
        url: str,
        *,
        size_bytes: int | None = None,
        etag: str | None = None,
        listed: ListedObject | None = None,
        dataset: int | None = None,
        identity: Identity | None = None,
        access: Access = OWN,
    ) -> ObjectRef:
        """Return the reference of the object at `url`, read with what `identity` says; None: with nothing but defaults."""
        if access is not OWN and identity is not None:
            identity = identity.with_access(access)
        prefix = "" if identity is None or url.startswith(identity.plain) else identity.prefix(url)
        name = url if "@" not in url and "?" not in url else object_name(url)  # `object_key`, without its call: for each object
        key = blake2b(f"{prefix}{name}\0{etag or ''}".encode(), digest_size=KEY_BYTES).digest()
        ext = urls.extension(url)
        if listed is not None:
            size_bytes, etag = listed
            return cls(
                url=url, key=key, ext=ext, size_bytes=size_bytes, etag=etag, dataset=dataset, is_listed=True, access=access
            )
        return cls(url=url, key=key, ext=ext, size_bytes=size_bytes, etag=etag, dataset=dataset, access=access)

    @classmethod
    def part_of(
        cls,
        url: str,
        span: tuple[int, int],
        whole_bytes: int | None = None,
        *,
        etag: str | None = None,
        version: str | None = None,
        dataset: int | None = None,
        identity: Identity | None = None,
        access: Access = OWN,
    ) -> ObjectRef:
        """Return the reference of the bytes `[start, stop)` of the object at `url`, an entry of their own.

        Args:
            url: Which object.
            span: Which bytes of it.
            whole_bytes: Size that the object must have; None: any.
            etag: The version that a server must give.
            version: What tells its bytes from those of another version; None: `etag`.
            dataset: Id of the dataset in the ledger.
            identity: What else than its URL identifies it; None: nothing.
            access: On whose word it is read.
        """
        if identity is not None:
            identity = identity.with_access(access)
        key = object_key(
            url,
            f"{etag or '' if version is None else version}\0{span[0]}-{span[1]}",
            "" if identity is None else identity.prefix(url),
        )
        size_bytes, ext = span[1] - span[0], urls.extension(url)
        return cls(
            url=url,
            key=key,
            ext=ext,
            size_bytes=size_bytes,
            etag=etag,
            dataset=dataset,
            span=span,
            whole_bytes=whole_bytes,
            access=access,
        )

    @classmethod
    def unpacked(
        cls,
        url: str,
        unpack: Unpack,
        whole_bytes: int | None = None,
        *,
        etag: str | None = None,
        version: str | None = None,
        dataset: int | None = None,
        identity: Identity | None = None,
        access: Access = OWN,
    ) -> ObjectRef:
        """Return the reference of the content of the object at `url`, which is stored compressed; see `part_of`.

        Args:
            url: Which object.
            unpack: How its content is made.
            whole_bytes: Size of what is stored; None: any.
            etag: The version that a server must give.
            version: What tells it from another version; None: `etag`.
            dataset: Id of the dataset in the ledger.
            identity: What else than its URL identifies it; None: nothing.
            access: On whose word it is read.
        """
        if identity is not None:
            identity = identity.with_access(access)
        told = f"{etag or '' if version is None else version}\0unpacked {unpack.compression}"
        return cls(
            url=url,
            key=object_key(url, told, "" if identity is None else identity.prefix(url)),
            ext=urls.extension(url),
            size_bytes=unpack.raw_bytes,
            etag=etag,
            dataset=dataset,
            whole_bytes=whole_bytes,
            unpack=unpack,
            access=access,
        )
