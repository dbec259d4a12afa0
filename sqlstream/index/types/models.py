"""The values of an index: columns, sources, what an index file says of itself; the names in the file.

An index file is one immutable SQLite database:

    rows      row INTEGER PRIMARY KEY (dense from 0), then one column for each source column
    columns   position, name (logical), physical (in `rows`), arrow_field, type, declared, has_nan
    sources   position, url (redacted), size_bytes, etag, first_row
    meta      key, value
    listed    row, what a listing said of the objects that the row names (JSON); only where a source is a remote directory
    members   row, shard, where the parts of the sample lie in it (`storage/members/places.py`); of shards only
    member_columns, shards   names of parts, and what is known of each shard: samples, compression, damage
    footers, chunks   of Parquet files whose content stays in place, and of lazy indexes (`build/parquet/chunks.py`)
    dataframe, samples   views over `rows` as users' SQL sees it (NaN reads as NULL, widened columns have one type, columns
                         in place are left out)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from sqlstream.storage.base.access import OWN, Access

if TYPE_CHECKING:  # pyarrow is slow to import, and most of the command line needs no types
    import pyarrow as pa

Decode = Callable[[Any], object]
"""Turns a stored value back."""

FORMAT_VERSION = 1
"""Grows when an older sqlstream would misread the file; it is part of every fingerprint."""
APPLICATION_ID = 0x73717369
"""'sqsi' in ASCII: the header of an index, as 'sqst' is a ledger's."""
ROW = "row"
"""The column of row ids; a source column of this name gets another physical one."""
NO_NAMES = frozenset((b"true", b"false"))
"""What SQLite takes for a truth value in quotes, too: a view has no columns of these names."""
VIEWS = ("dataframe", "samples")
"""Names of the table in users' SQL."""
ENCODING = b"sqlstream.encoding"
"""Key in an Arrow field's metadata: how its values are written where the Arrow type alone does not tell."""
ALL_MISSING = b"sqlstream.all_missing"
"""Key in the metadata of a field of text: all values are words such as this one, which say among numbers that there is none."""
JSON = b"json"
"""Any JSON value, as JSON text; lists and objects of JSON sources, which have no fixed shape."""
UUID = b"uuid"
"""16 bytes that Arrow calls a UUID."""
BOOL8 = "arrow.bool8"
"""Arrow's name of the extension type whose values are bytes that stand for true and false."""
OPAQUE = "arrow.opaque"
"""Arrow's name of the extension type whose values are another system's own bytes."""
ANY = b"any"
"""A computed column with values of several SQLite types, given back as SQLite has them."""
MEMBER = b"member"
"""Content that lies in shards: rows have its size in bytes, or what it says, and samples the content."""
SHARD_URL = b"shard_url"
"""Position of a shard among the files of the index, which reads as the shard's URL."""
MOMENT_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
"""Digits of a moment's seconds in the file, by the unit of its column."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One source column, and where it is in the file."""

    name: str
    """As the source spells it; the key in a sample."""
    physical: str
    """As it is spelled in `rows` and in users' SQL: differs from `name` where SQLite cannot tell two names apart."""
    position: int
    """From 0, `row` not counted."""
    arrow_field: bytes
    """The Arrow type: a serialised schema with this one field."""
    type: str
    """The Arrow type, readable."""
    declared: str
    """Its type in `rows`: INTEGER, TEXT or BLOB (none)."""
    has_nan: bool = False
    """True: some value is NaN, which `rows` holds as the text 'NaN' (SQLite would store NULL)."""
    is_in_place: bool = False
    """True: its values stay in the Parquet files of the source, `rows` has NULL, and SQL does not see it."""

    @property
    def is_member(self) -> bool:
        """Samples have the content of a part of a shard in place of its value."""
        return self.type == MEMBER.decode()

    @property
    def is_content(self) -> bool:
        """Its values lie in the files of the source, and cannot name rows: `rows` has their sizes, or NULL."""
        return self.is_member or self.is_in_place

    @property
    def expression(self) -> str:
        """Its value in `rows`, as SQL."""
        name = quote(self.physical)
        return name if self.type != SHARD_URL.decode() else f"(SELECT url FROM sources WHERE position = {name}) AS {name}"

    @cached_property
    def field(self) -> pa.Field[Any]:
        """The Arrow field."""
        import pyarrow as pa

        return pa.ipc.read_schema(pa.py_buffer(self.arrow_field)).field(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One table file of a source, with its version."""

    url: str
    """Credentials included; redacted before it is stored or shown. A local file: its absolute path."""
    size_bytes: int | None
    etag: str | None
    """The server's version; of a local file its modification time in nanoseconds."""
    content: str = ""
    """A digest of some of its bytes, where the server names no version that tells contents apart; else empty."""
    access: Access = field(default=OWN, compare=False)
    """On whose word it is read."""
    is_private: bool = field(default=False, compare=False)
    """It was found over a connection to this machine or a private network."""
    is_missing: bool = field(default=False, compare=False)
    """It was not there as it was looked for (`missing_shards`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionInfo:
    """A filter whose result is kept as positions beside its index file."""

    fingerprint: str
    base: str
    """Fingerprint of the index file that the positions point into."""
    query: str
    max_size: int | None
    num_selected: int
    engine: str = "sqlite"
    """In whose dialect the query is."""
    format_version: int = FORMAT_VERSION
    key_problem: str | None = None
    """Why the key column cannot name the selected rows, where it cannot name all rows either."""

    def to_json(self) -> str:
        """Return the text of a selection's file; earlier versions refuse selections whose keys have a problem, as they did."""
        return json.dumps({name: value for name, value in asdict(self).items() if name != "key_problem" or value is not None})


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedTable:
    """A table that was joined to the rows of an index."""

    name: str
    """As the user calls it."""
    columns: tuple[str, ...]
    """What the rows got of it, as the index calls them."""
    sources: tuple[SourceFile, ...]
    """Its files, redacted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DamagedShard:
    """A shard that was damaged when it was indexed."""

    shard: int
    """Its number in the source, as `__shard__` has it."""
    num_samples: int
    """Samples of it that are used."""
    damage: str
    """What is wrong with it, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexInfo:
    """What is known of an index without reading its rows."""

    fingerprint: str
    path: str
    src: str
    key_column: str | None
    """None: the number of the row names a sample."""
    columns: tuple[Column, ...]
    num_rows: int
    num_selected: int
    size_bytes: int
    """Of its file, and of its positions when it has some."""
    sources: tuple[SourceFile, ...]
    """Redacted; without those of joined tables."""
    query: str | None
    """The user's filter, or None."""
    created_at: str
    """UTC, ISO 8601."""
    is_lazy: bool = False
    """Its rows are not here: they stay in their files until they are needed."""
    joined: tuple[JoinedTable, ...] = ()
    """Tables whose columns its rows got."""
    num_uncounted: int = 0
    """Files of a lazy index whose rows were not counted as it was opened: `num_rows` has those of the others."""
    damaged: tuple[DamagedShard, ...] = ()
    """Shards of which not all samples are among the rows."""


def fingerprint(parts: dict[str, object]) -> str:
    """Return 32 hex digits that name `parts` (JSON values)."""
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=16).hexdigest()


def ruled(key: str, meta: Mapping[str, Any]) -> str:
    """Return the fingerprint of the rows in the file of this key: another one where earlier versions had other rows."""
    rule = meta.get("row_rule")
    return key if rule is None else fingerprint({"rows": key, "rule": rule})


def quote(name: str) -> str:
    """Return `name` as an SQL identifier, whatever is in it.

    Example:
        >>> quote('a"b')
        '"a""b"'
    """
    return '"' + name.replace('"', '""') + '"'


def identity(name: str) -> bytes:
    """Return what SQLite compares identifiers by: ASCII letters in lower case, all else as it is."""
    return name.encode("utf-8", "surrogatepass").lower()


def physical_name(name: str, taken: set[bytes]) -> str:
    """Return a name for the column `name` that SQLite can tell from those `taken`, and enter it there.

    Example:
        >>> physical_name("URL", {b"row", b"url"})
        'URL_1'
    """
    plain = name.replace("\0", "_") or "column"  # SQL text cannot hold NUL; an empty name is legal but unusable
    candidate, number = plain, 0
    while identity(candidate) in taken:
        number += 1
        candidate = f"{plain}_{number}"
    taken.add(identity(candidate))
    return candidate
