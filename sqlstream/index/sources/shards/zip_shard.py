"""ZIP shards: members of one name are a sample, wherever in the archive they are; metadata inside describes them.

No metadata: a sample for each name without its extension, as in TAR shards; `label_column` holds its folder. With a
`metadata.csv`, `.jsonl` or `.parquet`: its rows. What `file_name` names is in a column `image`, `audio`, `video`, `text` or
`file`, by its extension, and what `mask_file_name` names in `mask`.
"""

from __future__ import annotations

import posixpath
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from sqlstream.errors import ConfigError, SchemaError, SourceError
from sqlstream.index.sources.base.base import PLAIN
from sqlstream.index.sources.base.byte_source import LocalBytes
from sqlstream.index.sources.formats.by_extension import FORMATS
from sqlstream.index.sources.places.folder import FILE_NAME, METADATA, PATHS
from sqlstream.index.sources.shards.columns import PartsBuilder, SampleParts, Texts
from sqlstream.index.sources.shards.layout import MembersAreBytes, PartFile, ReadPart, Scratch
from sqlstream.index.sources.shards.reading import ShardBytes, opened
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.sources.shards.values import check_bytes, check_members, with_values
from sqlstream.index.types.models import SourceFile
from sqlstream.index.types.pandas_import import load_pandas
from sqlstream.index.types.schema import TableSchema
from sqlstream.sample_types import EXTENSIONS, DataSampleType
from sqlstream.storage.base import urls
from sqlstream.storage.base.protocols import RemoteReader, ZipRecord
from sqlstream.storage.members import names
from sqlstream.storage.members.places import SamplePart
from sqlstream.storage.members.source import ByteRange
from sqlstream.storage.members.spilled import Spilled, are_unique
from sqlstream.storage.members.zip.directory import ZipMembers, read_directory
from sqlstream.storage.members.zip.member import ZipMember, content, local_name

_MEDIA = (DataSampleType.IMAGE, DataSampleType.VIDEO, DataSampleType.AUDIO, DataSampleType.TEXT)
_SIZE_FACT = 2
"""Place of the content's size among the facts of a part: method, bytes as stored, bytes of the content, its CRC-32, and that of
the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZipShard(MembersAreBytes):
    """A ZIP archive."""

    label_column: str | None = None
    """Column that gets each sample's folder; None: none."""
    index_members: tuple[str, ...] = ()
    """Columns of members that are parsed."""

    def __post_init__(self) -> None:
        """Check what is to be parsed."""
        check_members(self.index_members)

    @property
    def num_samples(self) -> int | None:
        """Nothing says it."""
        return None

    def identity(self) -> object:
        """Return its format, which columns are made, and what is parsed."""
        return ["zip", self.label_column, *self.index_members]

    def samples(self, file: SourceFile, remote: RemoteReader, scratch: Scratch) -> ShardSamples:
        """Return the samples of a shard; see `ShardLayout.samples`."""
        name = urls.redact(file.url)
        with opened(file, remote, here=scratch.here) as source:
            found = read_directory(source, name, folder=scratch.folder)
            if any(METADATA.fullmatch(member) and not names.is_hidden(member) for member in found.names()):
                if self.label_column is not None:
                    raise ConfigError(
                        f"label_column={self.label_column!r} is for ZIP files without metadata, and {name} has some, whose "
                        "rows are its samples: leave it out"
                    )
                members = {member.name: member for member in found if not names.is_hidden(member.name)}
                described = [member for member in members.values() if METADATA.fullmatch(member.name)]
                samples = _described(described, members, source, name, scratch.path)
            else:
                samples = _grouped(found, self.label_column, scratch.folder, name)
            if twice := set(samples.member_columns).intersection(samples.beside.schema.names if samples.beside else ()):
                raise SchemaError(
                    f"{name}: the column {min(twice)!r} is of content of its files, and of "
                    + ("its metadata: rename that column" if self.label_column is None else "label_column: give another name")
                )
            if not self.index_members:
                return samples
            return with_values(samples, self.index_members, _contents(samples, self.index_members, source, name), name)

    def file_of(self, part: SamplePart, column: str, row: Mapping[str, object]) -> PartFile:
        """Return a part with what inflates it; its extension is that of its name, which metadata have, or its column."""
        found = row.get(f"{column}_{FILE_NAME}", row.get(FILE_NAME))
        return PartFile(urls.extension(found if isinstance(found, str) else f"x.{column}"), ZipRecord(part.offset, *part.facts))

    def values(self, parts: Sequence[ReadPart], wanted: Sequence[str], name: str) -> dict[str, bytes]:  # noqa: ARG002 - all are
        """Return the content of members."""
        return {part.name: _content(part, name) for part in parts}


