"""TAR shards: neighbouring members of one name are a sample, as WebDataset groups them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from sqlstream.errors import SourceError
from sqlstream.index.sources.base.access import local_copy, named_errors
from sqlstream.index.sources.shards.layout import MembersAreBytes, ReadPart, Scratch
from sqlstream.index.sources.shards.reading import LocalShard, opened, other_size
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, Unpack
from sqlstream.storage.members import names, tar
from sqlstream.storage.members.damage import before_damage
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.source import ByteRange
from sqlstream.storage.members.unpack import MAGIC_BYTES, Compression, compression_of, decompress

_PIECE_BYTES = 1 << 20
_PACKED = frozenset((".gz", ".tgz", ".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".zst", ".zstd"))
"""Extensions of shards that are compressed as a whole, as a rule: these are brought unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarShard(MembersAreBytes):
    """A TAR archive, which may be compressed as a whole: its first bytes tell, whatever its name says."""

    num_samples: int | None = None
    """Samples that an index file says it has; None: nothing says it."""
    num_bytes: int | None = None
    """Its size by an index file; None: nothing says it."""

    def identity(self) -> object:
        """Return its format."""
        return "tar"

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`."""
        samples = self._samples(file, remote, scratch)
        if samples.damage is not None and scratch.files is not None and urls.is_remote(file.url):
            scratch.files.discard(file, samples.unpack)
        return self._checked(samples, file)

    def _samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        name = urls.redact(file.url)
        with opened(file, remote, None if urls.extension(file.url) in _PACKED else scratch.files) as source:
            compression = compression_of(source.read_at(0, MAGIC_BYTES))
            if compression is None:
                return _samples(source, name, None)
        with _content(file, compression, remote, scratch) as content:
            return _samples(content, name, Unpack(compression))

    def _checked(self, samples: ShardSamples, file: SourceFile) -> ShardSamples:
        """Return the samples of a shard that is the one of its index, or damaged."""
        if samples.damage is not None:
            return samples
        if (other := other_size(file, self.num_bytes)) is not None:
            raise SourceError(other)
        if self.num_samples not in (None, len(samples.parts)):
            raise SourceError(
                f"{urls.redact(file.url)} has {len(samples.parts)} samples, and its index says {self.num_samples}: one is of "
                "another version, or wids counted hidden files; give the archives in place of the index"
            )
        return samples

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, bytes]:  # noqa: ARG002 - all are
        """Return the content of members."""
        return {part.name: part.data for part in parts}


def _samples(source: ByteRange, name: str, unpack: Unpack | None) -> ShardSamples:
    grouped, damage = before_damage(names.group(tar.read_members(source, name), name))
    keys = [key for key, _ in grouped]
    parts = [
        {column: SamplePart(0, member.offset, member.size) for column, member in members.items()} for _, members in grouped
    ]
    return ShardSamples(keys=keys, parts=parts, unpack=unpack, damage=damage)


@contextlib.contextmanager
def _content(file: SourceFile, compression: Compression, remote: RemoteReader, scratch: Scratch) -> Iterator[LocalShard]:
    """Give the content of a compressed shard: where it stays for those who read it next, or unpacked for this time."""
    with contextlib.ExitStack() as stack:
        path: Path | None = None
        if scratch.files is not None and urls.is_remote(file.url):
            with named_errors(file.url):
                path = stack.enter_context(scratch.files.held(file, Unpack(compression)))
        if path is not None:
            yield stack.enter_context(contextlib.closing(LocalShard(path)))
            return
        stored = stack.enter_context(local_copy(file, scratch.path("shard"), remote))
        yield stack.enter_context(_unpacked(stored, compression, urls.redact(file.url), scratch))


@contextlib.contextmanager
def _unpacked(path: Path, compression: Compression, name: str, scratch: Scratch) -> Iterator[LocalShard]:
    """Give the content of a compressed file, which is removed afterwards.

    Raises:
        CacheFullError: It has no room among the index files: it is a bomb, or `index_limit` is small.
    """
    temporary = scratch.path("tar")
    make_room = scratch.on_growth(temporary)
    try:
        with open(path, "rb") as file, open(temporary, "xb") as content:
            for piece in decompress(iter(partial(file.read, _PIECE_BYTES), b""), compression, name):
                make_room()
                content.write(piece)
                content.flush()
        with contextlib.closing(LocalShard(temporary)) as source:
            yield source
    finally:
        temporary.unlink(missing_ok=True)
