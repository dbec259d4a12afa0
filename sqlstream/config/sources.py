"""What an index is made of, and how."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from sqlstream.config.checks import check_at_least, check_word, flag_of, is_word, names_of, word_of
from sqlstream.errors import ConfigError
from sqlstream.sizes import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LazyOptions:
    """How an index is read whose rows stay in their Parquet files, or shards, until they are needed (`lazy_index_…`)."""

    chunk_rows: int
    """Row groups of fewer rows are fetched together, so many rows at a time at least; a shard is a chunk, whatever it has."""
    num_threads: int = 3
    """Chunks that a process has under way at a time; 3 as in `sds`."""
    num_ahead: int = 3
    """Chunks that a process fetches before they are needed; 3 as in `sds`."""

    @classmethod
    def of(cls, chunk_rows: int | None, num_threads: int, num_ahead: int) -> LazyOptions | None:
        """Return the options that users give as `lazy_index_…`; None: the index is built whole."""
        return None if chunk_rows is None else cls(chunk_rows=chunk_rows, num_threads=num_threads, num_ahead=num_ahead)

    def __post_init__(self) -> None:
        """Check ranges."""
        for field, name, least in (
            ("chunk_rows", "lazy_index_chunk_size", 1),
            ("num_threads", "lazy_index_num_threads", 1),
            ("num_ahead", "lazy_index_prefetch_factor", 0),
        ):
            object.__setattr__(self, field, check_at_least(name, getattr(self, field), least))


class Missing(StrEnum):
    """What becomes of a row whose key is in no row of a joined table."""

    RAISE = "raise"
    NULL = "null"
    DROP = "drop"


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinOptions:
    """Tables whose columns the rows get, by key."""

    tables: Mapping[str, Any]
    """What `src` may be (no database, no directory of samples), by the name of each."""
    on: str
    """The column of the source, and of each table, whose values are compared."""
    missing: Missing = Missing.RAISE
    """What becomes of a row without a partner."""

    @classmethod
    def of(cls, tables: Mapping[str, Any] | None, on: str | None, missing: str) -> JoinOptions | None:
        """Return the options that users give as `join`, `on` and `missing`; None: nothing is joined.

        Raises:
            ConfigError: One of them is no such thing, or one is given without the other.
        """
        what = word_of("missing", missing, Missing)
        if tables is not None and not isinstance(tables, Mapping):
            raise ConfigError(f"join={tables!r} is no dict: give names and tables, {{'latents': 's3://…/latents.parquet'}}")
        if not tables:
            if on is not None:
                raise ConfigError(
                    f"on={on!r} is the column by which tables are joined, and join names none: give join, or leave on out"
                )
            return None
        if wrong := [name for name in tables if not isinstance(name, str) or not name]:
            raise ConfigError(f"join has the name {wrong[0]!r}: give each table a name, which tells its columns from others")
        if not isinstance(on, str) or not on:
            raise ConfigError(f"on={on!r} names no column: give the one that the source and the tables of join have in common")
        if empty := [name for name, table in tables.items() if isinstance(table, str | list | tuple) and not table]:
            raise ConfigError(f"join[{empty[0]!r}] is empty: give a table file, a wildcard, or a table in memory")
        named = {name: os.fspath(table) if isinstance(table, os.PathLike) else table for name, table in tables.items()}
        return cls(tables=named, on=on, missing=what)


class DamagedShards(StrEnum):
    """What becomes of the samples of a shard that is damaged (`damaged_shards`)."""

    RAISE = "raise"
    """The damage is an error."""
    SKIP = "skip"
    """None of its samples are used."""
    UNTIL_DAMAGE = "until_damage"
    """Those before the damage are used, but for one that the damage may have cut."""


class MissingShards(StrEnum):
    """What becomes of a shard that is not there (`missing_shards`)."""

    RAISE = "raise"
    """It is an error."""
    SKIP = "skip"
    """It has no samples."""
    SKIP_UNREADABLE = "skip_unreadable"
    """The same; of a lazy index one that does not come for another reason is left out until the next epoch, too."""

    @property
    def leaves_out(self) -> bool:
        """A shard that is not there is no error."""
        return self is not MissingShards.RAISE


DEFAULT_KEY_COLUMN = "index"
"""The column that names samples, as in `sds`, where `index_col_name` is left out and the column can."""


class NewParts(StrEnum):
    """What becomes of parts of samples that the first shard of a lazy index has not (`new_parts`)."""

    LEAVE = "leave"
    """Samples come without them, which one warning says."""
    TAKE = "take"
    """Samples have them, though they are no columns of the index."""


def _check_encoding(name: str) -> None:
    """Raise ConfigError unless Python reads text in an encoding of this name."""
    try:
        b"a".decode(name, "replace")  # of no byte Python would not look the name up
    except (LookupError, ValueError) as error:  # such as 'rot13', which is none of text, and 'idna', which replaces nothing
        raise ConfigError(f"encoding={name!r} is none ({error}): give a name that Python has, such as 'latin-1'") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How a source is read: what few sources need (`source_options`)."""

    path_prefix: str | None = None
    """Where relative paths in rows start, instead of the place of the source."""
    delimiter: str | None = None
    """Delimiter of CSV files; None: a comma (a tab in .tsv), or ';', tab or '|' where the header has no comma but these."""
    quote_char: str = '"'
    """What values that hold the delimiter stand in, in CSV files; '' when nothing is quoted."""
    encoding: str | None = None
    """Encoding of CSV and JSON files, as Python names it (`'latin-1'`); None: UTF-8, or what a byte order mark says."""
    label_column: str | None = None
    """For a directory of samples: a column of this name holds each sample's folder, and keys are paths, unique per folder."""
    source_version: str | None = None
    """Any text, for sources that name no version themselves: a database is read again when this changes."""
    on_source_change: str = "rebuild"
    """What to do when the source is not what was indexed before: `'rebuild'` (and log it), or `'raise'` SourceChangedError;
    new files at the end of a wildcard or list are no change, they are added."""
    sql_engine: str = "sqlite"
    """What runs `sql_query`, `where`, and the SQL of weights, buckets and lengths: `'sqlite'`, or `'duckdb'` (extra) for
    functions that SQLite lacks."""
    decode: bool = True
    """Values of MDS shards are decoded as their index says; False: samples have the bytes of each value."""
    allow_pickle: bool = False
    """Decode pickles in shards, which run whatever code their writer put there."""
    allow_pipes: bool = False
    """Run commands that `src` spells as `pipe:…` and that do more than print one object; their output is a TAR shard."""
    offset_column: str | None = None
    """Column with the first byte of a row's part in the object that the column to download names; None: all of it."""
    length_column: str | None = None
    """Column with the number of bytes of that part."""
    index_members: tuple[str, ...] = ()
    """Members of TAR and ZIP shards (`json`, `txt`, `cls`), or columns of MDS, whose values are parsed into SQL columns."""
    damaged_shards: DamagedShards = DamagedShards.RAISE
    """What becomes of the samples of a shard that is damaged or cut off: `'raise'`, `'skip'`, or `'until_damage'`, which keeps
    those that lie before the damage."""
    missing_shards: MissingShards = MissingShards.RAISE
    """What becomes of a shard that is not there: `'raise'`, `'skip'`, or with `lazy_index_chunk_size` `'skip_unreadable'`: one
    that is there and does not come (no rights, timeouts) is left out of an epoch, too."""
    new_parts: NewParts = NewParts.LEAVE
    """With `lazy_index_chunk_size` and without `columns_to_download`: what becomes of parts of shards that the first shard has
    not: `'leave'` them out, or `'take'` them into samples."""

    def __post_init__(self) -> None:
        """Check words and marks."""
        object.__setattr__(self, "new_parts", word_of("new_parts", self.new_parts, NewParts))
        object.__setattr__(self, "missing_shards", word_of("missing_shards", self.missing_shards, MissingShards))
        object.__setattr__(self, "damaged_shards", word_of("damaged_shards", self.damaged_shards, DamagedShards))
        object.__setattr__(self, "index_members", tuple(sorted({*names_of("index_members", self.index_members)})))
        for name in ("decode", "allow_pickle", "allow_pipes"):
            object.__setattr__(self, name, flag_of(name, getattr(self, name)))
        if (self.offset_column is None) != (self.length_column is None):
            raise ConfigError(
                f"offset_column={self.offset_column!r}, length_column={self.length_column!r}: a part of an object has both: "
                "give both columns, or none"
            )
        check_word("sql_engine", self.sql_engine, ("sqlite", "duckdb"))
        check_word("on_source_change", self.on_source_change, ("rebuild", "raise"))
        for name in ("path_prefix", "delimiter", "quote_char", "encoding", "label_column", "offset_column", "length_column"):
            value = getattr(self, name)
            if not (value is None or isinstance(value, str) or (name == "path_prefix" and isinstance(value, os.PathLike))):
                raise ConfigError(f"{name}={value!r} is no text: give it as one, or leave it out")
        if self.path_prefix is not None and not os.fspath(self.path_prefix):  # a variable that is not set, say
            raise ConfigError("path_prefix='' is empty: give a place, '.' for the working directory, or leave it out")
        if self.encoding is not None:
            _check_encoding(self.encoding)
        for name, mark in (("delimiter", self.delimiter), ("quote_char", self.quote_char or None)):
            if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in "\0\r\n"):
                raise ConfigError(f"{name}={mark!r} is not a single ASCII character that stands within lines")
        if self.quote_char and self.delimiter == self.quote_char:
            raise ConfigError(f"delimiter and quote_char are both {self.delimiter!r}: give quote_char='' if nothing is quoted")

    @classmethod
    def of(cls, given: SourceOptions | Mapping[str, Any] | None) -> SourceOptions:
        """Return `given`, which may be a dict of fields.

        Raises:
            ConfigError: A key is not a field.
        """
        if given is None or isinstance(given, SourceOptions):
            return given or SourceOptions()
        known = [field.name for field in fields(SourceOptions)]
        if not isinstance(given, Mapping):
            raise ConfigError(f"source_options={given!r} is no dict: give a SourceOptions, or a dict of {', '.join(known)}")
        for key in given:
            if key not in known:
                raise ConfigError(f"source_options[{key!r}] is unknown: give one of {', '.join(known)}")
        return SourceOptions(**given)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexOptions(SourceOptions):
    """What is indexed, and which rows and columns of it are kept."""

    src: Any
    """A table file, a wildcard over them, a text file of paths, or a directory of samples, local or remote; the SQLAlchemy URL
    of a database; a table of pandas, polars or pyarrow; rows of an iterable or a function; a list of these, read in turn."""
    data_type: str | None = None
    """For a directory: which extension is the main one (`DataSampleType` value)."""
    key_column: str | None = None
    """The column that names samples (`index_col_name`): it must be there, unique and without NULL. None: `index` where it is
    so, else the number of the row."""
    columns_to_download: tuple[str, ...] = ()
    """Columns whose values are URLs or paths of objects to download."""
    columns_to_keep: tuple[str, ...] | None = None
    """Columns kept beside the key and the downloaded ones; None keeps all (`index_cols_to_keep`)."""
    allow_missing_columns: bool = False
    """True: a downloaded column that the index lacks reads as None in every row."""
    sql_query: str | None = None
    """`SELECT … FROM dataframe WHERE …`; `samples` is an alias of the table."""
    max_size: int | None = None
    """At most this many rows, from the start of the selection."""
    max_index_files: int | None = None
    """At most this many files of a wildcard or a list of paths (`max_index_files_to_use`)."""
    where: str | None = None
    """One more condition, on the result of `sql_query` if that is given: `score > 6 AND label = 'cat'`."""
    lazy: LazyOptions | None = None
    """Leave the rows in their Parquet files; None: build the index whole."""
    index_limit: int | str | None = "auto"
    """Most bytes of the directory of index files, those that are downloaded to be indexed included: a count, a text such as
    `'10gb'`, `'auto'` (a tenth of the file system), or None (no limit). Unused indexes are removed before it is an error."""
    index_free_bytes: int = 0
    """So much of that file system stays free (`min_free_bytes`)."""
    allowed_roots: tuple[str, ...] = ()
    """Local directories and URL prefixes that a remote list of tables may name."""
    credential_hosts: tuple[str, ...] = ()
    """Hosts and buckets whose tables a remote list may have read with credentials."""
    join: JoinOptions | None = None
    """Tables whose columns the rows get, by key; None: none."""
    largest_content_bytes: int = 512 << 20
    """Content of a row group of Parquet, beyond which it is copied: who reads one row has all of it in memory."""

    def __post_init__(self) -> None:
        """Check texts, words, numbers and marks, and read sizes."""
        SourceOptions.__post_init__(self)
        for name, text in (("sql_query", self.sql_query), ("where", self.where), ("index_col_name", self.key_column)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{name}={text!r} is no text: give it as SQL, or as the name of a column")
        object.__setattr__(self, "allow_missing_columns", flag_of("allow_missing_columns", self.allow_missing_columns))
        for field, name in (("max_size", "max_size"), ("max_index_files", "max_index_files_to_use")):
            if (limit := getattr(self, field)) is not None:
                object.__setattr__(self, field, check_at_least(name, limit, 1))
        if self.join is not None and self.lazy is not None:
            raise ConfigError(
                "join needs all rows, which lazy_index_chunk_size leaves in their files: leave one of them out, or write a "
                "table with the joined columns (sqlstream index export) and stream that"
            )
        if self.offset_column is not None and self.lazy is not None:
            raise ConfigError(
                "offset_column needs all rows, which lazy_index_chunk_size leaves in their files: leave one of them out"
            )
        if self.missing_shards is MissingShards.SKIP_UNREADABLE and self.lazy is None:
            raise ConfigError(
                "missing_shards='skip_unreadable' needs lazy_index_chunk_size: an index that is built whole would be without "
                "such shards for ever. Give it, or missing_shards='skip'"
            )
        if self.columns_to_keep is not None and self.offset_column is not None and self.length_column is not None:
            kept = (*self.columns_to_keep, self.offset_column, self.length_column)
            object.__setattr__(self, "columns_to_keep", tuple(dict.fromkeys(kept)))
        if not is_word(self.index_limit, "auto"):
            object.__setattr__(self, "index_limit", parse_bytes(self.index_limit, "index_limit"))

    @property
    def path_columns(self) -> tuple[str, ...]:
        """Those of `columns_to_download` whose values may name objects: parsed members are values."""
        return tuple(name for name in self.columns_to_download if name not in self.index_members)

    @property
    def wanted_key(self) -> str:
        """The column that names samples, if it can."""
        return DEFAULT_KEY_COLUMN if self.key_column is None else self.key_column
