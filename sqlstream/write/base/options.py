"""How a dataset is written, as one value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from sqlstream.config import StorageOptions, check_at_least, flag_of
from sqlstream.errors import ConfigError
from sqlstream.storage.base.protocols import RemoteReader, RemoteWriter

Out: TypeAlias = str | os.PathLike[str] | tuple[str | os.PathLike[str], str]
"""Where a dataset goes: a directory, a URL (s3://, gs://, az://), or both, as (directory, URL)."""


class ReaderWriter(RemoteReader, RemoteWriter, Protocol):
    """What an output is read and written with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How a dataset is written: what may be there already, how it is stored, and which part of it this is."""

    exist_ok: bool = False
    """Write where something is already. Files of the same names are replaced and others are left; an index goes first."""
    resume: bool = False
    """Go on with a writing that ended early, behind its last stored shard; a directory without one is begun."""
    keep_local: bool = False
    """Keep the local files of an output that has a URL as well."""
    part: tuple[int, int] | None = None
    """(i, n): this is part i of n, in a directory of its own below the output. `merge` joins them."""
    source: str = ""
    """What names the samples and their order, in the journal, which then stays: a writing is resumed with the same only."""
    num_uploads: int = 4
    """Shards stored at a time; as many more wait on the local disk before `write` waits. 4 × 64 MiB fill 10 Gbit/s."""
    num_retries: int = 3
    """Tries of each request after the first one, on faults that can pass."""
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Settings of the storage backend: `key`, `secret`, `endpoint_url`, `region`, …"""
    show_progress: bool = False
    """Show a bar of samples on a terminal."""
    remote: ReaderWriter | None = field(default=None, repr=False, compare=False)
    """What reads and stores objects, such as a `Fetcher`, which stays open; None: a helper process of the writer's own."""

    def __post_init__(self) -> None:
        """Check flags, ranges and what excludes each other."""
        for name, least in (("num_uploads", 1), ("num_retries", 0)):
            object.__setattr__(self, name, check_at_least(name, getattr(self, name), least))
        for name in ("exist_ok", "resume", "keep_local", "show_progress"):
            object.__setattr__(self, name, flag_of(name, getattr(self, name)))
        if self.exist_ok and self.resume:
            raise ConfigError("exist_ok=True writes anew and resume=True goes on: give one of them")
        if self.part is not None:
            check_part_of(self.part)

    @property
    def storage(self) -> StorageOptions:
        """How the output is reached."""
        return StorageOptions(storage_options=self.storage_options, num_retries=self.num_retries)

    @property
    def part_name(self) -> str:
        """The directory of this part below the output; empty: it is not in parts."""
        return "" if self.part is None else "{:05d}-of-{:05d}".format(*self.part)


def check_part_of(part: tuple[int, int]) -> None:
    """Raise unless a part is (i, n) with 0 ≤ i < n.

    Raises:
        ConfigError: It is not.
    """
    is_pair = isinstance(part, tuple) and len(part) == 2 and all(type(number) is int for number in part)
    if not is_pair or not 0 <= part[0] < part[1]:
        raise ConfigError(f"part={part!r} is no part: give (i, n) with 0 <= i < n, such as (0, 8)")
