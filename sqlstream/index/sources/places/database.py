"""Any SQL database: a SQLAlchemy URL and a query that it runs.

    postgresql://host/db   through ADBC when `adbc-driver-postgresql` is installed (Arrow all the way), else SQLAlchemy
    postgresql+psycopg://  the named driver, through SQLAlchemy with a server-side cursor; so does every other dialect
    bigquery://project     through google-cloud-bigquery, with the storage API when that is installed

Rejected: connectorx (0.4.6), which cuts numerics to ten decimals without a word.

Rows are streamed to a temporary Arrow file first: types then hold for the whole result (a column's first value may be in the
last batch), and the database is let go before the index is written.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import importlib
import importlib.util
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc

from sqlstream.errors import ConfigError, MissingDependencyError, QueryError, SchemaError, SourceError
from sqlstream.index.sources.base.spool import Spool
from sqlstream.index.sql.expressions import one_select
from sqlstream.index.types.models import ENCODING, JSON, fingerprint, quote
from sqlstream.index.types.origins import is_local_database
from sqlstream.index.types.schema import TableSchema
from sqlstream.python_values import mixed_kinds
from sqlstream.storage.base import urls

_ADBC = {"postgres": "adbc_driver_postgresql", "postgresql": "adbc_driver_postgresql"}
_PACKAGES = {
    "postgres": "'sqlstream-data[postgres]'",
    "postgresql": "'sqlstream-data[postgres]'",
    "bigquery": "'sqlstream-data[bigquery]'",
    "duckdb": "duckdb-engine",  # SQLAlchemy's dialect: the extra has DuckDB itself
}
_FAILURES = frozenset(
    """
    ArrowException DatabaseError Error GoogleAPIError GoogleAuthError InterfaceError OSError SQLAlchemyError
    """.split()
)
"""Classes of what drivers raise; ADBC raises Arrow's and the system's for an error that comes after the first rows."""
_NEEDED_MODULE = re.compile(r"Required module '(\w+)' failed to import")
"""What DuckDB says where its Python client has no pytz for times with a zone, as of a wrong query, with a traceback."""
_ROWS_AT_A_TIME = 8192
_EARLIEST = {"date32[day]": -2_440_588, "timestamp[us]": -2_440_588 * 86_400_000_000}
"""The first day of PostgreSQL, in days since 1970; its first moment, in microseconds."""
_INTERVALS = (1186, 1187)
"""PostgreSQL's numbers of the types interval and interval[]."""
_BIND = re.compile(r"(?<![:\w\\]):(?=\w)")  # what SQLAlchemy's text() would take for a parameter


def is_database(src: str) -> bool:
    """Return True for a SQLAlchemy URL.

    Example:
        >>> is_database("postgresql+psycopg://host/db"), is_database("s3://bucket/x.csv")
        (True, False)
    """
    return _dialect(src) in urls.DATABASES


def identity(url: str) -> str:
    """Return a digest of which database it is: all of the URL but the password, which may change."""
    import sqlalchemy

    try:
        address = sqlalchemy.make_url(url)
    except (sqlalchemy.exc.ArgumentError, ValueError) as error:
        raise ConfigError(f"{urls.redact(url)} is no URL of a database: give dialect://user:password@host/database") from error
    return fingerprint({"database": address.render_as_string(hide_password=True)})


