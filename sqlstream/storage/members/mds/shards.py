"""MDS, the shard format of MosaicML Streaming: its index, and the table of each shard. `decoder` decodes samples.

    index.json    {"version": 2, "shards": [{format, basename, bytes, hashes, samples, columns …}, …]}
    shard.mds     u32 n │ u32 offset[n+1] │ JSON, skipped │ sample 0 │ sample 1 │ …     offset[n] = size of the file
    sample        u32 length of each column without a fixed size │ values of all columns, in the index's order

All numbers are little endian. Offsets have 32 bits: a writer that was allowed shards beyond 4 GiB wrapped them, and such files
exist, so offsets must rise up to the size that the index gives. The formats whose table is a file of its own (`.meta`) have the
same index and table; their rows are read by `split`.

Pure: bytes in, values out. Names in an index are data of its writer: what could lead out of its directory is refused.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeGuard
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt

from sqlstream.errors import DamagedShardError, SourceError

FORMATS = ("mds", "json", "csv", "tsv", "xsv")
"""Formats of MosaicML Streaming's writers."""
COMPRESSIONS = ("zstd", "gz", "br", "bz2", "snappy")
"""Its compressions; in an index a level may follow (`zstd:7`)."""
_SEPARATORS = {"csv": ",", "tsv": "\t"}
_VERSION = 2
_MAX_OFFSET = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A file that an index names."""

    basename: str
    """Path below the directory of the index, as written; never out of it."""
    bytes: int
    """Size of the file."""
    hashes: Mapping[str, str]
    """Digests of the file in lower-case hexadecimal, by algorithm."""


class MdsColumn(NamedTuple):
    """A column of a shard."""

    name: str
    encoding: str
    size: int | None
    """Bytes of each value; None: each sample says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MdsShard:
    """A shard of an index: an MDS file, or the data and the table of a split format; each may be stored compressed."""

    format: str
    """One of `FORMATS`."""
    samples: int
    """Number of samples; 0 is legal."""
    columns: tuple[MdsColumn, ...]
    """Columns in stored order."""
    raw: ShardFile
    """The file of the samples, not compressed."""
    zip: ShardFile | None
    """The same as it is stored, if it is stored compressed."""
    meta: ShardFile | None
    """The file of the table, not compressed; None: the table is at the head of `raw` (MDS)."""
    zip_meta: ShardFile | None
    """The same as it is stored, if it is stored compressed."""
    compression: str | None
    """`algorithm` or `algorithm:level` of the stored files; None: they are as `raw` and `meta` say."""
    separator: str
    """What stands between the values of a row (csv, tsv, xsv), else ''."""
    newline: str
    """What ends a row of a split format, else ''."""


# -- the index --------------------------------------------------------------------------------------------------------


def is_mds_index(document: object) -> bool:
    """Return whether a parsed `index.json` is MosaicML's, of any version: those of wids and LitData have other keys.

    Example:
        >>> is_mds_index({"version": 2, "shards": []}), is_mds_index({"chunks": [], "config": {}})
        (True, False)
    """
    return isinstance(document, Mapping) and "version" in document and isinstance(document.get("shards"), list)


def parse_index(data: bytes, name: str) -> tuple[MdsShard, ...]:
    """Return the shards of an `index.json`, in its order.

    Args:
        data: The file.
        name: The file's name in messages.

    Raises:
        SourceError: It is none, of another version, lacks something, or names a file outside its directory.
    """
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{name} is not JSON: {error}") from error
    if not is_mds_index(document):
        raise SourceError(f"{name} is no index of MosaicML Streaming: it needs the keys `version` and `shards`")
    _check_version(document, name)
    parser = _IndexParser()
    return tuple(parser.shard(_Object(shard, f"{name}: shard {n}")) for n, shard in enumerate(document["shards"]))


def _check_version(mapping: Mapping[str, Any], where: str) -> None:
    if mapping.get("version") != _VERSION:
        raise SourceError(f"{where}: version {mapping.get('version')!r} is not read: write the dataset in version {_VERSION}")


