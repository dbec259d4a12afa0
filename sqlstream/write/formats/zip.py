"""Writes ZIP archives of samples: members KEY.EXTENSION, each with its size and CRC before its content, and no clock.

Text is deflated; media, which are compressed already, are stored as they are. No descriptors, names in UTF-8, zip64 only where
it is needed: any reader finds a member by the directory and gets it with one request.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

from sqlstream.errors import EncodeError
from sqlstream.storage.members.names import is_hidden
from sqlstream.write.base.journal import StoredShard
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.output import FinishedShard
from sqlstream.write.base.writer import PartFiles, SampleWriter
from sqlstream.write.formats.limits import ShardLimits, checked_pattern
from sqlstream.write.formats.parts import PartEncoder, SampleFiles

_DEFLATED = frozenset("txt text transcript json jsn jsonl csv tsv xml html htm srt vtt md yaml yml npy".split())
"""Extensions whose content shrinks."""
_LEVEL = 6
_FIRST_TIME = (1980, 1, 1, 0, 0, 0)
"""The earliest that the format has."""
_FILE = 0o100644 << 16
_MOST_NAME_BYTES = (1 << 16) - 1
"""Longest name that the format has."""
_RECORD_BYTES = 76
"""Of a local header and an entry of the directory, without the name, which both have."""


class ZipDraft:
    """An archive that is being written.

    Args:
        name: Of the shard.
        limits: When it is full.
        files: Where it is written.
    """

    def __init__(self, name: str, limits: ShardLimits, files: PartFiles) -> None:
        self._name, self._limits = name, limits
        self._path = files.part_path(name)
        self._archive = zipfile.ZipFile(self._path, "w")
        self._keys: set[str] = set()
        self._num_bytes = 0
        self.num_samples = 0
        """Samples in it."""

    def takes(self, item: SampleFiles) -> bool:
        """Return whether there is room for a sample, were nothing deflated.

        Raises:
            EncodeError: There is one of its name.
        """
        if item.key in self._keys:
            raise EncodeError(f"the key {item.key!r} comes twice in one archive: members of one name are one sample")
        added = sum(_RECORD_BYTES + len(data) for _, data in item.files)
        return self._limits.takes(self.num_samples + 1, self._num_bytes + added)

    def add(self, item: SampleFiles) -> None:
        """Add a sample."""
        for extension, data in item.files:
            info = zipfile.ZipInfo(f"{item.key}.{extension}", _FIRST_TIME)
            info.external_attr, info.create_system = _FILE, 3
            kind = extension.rpartition(".")[2].lower()
            info.compress_type = zipfile.ZIP_DEFLATED if kind in _DEFLATED else zipfile.ZIP_STORED
            self._archive.writestr(info, data, compresslevel=_LEVEL)
            self._num_bytes += _RECORD_BYTES + 2 * len(info.filename) + info.compress_size
        self._keys.add(item.key)
        self.num_samples += 1

    def finish(self) -> FinishedShard:
        """Write the directory."""
        self._archive.close()
        files = {self._name: self._path.stat().st_size}
        return FinishedShard(num_samples=self.num_samples, files=files, record={})

    def discard(self) -> None:
        """Give it up."""
        self._archive.close()


class ZipFormat:
    """ZIP archives.

    Args:
        pattern: Names of shards.
        limits: When one is full.
        encoder: Of the samples.
    """

    index_names: tuple[str, ...] = ()

    def __init__(self, pattern: str, limits: ShardLimits, encoder: PartEncoder) -> None:
        self._pattern, self._limits, self._encoder = pattern, limits, encoder

    def encode(self, sample: Mapping[str, Any]) -> SampleFiles:
        """Encode a sample.

        Raises:
            EncodeError: It cannot be, or a name is longer than the format has.
        """
        item = self._encoder.encode(sample)
        if is_hidden(f"{item.key}."):
            raise EncodeError(f"sample {item.key!r}: readers of ZIP pass over names like {item.key}.…: rename the key")
        longest = max(len(f"{item.key}.{extension}".encode()) for extension, _ in item.files)
        if longest > _MOST_NAME_BYTES:
            raise EncodeError(
                f"sample {item.key[:40]!r}… has a name of {longest} bytes, and ZIP has {_MOST_NAME_BYTES}: rename it"
            )
        return item

    @property
    def settings(self) -> Mapping[str, Any]:
        """What decides the bytes."""
        return {"format": "zip", "pattern": self._pattern, **self._limits.settings}

    def adopt(self, shards: Sequence[StoredShard]) -> None:
        """Take over nothing: each archive stands for itself."""

    def start(self, number: int, files: PartFiles) -> ZipDraft:
        """Begin a shard."""
        return ZipDraft(self._pattern % number, self._limits, files)

    def index(self, shards: Sequence[StoredShard]) -> dict[str, bytes]:  # noqa: ARG002
        """Return no file: each archive has its directory."""
        return {}


class ZipWriter(SampleWriter[SampleFiles]):
    """Writes samples as ZIP archives, whose members are files under the sample's key.

    A sample is a dict as `TarWriter` takes it. A key may come once in an archive.

    Args:
        out: A directory, a URL, or (directory, URL).
        pattern: Names of shards, with one number.
        size_limit: Most bytes of a shard; None: no limit.
        max_samples: Most samples of a shard; None: no limit. The names of one shard are held in memory.
        allow_pickle: Encode values of `pkl`, `pickle` and `pyd`, which can run any code where they are read.
        options: How it is stored.

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.

    Example:
        >>> import tempfile
        >>> with ZipWriter(tempfile.mkdtemp()) as writer:
        ...     writer.write({"__key__": "0001", "txt": "a cat", "json": {"score": 0.5}})
    """

    def __init__(
        self,
        out: Out,
        *,
        pattern: str = "shard-%06d.zip",
        size_limit: int | str | None = "1gb",
        max_samples: int | None = 50_000,
        allow_pickle: bool = False,
        options: WriteOptions | None = None,
    ) -> None:
        limits = ShardLimits(size_limit, max_samples)
        zip_format = ZipFormat(checked_pattern(pattern, ".zip"), limits, PartEncoder(allow_pickle=allow_pickle))
        super().__init__(zip_format, out, options or WriteOptions())
