"""Looks at shards and checks them: those that an index of MosaicML Streaming or wids names, or archives and Parquet files.

What an index says is compared with what is there: sizes, hashes, numbers of samples. Then each file is read as a whole: tables
of MDS and the sizes within its samples, rows of the split formats, headers of tars, CRCs of ZIP members, row groups of Parquet.
Tars that are compressed as a whole are unpacked beside.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sqlstream.errors import ConfigError, DamagedShardError, SourceError, SqlStreamError, StorageError
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader
from sqlstream.storage.members.braces import expand
from sqlstream.storage.members.mds.decoder import MdsDecoder
from sqlstream.storage.members.mds.shards import MdsShard, ShardFile, is_mds_index, offsets, parse_index
from sqlstream.storage.members.mds.split import RowDecoder
from sqlstream.storage.members.names import group, is_hidden, split_name, tar_extension
from sqlstream.storage.members.packed import check_hashes, decompress
from sqlstream.storage.members.tar import TarMember, read_members
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of
from sqlstream.storage.members.unpack import decompress as decompress_whole
from sqlstream.write.base.disk import temporary_disk
from sqlstream.write.formats.whole_files import little_endian

INDEX_NAME = "index.json"
_KINDS = ("tar", "zip", "parquet")
_PIECE_BYTES = 1 << 20  # arbitrary


class KnownShard(NamedTuple):
    """A shard, and what is said of it."""

    url: str
    """Where it is; of the split formats the file of the rows."""
    kind: str
    """`mds`, `json`, `csv`, `tsv`, `xsv`, `tar`, `zip` or `parquet`."""
    num_samples: int | None
    """Samples that an index says it has; None: nothing says it."""
    size_bytes: int | None
    """Size that an index says, or the listing."""
    files: tuple[ShardFile, ...]
    """Its files, as an index says they are; their names are relative to `prefix`."""
    mosaic: MdsShard | None = None
    """What the index of MosaicML Streaming says."""
    prefix: str = ""
    """Where the names of its files begin."""


class Counted(NamedTuple):
    """What was found in a shard."""

    num_samples: int
    size_bytes: int


class ShardReader:
    """Reads shards at a place, local or remote.

    Args:
        remote: Reads what is not on this disk; None: everything must be here.
    """

    def __init__(self, remote: RemoteReader | None) -> None:
        self.remote = remote
        """Reads what is not on this disk."""

    def find(self, src: str) -> tuple[KnownShard, ...]:
        """Return the shards of an index, of a directory with one, or else the archives and Parquet files that are named.

        Args:
            src: A file, a directory or a URL; braces are expanded.

        Raises:
            ConfigError: There are none.
            SourceError: The index is damaged.
        """
        found = tuple(shard for place in expand(src) for shard in self._found(place))
        if not found:
            raise ConfigError(f"{urls.redact(src)} has no {INDEX_NAME} and no file of .{', .'.join(_KINDS)}: check the path")
        return found

    def _found(self, place: str) -> Iterator[KnownShard]:
        if _kind_of(place) in _KINDS:
            yield self._plain(place, self._size(place))
        elif urls.extension(place) == ".json":
            yield from self._indexed(place, self._text(place))
        else:
            prefix = place.rstrip("/") + "/"
            sizes = dict(self._listed(prefix))
            if f"{prefix}{INDEX_NAME}" in sizes:
                yield from self._indexed(f"{prefix}{INDEX_NAME}", self._text(f"{prefix}{INDEX_NAME}"))
                return
            for url in sorted(sizes):
                if _kind_of(url) in _KINDS and not url.rpartition("/")[2].startswith("."):
                    yield self._plain(url, sizes[url])

    def _plain(self, url: str, size: int | None) -> KnownShard:
        return KnownShard(url, _kind_of(url), None, size, ())

    def _indexed(self, url: str, text: bytes) -> Iterator[KnownShard]:
        prefix, name = "".join(url.rpartition("/")[:2]), urls.redact(url)
        try:
            document = json.loads(text)
        except ValueError as error:
            raise SourceError(f"{name} is not JSON: {error}") from error
        if is_mds_index(document):
            for shard in parse_index(text, name):
                stored = [file for file in (shard.zip or shard.raw, shard.zip_meta or shard.meta) if file is not None]
                size = sum(file.bytes for file in stored)
                yield KnownShard(prefix + stored[0].basename, shard.format, shard.samples, size, tuple(stored), shard, prefix)
        elif isinstance(document, dict) and isinstance(document.get("shardlist"), list):
            for entry in document["shardlist"]:
                yield _tar_of(entry, prefix, name)
        else:
            raise SourceError(f"{name} is no index of MosaicML Streaming or wids: give the shards themselves")

    def check(self, shard: KnownShard) -> Counted:
        """Read a shard as a whole, and return what it has.

        Raises:
            SourceError: It is damaged, or not what the index says; the message says how.
            StorageError: It cannot be read.
        """
        if shard.mosaic is not None:
            return self._check_mosaic(shard, shard.mosaic)
        with self.held(shard.url) as path:
            size = path.stat().st_size
            if shard.size_bytes is not None and size != shard.size_bytes:
                raise DamagedShardError(
                    f"it has {size} bytes, and {shard.size_bytes} were expected: it is cut off, or another one"
                )
            for file in shard.files:
                check_hashes(_chunks(path), file.hashes, "it")
            count = _COUNTS[shard.kind](path)
            if shard.kind == "tar":
                self._check_offsets(shard.url, path)
        if shard.num_samples is not None and count != shard.num_samples:
            raise DamagedShardError(
                f"it has {count} samples, the index says {shard.num_samples}: one of them is of another version"
            )
        return Counted(count, size)

    def _check_mosaic(self, shard: KnownShard, mosaic: MdsShard) -> Counted:
        contents: list[bytes] = []
        pairs = [(mosaic.raw, mosaic.zip), *([(mosaic.meta, mosaic.zip_meta)] if mosaic.meta else [])]
        for raw, stored in pairs:
            file = stored or raw
            with self.held(f"{shard.prefix}{file.basename}") as path:
                data = path.read_bytes()
            if len(data) != file.bytes:
                reason = "it is cut off" if len(data) < file.bytes else "bytes were added, or it is another file"
                raise DamagedShardError(f"{file.basename} has {len(data)} bytes, the index says {file.bytes}: {reason}")
            check_hashes(data, file.hashes, file.basename)
            if stored is not None and mosaic.compression is not None:
                data = decompress(data, mosaic.compression, raw.bytes, stored.basename)
                check_hashes(data, raw.hashes, raw.basename)
            contents.append(data)
        bounds = offsets(contents[-1], mosaic, mosaic.raw.basename)  # [n + 1]
        decoder: Any = MdsDecoder(mosaic.columns).spans if mosaic.meta is None else RowDecoder(mosaic).decode
        for number, (start, stop) in enumerate(pairwise(bounds.tolist())):
            try:
                decoder(contents[0][start:stop])
            except SqlStreamError as error:
                raise DamagedShardError(f"sample {number}: {error}") from error
        return Counted(mosaic.samples, sum(file.bytes for file in shard.files))

    def _check_offsets(self, url: str, path: Path) -> None:
        """Compare the offsets beside a tar with its headers, if there are some."""
        if self._size(f"{url}.idx") is None:
            return
        if self._text(f"{url}.idx") != tar_offsets(path, "it"):
            raise DamagedShardError("its .idx does not fit its headers: write it again with `sqlstream shards index --idx`")

    # -- files --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def held(self, url: str) -> Iterator[Path]:
        """Give a file on this disk: itself, or a copy for the time of the context."""
        if not urls.is_remote(url):
            path = urls.local_path(url)
            if not path.is_file():
                raise StorageError(f"there is no file {path}: write it again, or correct the index")
            yield path
            return
        with contextlib.ExitStack() as exit_:
            with temporary_disk(f"{urls.redact(url)} is read there"):
                copy = Path(exit_.enter_context(tempfile.TemporaryDirectory(prefix="sqlstream-shards-")), "shard")
                self._reader(url).download(url, copy)
            yield copy

    def _reader(self, url: str) -> RemoteReader:
        assert self.remote is not None, f"{urls.redact(url)} is remote"
        return self.remote

    def _text(self, url: str) -> bytes:
        with self.held(url) as path:
            return path.read_bytes()

    def is_there(self, url: str) -> bool:
        """Return whether there is a file."""
        try:
            return self._reader(url).head(url) is not None if urls.is_remote(url) else urls.local_path(url).is_file()
        except FileNotFoundError:
            return False

    def _size(self, url: str) -> int | None:
        """Return the size of a file; None: there is none."""
        if not urls.is_remote(url):
            path = urls.local_path(url)
            return path.stat().st_size if path.is_file() else None
        try:
            return self._reader(url).head(url).size_bytes
        except FileNotFoundError:
            return None

    def _listed(self, prefix: str) -> Iterator[tuple[str, int | None]]:
        if urls.is_remote(prefix):
            for info in self._reader(prefix).list(prefix):
                yield info.url, info.size_bytes
            return
        for folder, _, names in os.walk(urls.local_path(prefix)):
            for name in names:
                path = Path(folder, name)
                size = path.stat().st_size if path.exists() else None  # a link may lead nowhere
                yield f"{prefix}{path.relative_to(urls.local_path(prefix))}", size


def _kind_of(url: str) -> str:
    """Return which shard a file is by its name, or its extension."""
    return "tar" if tar_extension(url) else urls.extension(url)[1:]


def _tar_of(entry: Any, prefix: str, name: str) -> KnownShard:
    try:
        url, num_samples, size = str(entry["url"]), int(entry["nsamples"]), entry.get("filesize")
        hashes: Mapping[str, str] = {"md5": str(entry["md5sum"])} if entry.get("md5sum") else {}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SourceError(f"{name} has a shard without url and nsamples ({error!r}): write it again") from error
    path = urls.without_file(url)
    place = path if urls.is_remote(path) or path.startswith("/") else prefix + path
    files = (ShardFile(basename=url, bytes=size or 0, hashes=hashes),) if hashes else ()
    return KnownShard(place, "tar", num_samples, size, files)


class FileRange:
    """The bytes of a file of this disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = path.stat().st_size
        """Size of the file."""

    def read_at(self, offset: int, num_bytes: int, /) -> bytes:
        """Return the bytes from `offset` on."""
        with open(self._path, "rb") as file:
            file.seek(offset)
            return file.read(num_bytes)


