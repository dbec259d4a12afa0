"""Tars as WebDataset has them, with what other programs want beside them: offsets, and the index of wids.

shard-000000.tar        members KEY.EXTENSION; those of one sample follow each other
shard-000000.tar.idx    u64 offset of the first header of each sample, and of the end of the last (Megatron-Energon)
index.json              the shards, for wids
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from sqlstream.errors import EncodeError
from sqlstream.write.base.journal import StoredShard
from sqlstream.write.base.output import FinishedShard
from sqlstream.write.base.writer import PartFiles
from sqlstream.write.formats.limits import ShardLimits
from sqlstream.write.formats.parts import PartEncoder, SampleFiles
from sqlstream.write.formats.tar_stream import TarStream
from sqlstream.write.formats.whole_files import little_endian
from sqlstream.write.formats.wids import WIDS_NAME, wids_index

_BUFFER_BYTES = 1 << 20
"""Arbitrary: what is written with one system call."""
_HEADER_BYTES = 512


class TarDraft:
    """A tar that is being written.

    Args:
        name: Of the shard.
        tar_format: What is written beside it, and when it is full.
        files: Where it is written.
    """

    def __init__(self, name: str, tar_format: TarFormat, files: PartFiles) -> None:
        self._name, self._format, self._files = name, tar_format, files
        self._file = open(files.part_path(name), "wb", buffering=_BUFFER_BYTES)  # noqa: SIM115 - finish or discard closes it
        self._digest = hashlib.md5(usedforsecurity=False) if tar_format.has_md5 else None
        self._stream = TarStream(self if self._digest else self._file)
        self._starts = array("Q")
        self._last_key = ""

    @property
    def num_samples(self) -> int:
        """Samples in it."""
        return len(self._starts)

    def write(self, data: bytes) -> None:
        """Take bytes of the stream, where they are hashed as well."""
        assert self._digest is not None
        self._digest.update(data)
        self._file.write(data)

    def takes(self, item: SampleFiles) -> bool:
        """Return whether there is room for a sample.

        Raises:
            EncodeError: The one before it has its name.
        """
        if item.key == self._last_key:
            raise EncodeError(f"two samples that follow each other have the key {item.key!r}: readers take them for one")
        added = sum(_HEADER_BYTES + len(data) + -len(data) % 512 for _, data in item.files)
        return self._format.limits.takes(self.num_samples + 1, self._stream.num_bytes + added)

    def add(self, item: SampleFiles) -> None:
        """Add a sample."""
        start = self._stream.num_bytes
        for extension, data in item.files:
            self._stream.add(f"{item.key}.{extension}", data)
        self._starts.append(start)
        self._last_key = item.key

    def finish(self) -> FinishedShard:
        """Write the end, and what comes beside the tar."""
        self._starts.append(self._stream.num_bytes)
        self._stream.close()
        self._file.close()
        size = self._stream.num_bytes
        files = {self._name: size}
        if self._format.has_offsets:
            offsets = little_endian(self._starts)
            self._files.part_path(f"{self._name}.idx").write_bytes(offsets)
            files[f"{self._name}.idx"] = len(offsets)
        record = {"url": self._name, "nsamples": self.num_samples - 1, "filesize": size}
        if self._digest is not None:
            record["md5sum"] = self._digest.hexdigest()
        return FinishedShard(num_samples=self.num_samples - 1, files=files, record=record)

    def discard(self) -> None:
        """Give it up."""
        self._file.close()


class TarFormat:
    """Tars, and what comes beside them.

    Args:
        pattern: Names of shards.
        limits: When one is full.
        encoder: Of the samples.
        has_offsets: Write `.tar.idx`.
        has_md5: Have the MD5 of each shard in the index.
        name: Of the dataset, in the index.
    """

    index_names = (".nv-meta/.info.json", ".nv-meta/index.sqlite", ".nv-meta/index.uuid", WIDS_NAME)
    """The first ones are of Energon, by `TarWriter` or by the command; its two YAML files may have been changed by hand."""

    def __init__(
        self, pattern: str, limits: ShardLimits, encoder: PartEncoder, *, has_offsets: bool, has_md5: bool, name: str
    ) -> None:
        self._pattern, self.limits, self._name = pattern, limits, name
        self.has_offsets, self.has_md5 = has_offsets, has_md5
        self.encode = encoder.encode

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the bytes."""
        flags = {"has_offsets": self.has_offsets, "has_md5": self.has_md5, "name": self._name}
        return {"format": "tar", "pattern": self._pattern, **self.limits.settings, **flags}

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over nothing: keys may come again in another shard."""

    def start(self, number: int, files: PartFiles) -> TarDraft:
        """Begin a shard."""
        return TarDraft(self._pattern % number, self, files)

    def index(self, shards: Sequence[StoredShard]) -> dict[str, bytes]:
        """Return the index of wids."""
        return {WIDS_NAME: wids_index([shard.record for shard in shards], self._name)}