def _part(member: ZipMember) -> SamplePart:
    facts = (member.method, member.stored_size, member.size, member.crc, zlib.crc32(member.name.encode()))
    return SamplePart(0, member.start, member.stop - member.start, facts)


def _content(part: ReadPart, shard: str) -> bytes:
    """Return the content of a member, whose local header must have the name that the directory has."""
    method, stored_size, size, crc, of_name = part.part.facts
    written = local_name(part.whole)
    if zlib.crc32(written.encode()) != of_name:
        raise SourceError(
            f"{shard}: the member at byte {part.part.offset} is {written[:200]!r} by its local header, and has another name in "
            "the directory: the archive is damaged, or made to deceive"
        )
    start = part.part.offset
    return content(part.whole, ZipMember(written, start, start + part.part.size, method, stored_size, size, crc), shard)


def _contents(samples: ShardSamples, wanted: Sequence[str], source: ShardBytes, shard: str) -> dict[int, bytes]:
    """Return the contents of the members of some columns, by their places."""
    found = {
        part.offset: ReadPart(name, b"", part) for parts in samples.parts for name, part in parts.items() if name in wanted
    }
    for name, _, part in found.values():
        check_bytes(max(part.size, part.facts[_SIZE_FACT]), f"{shard}: the member at byte {part.offset}", name)
    places = sorted(found)
    read = source.read_spans([(place, place + found[place].part.size) for place in places])
    return {place: _content(found[place]._replace(data=data), shard) for place, data in zip(places, read, strict=True)}


def _grouped(members: ZipMembers, label_column: str | None, folder: Path, shard: str) -> ShardSamples:
    """Return a sample for each name without extension, in the order of the directory."""
    found = _neighbours(members, folder)
    if found is None:
        found = _scattered(members, shard)
    labels = None
    if label_column is not None:
        load_pandas()
        labels = pa.table({label_column: [posixpath.basename(posixpath.dirname(key)) or None for key in found.keys]})
    return ShardSamples(keys=found.keys, parts=found.parts, beside=labels, size_fact=_SIZE_FACT)


class _Grouped(NamedTuple):
    """Samples of members."""

    keys: Texts
    parts: SampleParts


def _neighbours(members: ZipMembers, folder: Path) -> _Grouped | None:
    """Return samples whose members follow each other; None: those of one key may be elsewhere, too, or have an extension twice.

    As most archives have them: hashes of keys tell it.

    Args:
        members: Of the archive.
        folder: Where what memory should not hold is written.
    """
    parts, hashes = PartsBuilder("HqqII", folder), Spilled("q", folder)

    def keys() -> Iterator[str]:
        last = None
        extensions = set[str]()
        for member in members:
            name = member.name
            if names.is_hidden(name) or (split := names.split_name(name)) is None:
                continue
            key, extension = split
            if key != last:
                if last is not None:
                    parts.end_sample()
                    hashes.spill()
                hashes.last.append(hash(key))
                yield key
                last = key
                extensions.clear()
            if extension in extensions:
                hashes.last.append(hash(key))  # as of a key that comes again
            extensions.add(extension)
            _, start, stop, *facts = member
            parts.add(extension, start, stop - start, *facts, zlib.crc32(name.encode()))
        if last is not None:
            parts.end_sample()

    found = Texts.of(keys(), folder)
    return _Grouped(found, parts.built()) if are_unique(hashes) else None


def _scattered(members: ZipMembers, shard: str) -> _Grouped:
    """Return samples whose members are anywhere.

    Raises:
        DamagedShardError: A sample has an extension twice, but for its case: of members of one name the last is taken.
    """
    samples: dict[str, dict[str, SamplePart]] = {}
    for member in members:
        if not names.is_hidden(member.name) and (split := names.split_name(member.name)) is not None:
            parts = samples.setdefault(split[0], {})
            if split[1] in parts:
                raise names.twice(shard, member.name, next(name for name in members.names() if names.split_name(name) == split))
            parts[sys.intern(split[1])] = _part(member)
    return _Grouped(Texts.of(samples), SampleParts.of(samples.values()))


