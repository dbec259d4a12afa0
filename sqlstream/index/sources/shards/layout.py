"""What kinds of shards there are: each says which samples a shard has, and what values the bytes of their parts are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.places import SamplePart


class ReadPart(NamedTuple):
    """A part of a sample, with its bytes."""

    name: str
    """Its column."""
    data: bytes
    part: SamplePart


class ShardLayout(Protocol):
    """How one shard is read. Frozen and picklable."""

    def identity(self) -> object:
        """Return what a fingerprint must tell apart, beside the shard's file (JSON)."""
        ...

    def samples(self, file: SourceFile, remote: RemoteReader) -> ShardSamples:
        """Return the samples of a shard, by its own table.

        Raises:
            SourceError: It is damaged, or cut short.
        """
        ...

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, Any]:
        """Return the values of a sample, by column.

        Args:
            parts: Those of its parts that hold them.
            wanted: Which columns.
            name: The shard, for messages.

        Raises:
            DecodeError: They are damaged.
        """
        ...
