"""Options as frozen values, checked once.

Public constructors take what users know (many loose parameters) and turn it at once into these.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Literal, TypeVar

from sqlstream.environment import default_cache_directory as default_cache_directory  # noqa: PLC0414 - it is read from here, too
from sqlstream.errors import ConfigError
from sqlstream.sizes import AS_IT_IS as AS_IT_IS  # noqa: PLC0414 - it is read from here, too
from sqlstream.sizes import AsItIs as AsItIs  # noqa: PLC0414 - it is read from here, too
from sqlstream.sizes import Limit as Limit  # noqa: PLC0414 - it is read from here, too
from sqlstream.sizes import parse_bytes as parse_bytes  # noqa: PLC0414 - it is read from here, too
from sqlstream.sizes import parse_duration as parse_duration  # noqa: PLC0414 - it is read from here, too
from sqlstream.sizes import parse_limit as parse_limit  # noqa: PLC0414 - it is read from here, too


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How bytes are read from storage: who reads where, which chooses the helper process, and how, which goes with requests."""

    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    """Backend settings as fsspec users write them: `key`, `secret`, `endpoint_url`, `region`, `anon`, `token`, `backend`, …;
    copied with the dicts and lists in them: a later change would change the server, and not the keys of objects."""
    credential_hosts: tuple[str, ...] = ()
    """Hosts and buckets that credentials and headers go to, beside those of the source (`storage.credentials.belongs_to`)."""
    is_signed: bool = True
    """False: for places that credentials do not belong to; `storage_options` has none then, and none are looked for."""
    num_retries: int = 3
    """Tries after the first one, on faults that can pass; 3 as in `sds`."""
    connect_timeout_seconds: float = 10.0
    """Time to a connection; 10 s is the least that survives a cold DNS and a TLS handshake on a busy node."""
    read_timeout_seconds: float = 60.0
    """Longest silence within a body, not the whole download; 60 s as botocore has it."""
    total_timeout_seconds: float = 600.0
    """Longest time of one request, its body included; what came is kept and the rest asked for, where the server allows it.
    600 s bring 6 GB at 10 MB/s; it is there for servers that drip."""
    num_threads: int | Literal["auto"] = "auto"
    """Downloads at a time of a dataset in a process; "auto" follows object size and latency (`storage.base.concurrency`)."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """`module:function` by scheme: what turns URLs of that scheme into bytes, a file or another URL, in the helper process."""

    def __post_init__(self) -> None:
        """Copy `storage_options`, take the settings of ours among them, and check ranges."""
        object.__setattr__(self, "storage_options", _copied(self.storage_options))
        if (hosts := self.storage_options.get("credential_hosts")) is not None:
            if not isinstance(hosts, (list, tuple, set, frozenset)) or not all(
                isinstance(host, str) and host for host in hosts
            ):
                raise ConfigError(
                    f"storage_options['credential_hosts']={hosts!r} is no list of hosts: give ['api.example.org', 's3://bucket']"
                )
            object.__setattr__(self, "credential_hosts", tuple(hosts))
        for key, name in _STORAGE_KEYS.items():
            if (value := self.storage_options.get(key)) is not None:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise ConfigError(f"storage_options[{key!r}]={value!r} is not a number")
                object.__setattr__(self, name, float(value))
            check_at_least(f"storage_options[{key!r}]", getattr(self, name), 0.001)
        check_at_least("num_downloading_retries", self.num_retries, 0)
        if self.num_threads != "auto":
            check_at_least("num_downloading_workers", self.num_threads, 1)
        backend = self.storage_options.get("backend", "obstore")
        if backend not in ("obstore", "fsspec"):
            raise ConfigError(f"storage_options['backend']={backend!r} is not one of 'obstore', 'fsspec'")
        _check_credentials(self.storage_options)
        _check_providers(self.providers)
        object.__setattr__(self, "providers", dict(self.providers))


def _check_credentials(options: Mapping[str, object]) -> None:
    """Raise if `credentials` names no function; what it holds instead is not shown."""
    name = options.get("credentials")
    if name is None:
        return
    if not _is_function(name):
        raise ConfigError(
            f"storage_options['credentials'] is a {type(name).__name__}, and not 'module:function': name a function "
            "that returns storage_options; a file system with credentials of its own is given as storage_options['filesystem']"
        )
    if options.get("filesystem") is not None:
        raise ConfigError("storage_options has 'credentials' and 'filesystem', which has its own: leave one of them out")


def _check_providers(providers: object) -> None:
    """Raise if providers are not named as functions, by scheme; which schemes may be, `storage.base.access` says."""
    cure = "give {'asset': 'module:function'}, a scheme and the function that turns its URLs into bytes, a file or another URL"
    if not isinstance(providers, Mapping):
        raise ConfigError(f"providers={providers!r} is no dict: {cure}")
    for kind, name in providers.items():
        if not isinstance(kind, str):
            raise ConfigError(f"providers has {kind!r} for a scheme, which is no text: {cure}")
        if not _is_function(name):
            more = "; the helper process imports it by its name" if callable(name) else ""
            raise ConfigError(f"providers[{kind!r}]={name!r} is not 'module:function': {cure}{more}")


def _is_function(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name) is not None


def _copied(value: object) -> object:
    """Return a value with containers of its own."""
    if isinstance(value, Mapping):
        return {key: _copied(inner) for key, inner in value.items()}
    return [_copied(inner) for inner in value] if type(value) is list else value


_STORAGE_KEYS = {
    "connect_timeout": "connect_timeout_seconds",
    "read_timeout": "read_timeout_seconds",
    "timeout": "total_timeout_seconds",
}
"""Keys of `storage_options` that are fields of `StorageOptions`: there they reach the helper through every constructor."""


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
        check_at_least("lazy_index_chunk_size", self.chunk_rows, 1)
        check_at_least("lazy_index_num_threads", self.num_threads, 1)
        check_at_least("lazy_index_prefetch_factor", self.num_ahead, 0)


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


DEFAULT_KEY_COLUMN = "index"
"""The column that names samples, as in `sds`, where `index_col_name` is left out and the column can."""


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
    """What runs `sql_query` and `where`: `'sqlite'`, or `'duckdb'` (extra) for functions that SQLite lacks."""
    decode: bool = True
    """Values of MDS shards are decoded as their index says; False: samples have the bytes of each value."""
    allow_pickle: bool = False
    """Decode pickles in shards, which run whatever code their writer put there."""
    offset_column: str | None = None
    """Column with the first byte of a row's part in the object that the column to download names; None: all of it."""
    length_column: str | None = None
    """Column with the number of bytes of that part."""
    index_members: tuple[str, ...] = ()
    """Members of TAR and ZIP shards (`json`, `txt`, `cls`), or columns of MDS, whose values are parsed into SQL columns."""
    damaged_shards: DamagedShards = DamagedShards.RAISE
    """What becomes of the samples of a shard that is damaged or cut off: `'raise'`, `'skip'`, or `'until_damage'`, which keeps
    those that lie before the damage."""

    def __post_init__(self) -> None:
        """Check words and marks."""
        object.__setattr__(self, "damaged_shards", word_of("damaged_shards", self.damaged_shards, DamagedShards))
        object.__setattr__(self, "index_members", tuple(sorted({*names_of("index_members", self.index_members)})))
        for name, flag in (("decode", self.decode), ("allow_pickle", self.allow_pickle)):
            if not isinstance(flag, bool):
                raise ConfigError(f"{name}={flag!r} is no bool: give True or False")
        if (self.offset_column is None) != (self.length_column is None):
            raise ConfigError(
                f"offset_column={self.offset_column!r}, length_column={self.length_column!r}: a part of an object has both: "
                "give both columns, or none"
            )
        for name, value, words in (
            ("sql_engine", self.sql_engine, ("sqlite", "duckdb")),
            ("on_source_change", self.on_source_change, ("rebuild", "raise")),
        ):
            if value not in words:
                raise ConfigError(f"{name}={value!r} is unknown: give one of {', '.join(words)}")
        for name, mark in (("delimiter", self.delimiter), ("quote_char", self.quote_char or None)):
            if mark is not None and (len(mark) != 1 or not mark.isascii()):
                raise ConfigError(f"{name}={mark!r} is not a single ASCII character")

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
        """Check texts, words and marks, and read sizes."""
        SourceOptions.__post_init__(self)
        for name, text in (("sql_query", self.sql_query), ("where", self.where), ("index_col_name", self.key_column)):
            if text is not None and not isinstance(text, str):
                raise ConfigError(f"{name}={text!r} is no text: give it as SQL, or as the name of a column")
        if self.join is not None and self.lazy is not None:
            raise ConfigError(
                "join needs all rows, which lazy_index_chunk_size leaves in their files: leave one of them out, or write a "
                "table with the joined columns (sqlstream index export) and stream that"
            )
        if self.offset_column is not None and self.lazy is not None:
            raise ConfigError(
                "offset_column needs all rows, which lazy_index_chunk_size leaves in their files: leave one of them out"
            )
        if self.columns_to_keep is not None and self.offset_column is not None and self.length_column is not None:
            kept = (*self.columns_to_keep, self.offset_column, self.length_column)
            object.__setattr__(self, "columns_to_keep", tuple(dict.fromkeys(kept)))
        if self.index_limit != "auto":
            object.__setattr__(self, "index_limit", parse_bytes(self.index_limit, "index_limit"))

    @property
    def path_columns(self) -> tuple[str, ...]:
        """Those of `columns_to_download` whose values may name objects: parsed members are values."""
        return tuple(name for name in self.columns_to_download if name not in self.index_members)

    @property
    def wanted_key(self) -> str:
        """The column that names samples, if it can."""
        return DEFAULT_KEY_COLUMN if self.key_column is None else self.key_column


