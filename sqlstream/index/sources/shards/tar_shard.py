"""TAR shards: neighbouring members of one name are a sample, as WebDataset groups them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sqlstream.errors import DamagedShardError, SourceError
from sqlstream.index.sources.shards.columns import PartsBuilder, Texts
from sqlstream.index.sources.shards.layout import MembersAreBytes, ReadPart, Scratch
from sqlstream.index.sources.shards.reading import ShardBytes, opened, other_size, printed, unpacked_content
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.sources.shards.values import check_bytes, check_members, with_values
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, Unpack
from sqlstream.storage.members import names, tar
from sqlstream.storage.members.tar import TarMember
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of

_PACKED = frozenset((".gz", ".tgz", ".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".zst", ".zstd"))
"""Extensions of shards that are compressed as a whole, as a rule: these are fetched unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TarShard(MembersAreBytes):
    """A TAR archive, which may be compressed as a whole: its first bytes tell, whatever its name says."""

    num_samples: int | None = None
    """Samples that an index file says it has; None: nothing says it."""
    num_bytes: int | None = None
    """Its size by an index file; None: nothing says it."""
    index_members: tuple[str, ...] = ()
    """Columns of members that are parsed."""

    def __post_init__(self) -> None:
        """Check what is to be parsed."""
        check_members(self.index_members)

    def identity(self) -> object:
        """Return its format, and what is parsed."""
        return ["tar", *self.index_members] if self.index_members else "tar"

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`."""
        samples = self._samples(file, remote, scratch)
        if samples.damage is not None and scratch.files is not None and urls.is_remote(file.url):
            scratch.files.discard(file, samples.unpack)
        return self._checked(samples, file)

    def _samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        name = urls.redact(file.url)
        if urls.is_command(file.url):
            with printed(file, remote, scratch) as (content, unpack):
                return _samples(content, name, unpack, self.index_members, scratch.folder)
        files = None if urls.extension(file.url) in _PACKED else scratch.files
        with opened(file, remote, files, scratch.here, scratch.walks) as source:
            compression = compression_of(source.read_at(0, MAGIC_BYTES))
            if compression is None:
                return _samples(source, name, None, self.index_members, scratch.folder)
        unpack = Unpack(compression)
        with unpacked_content(file, unpack, remote, scratch) as content:
            return _samples(content, name, unpack, self.index_members, scratch.folder)

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

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, Any]:  # noqa: ARG002 - all are
        """Return the content of members."""
        return {part.name: part.data for part in parts}


def _samples(source: ShardBytes, name: str, unpack: Unpack | None, index_members: Sequence[str], folder: Path) -> ShardSamples:
    contents: dict[int, bytes] = {}
    parts, damage = PartsBuilder(folder=folder), list[DamagedShardError]()
    members = tar.read_members(source, name)
    if index_members:
        members = _read_along(members, source, index_members, contents, name)

    def keys() -> Iterator[str]:
        try:
            for key, found in names.group(members, name):
                for column, part in found.items():
                    parts.add(column, part.offset, part.size)
                parts.end_sample()
                yield key
        except DamagedShardError as error:
            damage.append(error)

    found = Texts.of(keys(), folder)  # as they come: each belongs to the parts that were added before it
    samples = ShardSamples(keys=found, parts=parts.built(), unpack=unpack, damage=damage[0] if damage else None)
    return with_values(samples, index_members, contents, name) if index_members else samples


def _read_along(
    members: Iterable[TarMember], source: ShardBytes, wanted: Sequence[str], contents: dict[int, bytes], name: str
) -> Iterator[TarMember]:
    """Yield members, and note the contents of some by their places: while the bytes about their headers are here."""
    for member in members:
        split = names.split_name(member.name)
        if split is not None and split[1] in wanted:
            check_bytes(member.size, f"{name}: the member {member.name[:200]!r} at byte {member.offset}", split[1])
            contents[member.offset] = source.read_beside(member.offset, member.size)
        yield member
