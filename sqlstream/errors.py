"""Every error of sqlstream, grouped by what the one who catches it does next.

SqlStreamError
├── ConfigError (ValueError)                 fix the call
│   ├── CacheClosedError                     open the dataset or cache again; it is a CacheError, too
│   └── OutputExistsError (FileExistsError)   write elsewhere, or say exist_ok or resume
├── MissingDependencyError (ImportError)     install the named extra
├── UnknownLengthError (TypeError)           go on without a length, or iterate once
├── SourceError                              fix the data source
│   ├── SchemaError (ValueError)
│   ├── SourceChangedError                   rebuild the index
│   └── DamagedShardError                    mend the shard, or leave it out (damaged_shards)
├── IndexDatabaseError                       repair or rebuild the index
│   ├── QueryError (ValueError)              fix the SQL
│   │   └── EmptySelectionError              loosen the conditions
│   └── MigrationError                       upgrade sqlstream
├── StorageError (OSError)                   check the network, the path, the rights
│   ├── ObjectNotFoundError (FileNotFoundError)
│   ├── AccessDeniedError (PermissionError)
│   ├── ObjectChangedError                   refetch: the object is another one now
│   ├── FetchCancelledError                  nothing: we asked for it
│   └── TransientStorageError                retry later: our own retries are spent
├── CacheError                               look at `sqlstream cache stats`
│   ├── CacheDirectoryError                  give another directory, or mend its rights
│   ├── CacheFullError                       raise the limit or pin less
│   ├── CacheDamagedError                    run `sqlstream cache verify --repair`
│   └── CacheDiskError                        free space on the cache's disk, or look at its health
├── SampleError                              skip the sample, or fix it
│   ├── MissingFieldError (KeyError)         fix the row, or allow_missing_columns
│   ├── DecodeError (ValueError)
│   ├── EncodeError (ValueError)             fix the sample before it is written, or leave it out
│   ├── DamagedMemberError                   mend the shard; it is a SourceError, too
│   └── TransformError
├── TooManyFailuresError                     look at the failures; the data or the network is ill
└── StateError (ValueError)                  resume with the dataset the state came from
"""

from __future__ import annotations


class SqlStreamError(Exception):
    """Base of every error raised on purpose by sqlstream.

    Must be constructible from one string: `torch.utils.data.DataLoader` rebuilds a worker's
    error as `type(error)(text)` and falls back to `RuntimeError` when that fails
    (torch/_utils.py, `ExceptionWrapper.reraise`).

    Args:
        message: What happened, to which object, and what to do next.
        context: Facts for handlers and logs, e.g. `url=`, `row=`, `attempt=`.
    """

    def __init__(self, message: str = "", **context: object) -> None:
        super().__init__(message)
        self.context = context

    def __str__(self) -> str:
        """Return the message as it is (KeyError would quote it, OSError would look for an errno)."""
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[object, ...]:
        """Rebuild from the message, then restore the context."""
        return (type(self), (str(self),), {"context": self.context})


class ConfigError(SqlStreamError, ValueError):
    """An option is wrong; raised before any I/O."""


class OutputExistsError(ConfigError, FileExistsError):
    """There is something where a dataset is to be written."""


class MissingDependencyError(SqlStreamError, ImportError):
    """An optional dependency is not installed."""


class UnknownLengthError(SqlStreamError, TypeError):
    """It is not known yet how many rows a filter keeps; a TypeError, so that `list()` goes on without."""


class SourceError(SqlStreamError):
    """A data source cannot be read."""


class SchemaError(SourceError, ValueError):
    """A source lacks a field, or the field has another type."""


class SourceChangedError(SourceError):
    """A source is no longer the one that was indexed."""


class DamagedShardError(SourceError):
    """A shard is damaged or cut off, or not what its own table or index says of it."""


class IndexDatabaseError(SqlStreamError):
    """The index database is damaged."""


class QueryError(IndexDatabaseError, ValueError):
    """A user's SQL does not run on this index, or is not allowed."""


class EmptySelectionError(QueryError):
    """A filter keeps no row."""


class MigrationError(IndexDatabaseError):
    """The database was written by a newer sqlstream."""


class StorageError(SqlStreamError, OSError):
    """Bytes could not be read from storage."""


class ObjectNotFoundError(StorageError, FileNotFoundError):
    """No object at this URL."""


class AccessDeniedError(StorageError, PermissionError):
    """The credentials do not allow this read."""


class ObjectChangedError(StorageError):
    """The object changed between two reads."""


class FetchCancelledError(StorageError):
    """A download was given up because its owner asked for that, or stopped the fetcher."""


class TransientStorageError(StorageError):
    """A retryable failure outlived every retry."""


class CacheError(SqlStreamError):
    """The cache cannot serve this request."""


class CacheClosedError(ConfigError, CacheError):
    """A dataset or cache is used after it was closed, also where another thread closes it meanwhile."""


class CacheDirectoryError(CacheError):
    """The directory cannot be, or must not be, used as a cache."""


class CacheFullError(CacheError):
    """The limit leaves no room for the requested object."""


class CacheDamagedError(CacheError):
    """The ledger is not readable as a database."""


class CacheDiskError(CacheError):
    """The disk below the cache takes no more bytes, or fails."""


class SampleError(SqlStreamError):
    """One sample could not be produced."""


class MissingFieldError(SampleError, KeyError):
    """A row has no value in a column that must be downloaded."""


class DecodeError(SampleError, ValueError):
    """The bytes of a sample do not decode."""


class EncodeError(SampleError, ValueError):
    """A sample cannot be written in the format that was asked for."""


class DamagedMemberError(SampleError, SourceError):
    """A part of a shard is not what the shard says of it; samples of other parts are not concerned."""


class TransformError(SampleError):
    """A transform raised on a sample."""


class TooManyFailuresError(SqlStreamError):
    """The share of failed samples passed `max_failure_ratio`."""


class StateError(SqlStreamError, ValueError):
    """A state_dict does not belong to this dataset."""


def text_of(error: BaseException) -> str:
    """Return type and text of an error of other code, whose text may fail itself, or have what no file or log takes."""
    try:
        return f"{type(error).__name__}: {error}".encode(errors="backslashreplace").decode()
    except Exception:
        return f"{type(error).__name__}: its text cannot be made"