class _Object:
    """A JSON object of an index, whose values are checked as they are read."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise SourceError(f"{where} is no JSON object but {type(value).__name__}")
        self.value: dict[str, Any] = value
        self.where = where

    def wrong(self, key: str, wanted: str) -> SourceError:
        """Return the error for a value that is not as it must be."""
        there = f"is {reprlib.repr(self.value[key])}" if key in self.value else "is missing"
        return SourceError(f"{self.where}: `{key}` {there}: expected {wanted}")

    def count(self, key: str) -> int:
        """Return a number that is not negative."""
        value = self.value.get(key)
        if type(value) is not int or value < 0:
            raise self.wrong(key, "a whole number, 0 or more")
        return value

    def text(self, key: str) -> str:
        """Return a text."""
        value = self.value.get(key)
        if not is_text(value):
            raise self.wrong(key, "a text")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts."""
        values = self.value.get(key)
        if not isinstance(values, list) or not all(map(is_text, values)):
            raise self.wrong(key, "a list of texts")
        return values


class _IndexParser:
    """Parses the shards of one index, of which there may be 10^5: columns equal to those of the shard before are one object."""

    def __init__(self) -> None:
        self._written: list[object] = []
        self._columns: tuple[MdsColumn, ...] = ()

    def shard(self, given: _Object) -> MdsShard:
        """Return one shard."""
        _check_version(given.value, given.where)
        layout = given.text("format")
        if layout not in FORMATS:
            raise given.wrong("format", f"one of {', '.join(FORMATS)}")
        is_split = layout != "mds"
        shard = MdsShard(
            format=layout,
            samples=given.count("samples"),
            columns=self._columns_of(given, layout),
            raw=_required_file(given, "raw_data"),
            zip=_file(given, "zip_data"),
            meta=_required_file(given, "raw_meta") if is_split else None,
            zip_meta=_file(given, "zip_meta") if is_split else None,
            compression=_compression(given),
            separator=_SEPARATORS.get(layout) or (_mark(given, "separator") if layout == "xsv" else ""),
            newline=_mark(given, "newline") if is_split else "",
        )
        stored = [shard.compression is None, shard.zip is None, *([shard.zip_meta is None] if is_split else [])]
        if len(set(stored)) > 1:
            raise SourceError(f"{given.where}: `compression`, `zip_data` and `zip_meta` do not fit each other")
        if table_bytes(shard) > (shard.meta or shard.raw).bytes:
            raise SourceError(f"{given.where}: `samples` is {shard.samples}: their table is longer than its file")
        return shard

    def _columns_of(self, given: _Object, layout: str) -> tuple[MdsColumn, ...]:
        keys = ("columns", "column_names", "column_encodings", "column_sizes")
        written = [layout, *map(given.value.get, keys)]
        if written != self._written:
            self._columns, self._written = _columns(given, layout), written
        return self._columns


def _file(given: _Object, key: str) -> ShardFile | None:
    return None if given.value.get(key) is None else _required_file(given, key)


def _required_file(given: _Object, key: str) -> ShardFile:
    part = _Object(given.value.get(key), f"{given.where}: `{key}`")
    basename = part.text("basename")
    if leaves_directory(basename):
        raise part.wrong("basename", "the name of a file below the directory of the index")
    hashes = part.value.get("hashes") or {}
    if not isinstance(hashes, dict) or not all(isinstance(digest, str) for digest in hashes.values()):
        raise part.wrong("hashes", "an object of texts")
    return ShardFile(basename=basename, bytes=part.count("bytes"), hashes=hashes)