def _described(
    files: Sequence[ZipMember], members: Mapping[str, ZipMember], source: ByteRange, name: str, temporary: Callable[[str], Path]
) -> ShardSamples:
    """Return the rows of metadata files, with the members that they name."""
    tables, keys, parts = dict[str, pa.Table](), list[str](), list[dict[str, SamplePart]]()
    for file in sorted(files, key=lambda file: file.name):
        where = f"{name}: {file.name}"
        record = source.read_at(file.start, file.stop - file.start)
        table = _read_table(content(record, file, name), file.name, where, temporary("metadata"))
        paths = {column: match for column in table.schema.names if (match := PATHS.fullmatch(column)) is not None}
        columns = {column: match[1] or "" for column, match in paths.items()}  # of content; '': it is called by its extension
        if FILE_NAME not in columns:
            raise SchemaError(f"{where} has no column {FILE_NAME!r}, which says what its rows describe: add it")
        if any(match[2] for match in paths.values()):
            raise SchemaError(f"{where} has lists of file names, which are not read from a ZIP: give each file a column")
        folder = posixpath.dirname(file.name)
        at = table.schema.names.index  # of a column that comes twice the first: what becomes of the rows says so
        named = {name: [_found(folder, value, members, where) for value in table[at(name)].to_pylist()] for name in columns}
        for number in range(table.num_rows):
            found = {column: values[number] for column, values in named.items()}
            parts.append(_parts(found, columns, f"{where}: row {number}"))
            main = found[FILE_NAME]
            keys.append(f"{file.name}:{number}" if main is None else main.name)
        tables[where] = table
    return ShardSamples(keys=Texts.of(keys), parts=SampleParts.of(parts), beside=_joined(tables, name), size_fact=_SIZE_FACT)


def _parts(found: Mapping[str, ZipMember | None], columns: Mapping[str, str], row: str) -> dict[str, SamplePart]:
    """Return the members that a row of metadata names, by the columns of their content.

    Raises:
        SchemaError: Two have one column.
    """
    parts = dict[str, SamplePart]()
    for by, member in found.items():
        if member is None:
            continue
        if (column := _column(columns[by], member.name)) in parts:
            raise SchemaError(f"{row} has two files for the column {column!r}, one of them by {by!r}: rename that column")
        parts[column] = _part(member)
    return parts


def _joined(tables: Mapping[str, pa.Table], name: str) -> pa.Table:
    """Return the rows of metadata files, by their names, as one table.

    Raises:
        SchemaError: A column has values of conflicting types.
    """
    if len(tables) == 1:
        return next(iter(tables.values()))
    merged = TableSchema("leave it out of the metadata")
    for where, table in tables.items():
        merged.merge(table.schema, where)
    try:
        found = pa.concat_tables(tables.values(), promote_options="permissive")
    except pa.ArrowException as error:
        raise SchemaError(f"{name}: its metadata have values of several types ({error}): give each column one type") from error
    fields = [merged.fields[field.name].with_type(field.type) for field in found.schema]  # JSON, also behind NULL alone
    return pa.Table.from_arrays(found.columns, schema=pa.schema(fields))


def _read_table(data: bytes, file: str, where: str, temporary: Path) -> pa.Table:
    try:
        temporary.write_bytes(data)
        table = FORMATS[urls.extension(file)](LocalBytes(temporary), where, PLAIN)
        names_of = table.schema().names
        return pa.Table.from_batches(table.batches(names_of), pa.schema(list(table.schema())))
    finally:
        temporary.unlink(missing_ok=True)


def _column(known: str, name: str) -> str:
    if known:
        return known
    extension = urls.extension(name).lstrip(".").lower()
    return next((str(kind) for kind in _MEDIA if extension in EXTENSIONS[kind]), "file")


def _found(folder: str, value: object, members: Mapping[str, ZipMember], where: str) -> ZipMember | None:
    if value is None:
        return None
    written = str(value)  # names without extensions may read as numbers
    path = posixpath.normpath(posixpath.join(folder, written))
    if (member := members.get(path)) is None or written.startswith("/"):
        raise SourceError(f"{where} names {value!r}, and the archive has no such file: mend the metadata")
    return member
