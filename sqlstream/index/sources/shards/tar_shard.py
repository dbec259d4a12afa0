"""TAR shards: neighbouring members of one name are a sample, as WebDataset groups them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlstream.index.sources.shards.layout import ReadPart
from sqlstream.index.sources.shards.reading import opened
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members import names, tar
from sqlstream.storage.members.places import SamplePart


@dataclass(frozen=True, slots=True, kw_only=True)
class TarShard:
    """A TAR archive that is not compressed."""

    def identity(self) -> object:
        """Return its format."""
        return "tar"

    def samples(self, file: SourceFile, remote: RemoteReader) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`."""
        name = urls.redact(file.url)
        with opened(file, remote) as source:
            grouped = list(names.group(tar.read_members(source, name), name))
        keys = [key for key, _ in grouped]
        parts = [
            {column: SamplePart(0, member.offset, member.size) for column, member in members.items()} for _, members in grouped
        ]
        return ShardSamples(keys=keys, parts=parts)

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, bytes]:  # noqa: ARG002 - all are
        """Return the content of members."""
        return {part.name: part.data for part in parts}