def is_text(value: object) -> TypeGuard[str]:
    """Return whether a value of JSON is a text that UTF-8 and SQLite can hold: half a surrogate pair is not."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def leaves_directory(basename: str) -> bool:
    r"""Return whether a name could lead out of the directory that it is joined to: by dots, a root, a drive or a scheme.

    Example:
        >>> [leaves_directory(name) for name in ("0/shard.00000.mds", "../x", "/x", "a/%2e%2e/x", "s3://b/x", "c:\\x", "")]
        [False, True, True, True, True, True, True]
    """
    is_other = any(mark in basename for mark in ("\\", "\0", "://", "::"))
    return is_other or any(unquote(part) in ("", ".", "..") for part in basename.split("/"))


def _compression(given: _Object) -> str | None:
    if given.value.get("compression") is None:
        return None
    compression = given.text("compression")
    if compression.partition(":")[0] not in COMPRESSIONS:
        raise given.wrong("compression", f"one of {', '.join(COMPRESSIONS)}")
    return compression


def _mark(given: _Object, key: str) -> str:
    if not given.text(key):
        raise given.wrong(key, "what stands between values or rows")
    return given.text(key)


def _columns(given: _Object, layout: str) -> tuple[MdsColumn, ...]:
    if layout == "json":
        columns = _Object(given.value.get("columns"), f"{given.where}: `columns`")
        if not all(map(is_text, columns.value)):
            raise given.wrong("columns", "names that are texts")
        return tuple(MdsColumn(name, columns.text(name), None) for name in columns.value)
    names, encodings = given.texts("column_names"), given.texts("column_encodings")
    sizes = given.value.get("column_sizes") if layout == "mds" else [None] * len(names)
    if not isinstance(sizes, list) or not all(size is None or (type(size) is int and size >= 0) for size in sizes):
        raise given.wrong("column_sizes", "a list of whole numbers and null")
    if not len(names) == len(encodings) == len(sizes):
        raise SourceError(f"{given.where}: {len(names)} names, {len(encodings)} encodings and {len(sizes)} sizes of columns")
    if len(set(names)) < len(names):
        raise given.wrong("column_names", "each name once")
    return tuple(MdsColumn(*column) for column in zip(names, encodings, [size or None for size in sizes], strict=True))


# -- the table --------------------------------------------------------------------------------------------------------


def table_bytes(shard: MdsShard) -> int:
    """Return how many first bytes of the shard (of its meta file, where the format is split) are its table."""
    return 4 + 4 * (shard.samples + 1)


def offsets(table: bytes | memoryview, shard: MdsShard, name: str) -> npt.NDArray[np.int64]:  # [n + 1]
    """Return where each sample begins in the raw file, and where the last one ends.

    Args:
        table: First bytes of the file, `table_bytes(shard)` or more.
        shard: What the index says of it.
        name: The shard's name in messages.

    Raises:
        DamagedShardError: It is too short, of another number of samples, does not rise, or does not end with the file.
    """
    wanted = table_bytes(shard)
    if len(table) < wanted:
        raise DamagedShardError(f"{name}: its table has {wanted} bytes, and {len(table)} are there: the file is cut off")
    numbers = np.frombuffer(table, "<u4", shard.samples + 2)  # [n + 2]
    if numbers[0] != shard.samples:
        raise DamagedShardError(
            f"{name} has {numbers[0]} samples, the index says {shard.samples}: one of them is of another version"
        )
    found = numbers[1:].astype(np.int64)  # [n + 1]
    falls = np.flatnonzero(found[1:] <= found[:-1])  # [k]
    if len(falls):
        number = int(falls[0])
        raise DamagedShardError(
            f"{name}: sample {number} begins at {found[number]} and ends at {found[number + 1]}: offsets must rise"
            + _wrapped(shard)
        )
    if found[-1] != shard.raw.bytes:
        raise DamagedShardError(f"{name}: its last sample ends at {found[-1]}, the file at {shard.raw.bytes}" + _wrapped(shard))
    if shard.meta is None:
        if found[0] < wanted:
            raise DamagedShardError(f"{name}: sample 0 begins at {found[0]}, within the table of {wanted} bytes")
    elif found[0] != _header_bytes(shard):
        raise DamagedShardError(f"{name}: row 0 begins at {found[0]}, the header ends at {_header_bytes(shard)}")
    return found


def _header_bytes(shard: MdsShard) -> int:
    """Return the size of the line of names before the rows of a split format; JSONL has none."""
    names = shard.separator.join(column.name for column in shard.columns)
    return len((names + shard.newline).encode()) if shard.separator else 0


def _wrapped(shard: MdsShard) -> str:
    if shard.raw.bytes <= _MAX_OFFSET:
        return ""
    return "; it is beyond 4 GiB, where its offsets of 32 bits wrap: write it again with a `size_limit` below that"