Word = TypeVar("Word", bound=StrEnum)


def word_of(option: str, value: str, kind: type[Word]) -> Word:
    """Return the member of an enumeration that an option names.

    Raises:
        ConfigError: There is no such member.
    """
    if value not in tuple(kind):
        raise ConfigError(f"{option}={value!r} is unknown: give one of {', '.join(kind)}")
    return kind(value)


def names_of(option: str, names: Sequence[str] | None, what: str = "column names") -> tuple[str, ...]:
    """Return names as a tuple.

    Args:
        option: What the user calls them.
        names: The names.
        what: What they name.

    Raises:
        ConfigError: A single text was given, whose letters would be taken for names, or what is no list of texts.
    """
    cure = f"give a list of {what}"
    if isinstance(names, str):
        raise ConfigError(f"{option}={names!r} is a text: {cure}, [{names!r}]")
    try:
        found = tuple(() if names is None else names)
    except TypeError:
        raise ConfigError(f"{option}={names!r} is no list: {cure}") from None
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise ConfigError(f"{option} holds {wrong[0]!r}, which is no text: {cure}")
    return found


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ConfigError, with name and value, if `value` is below `least`, or no whole number although `least` is one."""
    must_be_whole = isinstance(least, int)
    try:
        is_right = not isinstance(value, bool) and not (value % 1 and must_be_whole)
    except TypeError:  # a text, say
        is_right = False
    if not is_right:
        raise ConfigError(f"{name}={value!r} is no {'whole number' if must_be_whole else 'number'}: give {least} or more")
    if value < least:
        raise ConfigError(f"{name}={value!r} is out of range: give {least} or more")


class OnCacheError(StrEnum):
    """What becomes of a step whose cache is broken (not: full)."""

    RAISE = "raise"
    BYPASS = "bypass"
    """Objects are read past the cache, to private files that live as long as they are needed."""


def cache_error_policy(value: OnCacheError | str) -> OnCacheError:
    """Return what `on_cache_error` says.

    Raises:
        ConfigError: An unknown word.
    """
    return word_of("on_cache_error", value, OnCacheError)


class OnError(StrEnum):
    """What becomes of a sample that fails."""

    REPLACE = "replace"
    """Another row stands in, chosen by (seed, epoch, position): all ranks keep their number of steps."""
    RAISE = "raise"
    SKIP = "skip"
    """It is left out: ranks may then make different numbers of steps."""


class ShardUnit(StrEnum):
    """What of a shard is fetched, and kept in the cache."""

    AUTO = "auto"
    """Whichever suits index, order and limit."""
    MEMBERS = "members"
    """The parts that samples want."""
    WHOLE = "whole"
    """The whole shard, whichever of its samples are wanted."""


class MemberForm(StrEnum):
    """What samples have of a part of a shard."""

    BYTES = "bytes"
    """Its content."""
    PATH = "path"
    """The path of a local file with its content, under its extension."""


DEFAULT_RETAINED = 192
"""Samples of a DataLoader worker of which nothing is known: (prefetch_factor 2 + 1) × a batch of 64."""
DEFAULT_PREFETCH = 256
"""Two samples for each thread that a helper has at most: one half of them is under way while the other half is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOptions:
    """How rows become samples."""

    columns_to_download: tuple[str, ...] = ()
    """Columns whose values are URLs or paths; in the sample they hold local paths."""
    content_columns: tuple[str, ...] | None = None
    """Columns of content in Parquet files that samples get; None: all of them."""
    shards: ShardUnit | str = ShardUnit.AUTO
    """What of shards is fetched."""
    members: MemberForm | str = MemberForm.BYTES
    """What samples have of parts of shards."""
    allow_missing_columns: bool = False
    """True: a row without a value in a downloaded column has None there; False: it fails."""
    allowed_roots: tuple[str, ...] = ()
    """Local directories and URL prefixes that a remote index may name, beside objects on servers."""
    none_to_empty_str: bool = False
    """True: a missing value in a text column reads as ''."""
    data_type: str | None = None
    """Put into each sample as `__data_type__` when given."""
    on_error: OnError | str = OnError.REPLACE
    max_failure_ratio: float = 0.1
    """More failed samples than this stop the run; one in ten is no accident any more."""
    prefetch: int = DEFAULT_PREFETCH
    """Samples planned ahead of the one being yielded."""
    prefetch_bytes: int = 1 << 30
    """Bytes acquired ahead, as far as sizes are known; arbitrary, twice what downloads have under way at most."""
    retained_samples: int | None = None
    """Paths of so many yielded samples stay valid in a DataLoader worker; None: of those that its loader has under way."""
    retained_accesses: int = 64
    """Paths of so many samples of random access stay valid."""
    num_random_access_retries: int = 5
    """Tries of `dataset[i]` after the first one, when storage fails; 5 as in `sds`."""
    print_exceptions: bool = False
    """Log each failed sample as a warning, not only the first one."""
    print_traceback: bool = False
    """Log its traceback, too."""
    seed_transforms: bool = True
    """Seed python's, numpy's and torch's global generators by (seed, epoch, position) while a sample's transforms run."""

    def __post_init__(self) -> None:
        """Check ranges."""
        check_at_least("prefetch", self.prefetch, 1)
        check_at_least("prefetch_bytes", self.prefetch_bytes, 1)
        check_at_least("num_random_access_retries", self.num_random_access_retries, 0)
        check_at_least("max_failure_ratio", self.max_failure_ratio, 0.0)
        if not self.max_failure_ratio <= 1:
            raise ConfigError(f"max_failure_ratio={self.max_failure_ratio} is out of range: give a share from 0 to 1")
        if self.retained_samples is not None:
            check_at_least("retained_samples", self.retained_samples, 1)
        object.__setattr__(self, "on_error", word_of("on_error", self.on_error, OnError))
        object.__setattr__(self, "shards", word_of("shards", self.shards, ShardUnit))
        object.__setattr__(self, "members", word_of("members", self.members, MemberForm))
        if self.members is MemberForm.PATH:
            if self.shards is ShardUnit.WHOLE:
                raise ConfigError("members='path' fetches each part as a file, and shards='whole' none: leave one of them out")
            object.__setattr__(self, "shards", ShardUnit.MEMBERS)