@contextlib.contextmanager
def _content(path: Path, name: str) -> Iterator[FileRange]:
    """Give what a tar holds: itself, or what it is unpacked, where it is compressed as a whole."""
    if (compression := compression_of(FileRange(path).read_at(0, MAGIC_BYTES))) is None:
        yield FileRange(path)
        return
    with contextlib.ExitStack() as exit_:
        with temporary_disk(f"{name} is unpacked there"):
            copy = Path(exit_.enter_context(tempfile.TemporaryDirectory(prefix="sqlstream-shards-")), "shard")
            with open(copy, "wb") as file:
                file.writelines(decompress_whole(_chunks(path), compression, name))
        yield FileRange(copy)


def _tar_samples(content: FileRange, name: str) -> Iterator[list[TarMember]]:
    for _, parts in group(read_members(content, name), name):
        yield list(parts.values())


def tar_offsets(path: Path, name: str) -> bytes:
    """Return u64 offset of the first header of each sample of a tar, and of the end of the last one.

    Raises:
        SourceError: It is damaged, or compressed, so that no offset leads to a sample.
    """
    if compression_of(FileRange(path).read_at(0, MAGIC_BYTES)) is not None:
        raise SourceError(f"{name} is compressed as a whole, where no offset leads to a sample: unpack it, or leave it out")
    starts, end = array("Q"), 0
    for parts in _tar_samples(FileRange(path), name):
        starts.append(min(part.start for part in parts))
        last = max(part.offset + part.size for part in parts)
        end = last + -last % 512
    starts.append(end)
    return little_endian(starts)


