"""Identity of an object, and what it costs on disk. Pure.

Names from an index never become local paths: a file's name is the hash of the object's identity.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from sqlstream.errors import StorageError
from sqlstream.storage.base import urls
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.identity import Identity, object_name
from sqlstream.storage.base.protocols import Unpack, ZipRecord

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


Span: TypeAlias = tuple[int, int]
"""Bytes of an object, half open."""


class ListedObject(NamedTuple):
    """What a listing says of an object."""

    size_bytes: int | None
    etag: str | None


class ObjectRef(NamedTuple):
    """An object as an acquirer names it."""

    url: str
    """Where it is, as the client needs it: it may carry a signature, and is never stored like that."""
    key: bytes
    ext: str
    size_bytes: int | None = None
    """Its size if the index knows it."""
    etag: str | None = None
    """The version that the index pins, or that its listing named."""
    is_listed: bool = False
    """Size and version are those of a listing, or of what a command printed: the key does not hold them, and an entry of
    another version is not it."""
    dataset: int | None = None
    access: Access = OWN
    """On whose word it is read, if it must be fetched."""
    span: Span | None = None
    """Which bytes of the object it is; None: all."""
    whole_bytes: int | None = None
    """Size of the object at `url` that `span` is a part of, or that is unpacked, if the index knows it."""
    unpack: Unpack | ZipRecord | None = None
    """How its content is made of what is stored at `url`; None: that is the content."""
    shard: ObjectParts | None = None
    """What it is a member of, or the whole of; None: it has no members."""
    members: tuple[Span, ...] = ()
    """Of a whole shard, the members that are wanted of it: they take its place where it cannot be had."""
    is_stored_sample: bool = False
    """It was made on this node and cannot be fetched: a hold on it is void if it is not in the cache."""

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
        """Return the reference of the object at `url`, read with what `identity` says; None: with nothing but defaults.

        Raises:
            StorageError: The URL is no text of UTF-8.
        """
        if access is not OWN and identity is not None:
            identity = identity.with_access(access)
        prefix = "" if identity is None or url.startswith(identity.plain) else identity.prefix(url)
        name = url if "@" not in url and "?" not in url else object_name(url)  # `object_key`, without its call: for each object
        try:
            key = blake2b(f"{prefix}{name}\0{etag or ''}".encode(), digest_size=KEY_BYTES).digest()
        except UnicodeEncodeError:  # half of a surrogate pair, which stands for such a byte
            text = f"{urls.redact(url)!r} holds bytes that are no UTF-8: spell them as escapes, such as %E9"
            raise StorageError(text) from None
        if listed is not None:
            size_bytes, etag = listed
        return cls(url, key, urls.extension(url), size_bytes, etag, listed is not None, dataset, access)

    def made(self) -> ObjectRef:
        """Return it as an object that is stored now, where it is not here."""
        return self._replace(is_stored_sample=False)

    @property
    def shard_key(self) -> bytes | None:
        """The key of the shard that it is a member of; None: it is no member."""
        return None if self.shard is None or self.shard.key == self.key else self.shard.key


class ObjectParts:
    """Names the parts of one object, each an entry of its own: what they have in common is worked out once.

    Args:
        url: Which object.
        size_bytes: Size that it must have; None: any.
        etag: The version that a server must give.
        version: What tells its bytes from those of another version; None: `etag`.
        dataset: Id of the dataset in the ledger.
        identity: What else than its URL identifies it; None: nothing.
        access: On whose word it is read.
    """

    __slots__ = ("_access", "_dataset", "_etag", "_ext", "_name", "_size_bytes", "_url", "_whole_key")

    def __init__(
        self,
        url: str,
        size_bytes: int | None = None,
        *,
        etag: str | None = None,
        version: str | None = None,
        dataset: int | None = None,
        identity: Identity | None = None,
        access: Access = OWN,
    ) -> None:
        if identity is not None:
            identity = identity.with_access(access)
        prefix = "" if identity is None else identity.prefix(url)
        self._name = f"{prefix}{object_name(url)}\0{etag or '' if version is None else version}\0".encode()
        self._url, self._ext, self._size_bytes = url, urls.extension(url), size_bytes
        self._etag, self._dataset, self._access = etag, dataset, access
        self._whole_key: bytes | None = None

    @property
    def key(self) -> bytes:
        """The key of the whole."""
        if (key := self._whole_key) is None:
            key = self._whole_key = self._key(f"0-{self._size_bytes}")
        return key

    def part(self, span: Span) -> ObjectRef:
        """Return the reference of some of its bytes."""
        return self._ref(self._key(f"{span[0]}-{span[1]}"), span[1] - span[0], span=span)

    def member(self, span: Span) -> ObjectRef:
        """Return the reference of a member: one cache has members of a shard, or the whole, and never both."""
        return self._ref(self._key(f"{span[0]}-{span[1]}"), span[1] - span[0], span=span, shard=self)

    def whole(self, members: tuple[Span, ...] = ()) -> ObjectRef:
        """Return the reference of all of its bytes.

        Args:
            members: Which of its members are wanted: they take the place of the whole where that cannot be had.
        """
        assert self._size_bytes is not None, "its end is not known"
        return self._ref(self.key, self._size_bytes, span=(0, self._size_bytes), shard=self, members=members)

    def unpacked(self, unpack: Unpack) -> ObjectRef:
        """Return the reference of its content: it is stored compressed as a whole."""
        if unpack.printed is None:
            return self._ref(self._key(f"unpacked {unpack.compression}"), unpack.raw_bytes, unpack=unpack)
        # A command is its text, and may print something else another time: an entry of another version is not this one.
        bare = self.unpacked(unpack._replace(hashes=(), raw_bytes=None))
        return bare._replace(size_bytes=unpack.raw_bytes, etag=unpack.printed, is_listed=True)

    def file(self, span: Span, ext: str, record: ZipRecord | None = None) -> ObjectRef:
        """Return the reference of a part as what a path leads to: a file of its own, under an extension of its own.

        Args:
            span: Which bytes.
            ext: The extension, with its dot; empty: none.
            record: They are the record of a member of a ZIP, of which the file has the content; None: they are the content.
        """
        size_bytes = span[1] - span[0] if record is None else record.raw_bytes
        return self._ref(self._key(f"{span[0]}-{span[1]} file {ext}"), size_bytes, span=span, unpack=record, ext=ext)

    def copy(self, span: Span, ext: str, unpack: Unpack) -> ObjectRef:
        """Return the reference of a part of its content as a file of its own: it is stored compressed as a whole.

        Such a file is copied on this node from the content, and cannot be fetched.

        Args:
            span: Which bytes of the content.
            ext: The extension, with its dot; empty: none.
            unpack: How the content is made. What a command prints is told apart by the version of that.
        """
        key = self._key(f"unpacked {unpack.compression} {unpack.printed or ''} {span[0]}-{span[1]} file {ext}")
        return self._ref(key, span[1] - span[0], ext=ext)._replace(is_stored_sample=True)

    def _key(self, part: str) -> bytes:
        return blake2b(self._name + part.encode(), digest_size=KEY_BYTES).digest()

    def _ref(
        self,
        key: bytes,
        size_bytes: int | None,
        *,
        span: Span | None = None,
        unpack: Unpack | ZipRecord | None = None,
        shard: ObjectParts | None = None,
        members: tuple[Span, ...] = (),
        ext: str | None = None,
    ) -> ObjectRef:
        return ObjectRef(
            url=self._url,
            key=key,
            ext=self._ext if ext is None else ext,
            size_bytes=size_bytes,
            etag=self._etag,
            dataset=self._dataset,
            span=span,
            whole_bytes=self._size_bytes,
            unpack=unpack,
            shard=shard,
            members=members,
            access=self._access,
        )