class DatabaseTable:
    """The result of a query.

    Args:
        url: Of the database, credentials included.
        query: What it runs, in its own SQL.
        spool: A path for a temporary file; the caller removes it.

    Raises:
        MissingDependencyError: The driver is not installed.
        QueryError: It is no single SELECT, or the database refuses it.
        SourceError: It cannot be reached, or breaks off.
    """

    def __init__(self, url: str, query: str, spool: Path) -> None:
        self._spool = Spool(spool)
        merged = TableSchema("cast it in the query")
        for batch in _stream(url, query):
            merged.merge(batch.schema, urls.redact(url))
            self._spool.write(batch)
        self._schema = pa.schema(list(merged.fields.values()))

    def schema(self) -> pa.Schema:
        """Return the columns with the types that hold for all rows."""
        return self._schema

    def batches(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yield the rows."""
        for batch in self._spool.batches():
            yield batch.select(list(names))


def _dialect(url: str) -> str:
    return urls.scheme(url).partition("+")[0]


def _stream(url: str, query: str) -> Iterator[pa.RecordBatch]:
    query = one_select(query, _dialect(url), urls.redact(url))
    with _errors(url, query):
        dialect = _dialect(url)
        if dialect == "bigquery":
            yield from _through_bigquery(url, query)
        elif dialect == urls.scheme(url) and dialect in _ADBC and _is_installed(_ADBC[dialect]):
            yield from _through_adbc(_ADBC[dialect], url, query)
        else:
            yield from _through_sqlalchemy(url, query)


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _through_sqlalchemy(url: str, query: str) -> Iterator[pa.RecordBatch]:
    import sqlalchemy

    address = sqlalchemy.make_url(re.sub(r"^postgres(?=[:+])", "postgresql", url))
    _check_is_there(url)
    engine = sqlalchemy.create_engine(address, poolclass=sqlalchemy.NullPool)
    read_only = {"postgresql_readonly": True} if engine.dialect.name == "postgresql" else {}
    with engine.connect().execution_options(stream_results=True, yield_per=_ROWS_AT_A_TIME, **read_only) as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA query_only=ON")
        with connection.execute(sqlalchemy.text(_BIND.sub(r"\\:", query))) as result:
            names = list(result.keys())
            _check_intervals(result.cursor, engine.dialect.name)
            yield _batch(names, [])  # columns of a result without rows
            for rows in result.partitions(_ROWS_AT_A_TIME):
                yield _batch(names, rows)


def _check_intervals(cursor: Any, dialect: str) -> None:
    """Raise SchemaError for intervals of PostgreSQL: its drivers make 30 days of a month."""
    for column in cursor.description if dialect == "postgresql" and cursor is not None else ():
        if column[1] in _INTERVALS:
            raise SchemaError(
                f"column {column[0]!r} has intervals, whose months have no length: write {quote(column[0])}::text in the "
                f"query, or EXTRACT(EPOCH FROM {quote(column[0])}) for seconds"
            )


def _check_is_there(url: str) -> None:
    """Raise SourceError if the file of a database does not exist: drivers make an empty one, and query that."""
    file = file_of(url)
    if file is None or file.exists():
        return
    raise SourceError(
        f"the database file {file.absolute()} does not exist: check the path (three slashes begin a relative one, "
        "four an absolute one: sqlite:////data/x.db)"
    )


def file_of(url: str) -> Path | None:
    """Return the file of this machine that a database lies in; None: it is in memory, or a server's."""
    import sqlalchemy

    if not is_local_database(url):
        return None
    address = sqlalchemy.make_url(url)
    database = address.database
    if database is not None and database.startswith("file:"):  # a URI of SQLite, whose options are those of the address
        database = unquote(urlsplit(database).path)
    is_in_memory = not database or database == ":memory:" or "memory" in address.query.get("mode", ())
    return None if is_in_memory or database is None else Path(database)


def _through_adbc(module: str, url: str, query: str) -> Iterator[pa.RecordBatch]:
    dbapi = importlib.import_module(module + ".dbapi")
    with dbapi.connect(url) as connection, connection.cursor() as cursor:
        if "postgresql" in module:
            cursor.execute("SET TRANSACTION READ ONLY")
        wanted = cursor.adbc_execute_schema(query)
        lists = [field.name for field in wanted if pa.types.is_list(field.type)]
        cursor.execute(_with_dimensions(query, lists) if lists else query)
        reader = cursor.fetch_record_batch()
        empty = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in reader.schema], schema=reader.schema)
        for batch in itertools.chain([empty], reader):  # columns of a result without rows
            _check_dimensions(batch.columns[len(wanted) :], lists)
            columns = [_of_adbc(array, field) for array, field in zip(batch.columns[: len(wanted)], wanted, strict=True)]
            yield pa.RecordBatch.from_arrays([array for array, _ in columns], schema=pa.schema([field for _, field in columns]))