def tar_entry(path: Path, url: str) -> dict[str, Any]:
    """Return what an index of wids says of a tar."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return {"url": url, "nsamples": _num_tar(path, urls.redact(url)), "filesize": path.stat().st_size, "md5sum": digest}


def _num_tar(path: Path, name: str = "it") -> int:
    with _content(path, name) as content:
        return sum(1 for _ in _tar_samples(content, name))


def _num_zip(path: Path) -> int:
    try:
        with zipfile.ZipFile(path) as archive:
            if (bad := archive.testzip()) is not None:
                raise DamagedShardError(f"its member {bad!r} has another CRC than the directory says")
            found = [split_name(name) for name in archive.namelist() if not name.endswith("/") and not is_hidden(name)]
    except (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError) as error:
        raise DamagedShardError(f"as a ZIP archive: {error}") from error
    return len({name[0] for name in found if name is not None})


def _num_parquet(path: Path) -> int:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return sum(file.read_row_group(number).num_rows for number in range(file.num_row_groups))
    except (OSError, pa.ArrowException) as error:
        raise DamagedShardError(f"as a Parquet file: {error}") from error


def _chunks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while chunk := file.read(_PIECE_BYTES):
            yield chunk


_COUNTS = {"tar": _num_tar, "zip": _num_zip, "parquet": _num_parquet}
"""What reads a file as a whole and counts its samples."""


def totals(shards: Sequence[KnownShard]) -> tuple[int | None, int | None]:
    """Return samples and bytes of all shards; None where those of one are not known."""
    samples = [shard.num_samples for shard in shards]
    sizes = [shard.size_bytes for shard in shards]
    return _sum(samples), _sum(sizes)


def _sum(numbers: Sequence[int | None]) -> int | None:
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None
