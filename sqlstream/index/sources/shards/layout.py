"""What kinds of shards there are: each says which samples a shard has, and what values the bytes of their parts are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeAlias

from sqlstream.errors import ConfigError
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.types.models import SourceFile
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, Unpack, ZipRecord
from sqlstream.storage.members.places import SamplePart, SlicedBytes

CURE_OF_COPY = "; where the shard itself is whole, its copy is not: `sqlstream cache clear` has it fetched again"
"""Ends what is said of damage in bytes that came out of the cache: it may be the cache's disk that fails."""


class ReadPart(NamedTuple):
    """A part of a sample, with its bytes."""

    name: str
    """Its column."""
    data: SlicedBytes
    """`bytes`, but where `are_values_slices`: there a large part is read slice by slice."""
    part: SamplePart

    @property
    def whole(self) -> bytes:
        """All of its bytes."""
        return self.data if isinstance(self.data, bytes) else self.data[:]


class ShardFiles(Protocol):
    """Brings whole remote shards to this disk, where they stay for those who read their content next. Thread safe."""

    def held(self, file: SourceFile, unpack: Unpack | None) -> AbstractContextManager[Path | None]:
        """Give a file that stays for the time of the context; None: there is no room for it, or it does not come.

        Args:
            file: The shard.
            unpack: How its content is made, which is then what the file has; None: the file has the shard itself.

        Raises:
            StorageError: The shard is not there, may not be read, or is another one than was found before.
            SourceError: It does not unpack.
        """
        ...

    def discard(self, file: SourceFile, unpack: Unpack | None) -> None:
        """Give up what was fetched of a shard, which is damaged: another time it may come whole."""
        ...


KeepsShards: TypeAlias = Callable[[str, Sequence[SourceFile]], ShardFiles | None]
"""(source, all of its remote shards) → what brings them whole as they are indexed; None: they are read by ranges."""


class PartFile(NamedTuple):
    """A part as a file of its own."""

    ext: str
    """Its extension, with the dot; empty: it has none."""
    record: ZipRecord | None
    """What makes its content of its bytes in the shard; None: they are it."""


class Walks:
    """What the walks along the headers of a source's shards have found: those that begin later are taken to be alike.

    Any thread may set it: it never goes back.
    """

    are_near = False
    """The headers of a shard were near each other."""


class Scratch(NamedTuple):
    """Where temporary files are written while a shard is indexed."""

    path: Callable[[str], Path]
    """Gives a new path for a purpose."""
    on_growth: Callable[[Path], Callable[[], None]] = lambda _path: lambda: None
    """Returns what asks for room as a file grows (`IndexRoom.on_growth`)."""
    files: ShardFiles | None = None
    """Brings whole shards whose content is wanted as well; None: nothing does."""
    here: Path | None = None
    """The shard, or what it holds where it is compressed as a whole, on this disk; None: its bytes are asked for."""
    walks: Walks | None = None
    """Of the other shards of the source; None: nothing is known of them."""

    @property
    def folder(self) -> Path:
        """Where files are written that need no name."""
        return self.path("table").parent


class MembersAreBytes:
    """What layouts have in common whose samples have parts of bytes, all of whose places the index knows."""

    __slots__ = ()

    @property
    def is_table_apart(self) -> bool:
        """The table is among the samples."""
        return False

    @property
    def are_values_slices(self) -> bool:
        """Each value is all of a part."""
        return False

    @property
    def reading(self) -> object:
        """Nothing: values are bytes."""
        return None

    def locate(self, part: SamplePart, read: Callable[[int, int], bytes], name: str) -> SamplePart:  # noqa: ARG002
        """Return the part: the index knows its place."""
        return part

    def file_of(self, part: SamplePart, column: str, row: Mapping[str, object]) -> PartFile:  # noqa: ARG002
        """Return the part as it is, under the extension that its column is called by."""
        return PartFile(urls.extension(f"x.{column}"), None)


class PartsAreValues:
    """What layouts have in common whose samples are values: there is no file that a path could lead to."""

    __slots__ = ()

    def file_of(self, part: SamplePart, column: str, row: Mapping[str, object]) -> PartFile:  # noqa: ARG002
        """Refuse it."""
        raise ConfigError(
            f"members='path': row {row.get('__row__')} lies in a shard of values, in which there are no files: leave it out"
        )


class ShardLayout(Protocol):
    """How one shard is read. Frozen and picklable."""

    @property
    def num_samples(self) -> int | None:
        """Samples that an index file says it has; None: nothing says it."""
        ...

    @property
    def is_table_apart(self) -> bool:
        """Its table is not in its own bytes, or not in these as they are stored: other bytes, and few, say it."""
        ...

    def identity(self) -> object:
        """Return what a fingerprint must tell apart, beside the shard's file (JSON)."""
        ...

    @property
    def are_values_slices(self) -> bool:
        """Each value is made of a slice of a part, the others of which need not be read for it."""
        ...

    @property
    def reading(self) -> object:
        """What else than the bytes of a sample decides its values (JSON)."""
        ...

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard, by its own table; of a damaged one those before the damage, which is noted there.

        Args:
            file: The shard.
            remote: Reads what is not local.
            scratch: Where what is needed meanwhile is written.

        Raises:
            DamagedShardError: It is damaged, or cut short, and no sample is known to lie before that.
            SourceError: It is a shard of a kind that is not read.
        """
        ...

    def locate(self, part: SamplePart, read: Callable[[int, int], bytes], name: str) -> SamplePart:
        """Return where a part is that has no place in the index: of shards whose table is in what they hold, unpacked.

        Args:
            part: Its number, as `offset`.
            read: (offset, number of bytes) → bytes of the content of the shard.
            name: The shard, for messages.

        Raises:
            SourceError: The table is damaged.
        """
        ...

    def file_of(self, part: SamplePart, column: str, row: Mapping[str, object]) -> PartFile:
        """Return a part as a file of its own.

        Args:
            part: It.
            column: Its column.
            row: What the index says of the sample.

        Raises:
            ConfigError: Parts of such shards are no files.
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