def _with_dimensions(query: str, lists: Sequence[str]) -> str:
    """Return the query with a further column for each array: whether it has more than one dimension, which ADBC drops."""
    tests = ", ".join(f"array_ndims(q.{quote(name)}) > 1" for name in lists)
    return f"SELECT q.*, {tests} FROM ({query}\n) AS q"


def _check_dimensions(tests: Sequence[Any], lists: Sequence[str]) -> None:
    for name, test in zip(lists, tests, strict=True):
        if pc.any(test).as_py():
            raise SchemaError(
                f"column {name!r} has an array of several dimensions, whose inner lists do not come: write "
                f"to_jsonb({quote(name)}) AS {quote(name)} in the query"
            )


def _check_moments(array: Any, name: str) -> None:
    """Raise SchemaError for infinity and years that Arrow has not.

    PostgreSQL counts from 2000. ADBC adds 30 years, and passes over an overflow: infinity is a day of the year -5877611.
    """
    kind = array.type
    if pa.types.is_list(kind) or pa.types.is_struct(kind):
        for part in [array.flatten()] if pa.types.is_list(kind) else array.flatten():
            _check_moments(part, name)
    elif (earliest := _EARLIEST.get(str(kind).replace(", tz=UTC", ""))) is not None:
        first = pc.min(array.view(pa.int32() if pa.types.is_date(kind) else pa.int64())).as_py()
        if first is not None and first < earliest:
            column = quote(name)
            raise SchemaError(
                f"column {name!r} has infinity, or a moment after the year 294246, which Arrow has not: write "
                f"CASE WHEN isfinite({column}) THEN {column} END AS {column} in the query, or {column}::text"
            )


def _type_of(field: Any) -> bytes:
    metadata = field.metadata or {}
    return bytes(metadata.get(b"POSTGRESQL:type") or metadata.get(b"ADBC:postgresql:typname") or b"")


def _of_adbc(array: Any, field: Any) -> tuple[Any, Any]:
    """Return a column with the values that SQLAlchemy would give, where Arrow has others: numeric, UUID, JSON, OID."""
    kind = _type_of(field)
    _check_moments(array, field.name)
    if pa.types.is_list(field.type) and _type_of(field.type.value_field) in (b"uuid", b"oid"):
        values, _ = _of_adbc(array.values, field.type.value_field)
        array = pa.ListArray.from_arrays(array.offsets, values, mask=array.is_null())
    elif kind == b"oid":
        array = array.view(pa.uint32())
    elif kind == b"numeric":
        array = _array([None if text is None else Decimal(text) for text in array.to_pylist()], field.name)[0]
    elif kind == b"uuid":
        array = pa.array([None if value is None else str(value) for value in array.to_pylist()], pa.string())
    elif kind == b"money" or (isinstance(array, pa.ExtensionArray) and pa.types.is_binary(array.type.storage_type)):
        raise SchemaError(
            f"column {field.name!r} has the type {kind.decode()} of PostgreSQL, whose values do not come whole: cast it in the "
            f"query, as {field.name}::text"
        )
    elif isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array, pa.field(field.name, array.type, metadata={ENCODING: JSON} if kind in (b"json", b"jsonb") else None)


def _through_bigquery(url: str, query: str) -> Iterator[pa.RecordBatch]:
    bigquery: Any = importlib.import_module("google.cloud.bigquery")
    project, _, dataset = url.partition("://")[2].partition("?")[0].strip("/").partition("/")
    client = bigquery.Client(project=project or None)
    settings = bigquery.QueryJobConfig(default_dataset=f"{client.project}.{dataset}") if dataset else None
    storage = None  # then rows come over REST, page by page
    if _is_installed("google.cloud.bigquery_storage"):
        storage = importlib.import_module("google.cloud.bigquery_storage").BigQueryReadClient()
    for part in client.query(query, job_config=settings).result().to_arrow_iterable(bqstorage_client=storage):
        yield from part.to_batches() if isinstance(part, pa.Table) else [part]  # an empty result is a table


def _batch(names: Sequence[str], rows: Sequence[Any]) -> pa.RecordBatch:
    given = zip(*rows, strict=True) if rows else [()] * len(names)
    columns = [_array(values, name) for name, values in zip(names, given, strict=True)]
    fields = [
        pa.field(name, array.type, metadata={ENCODING: JSON} if is_json else None)
        for name, (array, is_json) in zip(names, columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays([array for array, _ in columns], schema=pa.schema(fields))


def _array(values: Sequence[Any], name: str) -> tuple[Any, bool]:
    """Return the column `name` of Python values, and whether it is JSON text; what Arrow does not know (UUIDs) becomes text."""
    kinds = set(map(type, values))
    if kinds & {dict, list, tuple}:
        as_json = functools.partial(json.dumps, default=functools.partial(_text_in_list, name=name))
        return pa.array([None if v is None else as_json(v) for v in values], pa.string()), True
    if UUID in kinds or (dt.time in kinds and any(v is not None and v.tzinfo is not None for v in values)):
        # newer pyarrow makes an extension type of UUIDs, which reads back as bytes; times lose their zone
        return pa.array([None if v is None else str(v) for v in values], pa.string()), False
    if memoryview in kinds:
        values = [bytes(v) if isinstance(v, memoryview) else v for v in values]
    if wrong := mixed_kinds([values]):  # SQLite may have text beside bytes, of which Arrow makes bytes
        raise SchemaError(f"column {name!r} {wrong}, with CAST({quote(name)} AS TEXT) AS {quote(name)} in the query")
    try:
        return pa.array(values), False
    except (pa.ArrowException, TypeError, OverflowError) as error:
        if Decimal in kinds:  # as texts they made texts of their batch, and a conflict with the next one
            raise SchemaError(
                f"column {name!r} has NaN, infinity or more than 76 digits, which no decimal of Arrow holds: write "
                f"CAST({quote(name)} AS DOUBLE PRECISION) AS {quote(name)} in the query, or AS TEXT"
            ) from error
        return pa.array([None if v is None else str(v) for v in values], pa.string()), False


def _text_in_list(value: Any, name: str) -> str:
    """Return the text of a value within a list or an object that JSON has not."""
    if isinstance(value, bytes | memoryview):
        raise SchemaError(
            f"column {name!r} has bytes within lists, which do not come whole: encode them in the query, as base64"
        )
    return str(value)


@contextlib.contextmanager
def _errors(url: str, query: str) -> Iterator[None]:
    """Turn what drivers raise into errors that name the database without its password, and the query."""
    name = urls.redact(url)
    try:
        yield
    except ImportError as error:
        raise _missing(url, error) from error
    except Exception as error:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "NoSuchModuleError" in kinds:
            raise _missing(url, error) from error
        text = urls.redact_text(" ".join(str(getattr(error, "orig", None) or error).split()))[:300]
        if module := _NEEDED_MODULE.search(text):
            raise MissingDependencyError(
                f"{name} needs {module[1]} for values of the query, which is not installed: pip install {module[1]}"
            ) from error
        if "ProgrammingError" in kinds or "BadRequest" in kinds:
            raise QueryError(f"{name} refuses the query {' '.join(query.split())[:300]!r}: {text}", query=query) from error
        if kinds & _FAILURES:
            raise SourceError(
                f"{name} cannot be read: {text}. Check that the database is up, its address and the credentials, and the query"
            ) from error
        raise


def _missing(url: str, error: Exception) -> MissingDependencyError:
    package = _PACKAGES.get(_dialect(url))
    cure = f"pip install {package}" if package else "install the SQLAlchemy dialect and driver of this database"
    return MissingDependencyError(f"{urls.redact(url)} needs a driver that is not installed ({error}): {cure}")
