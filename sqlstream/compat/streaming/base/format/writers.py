"""The writers of MosaicML Streaming: their parameters, translated to ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sqlstream.errors import ConfigError
from sqlstream.write import CsvWriter, JsonWriter, MdsWriter, Out, TsvWriter, WriteOptions, XsvWriter

_SIZE_LIMIT = 1 << 26
_KNOWN = {"progress_bar": "show_progress", "max_workers": "num_uploads", "retry": "num_retries", "exist_ok": "exist_ok"}
"""Parameters that all their writers take, and the fields of our options that they are."""


class MDSWriter(MdsWriter):
    """Writes samples as MDS.

    Args:
        columns: Encodings by name, `pkl` among them.
        out: A directory, a URL, or (directory, URL).
        keep_local: Keep the local files of an output that has a URL as well.
        compression: `zstd`, `gz`, `br`, `bz2` or `snappy`, with or without a level (`zstd:7`).
        hashes: Names of hash algorithms for the index.
        size_limit: Most bytes of a shard before compression; None: 4 GiB.
        kwargs: `progress_bar`, `max_workers` (shards stored at a time), `retry` and `exist_ok`.

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        out: Out,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = _SIZE_LIMIT,
        **kwargs: Any,
    ) -> None:
        options = _options(keep_local, kwargs)
        super().__init__(
            out,
            columns,
            compression=compression,
            hashes=_sorted(hashes),
            size_limit=size_limit,
            allow_pickle=True,
            options=options,
        )


class JSONWriter(JsonWriter):
    r"""Writes samples as JSON lines; see `MDSWriter`.

    Args:
        columns: `str`, `int` or `float` by name.
        newline: What ends a row.
        out: See `MDSWriter`.
        keep_local: See `MDSWriter`.
        compression: See `MDSWriter`.
        hashes: See `MDSWriter`.
        size_limit: See `MDSWriter`.
        kwargs: See `MDSWriter`.
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        newline: str = "\n",
        out: Out,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = _SIZE_LIMIT,
        **kwargs: Any,
    ) -> None:
        options = _options(keep_local, kwargs)
        super().__init__(
            out,
            columns,
            newline=newline,
            compression=compression,
            hashes=_sorted(hashes),
            size_limit=size_limit,
            options=options,
        )


class XSVWriter(XsvWriter):
    r"""Writes samples as rows of separated values; see `MDSWriter`.

    Args:
        columns: `str`, `int` or `float` by name.
        separator: What stands between values.
        newline: What ends a row.
        out: See `MDSWriter`.
        keep_local: See `MDSWriter`.
        compression: See `MDSWriter`.
        hashes: See `MDSWriter`.
        size_limit: See `MDSWriter`.
        kwargs: See `MDSWriter`.
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        separator: str,
        newline: str = "\n",
        out: Out,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = _SIZE_LIMIT,
        **kwargs: Any,
    ) -> None:
        options = _options(keep_local, kwargs)
        super().__init__(
            out,
            columns,
            separator=separator,
            newline=newline,
            compression=compression,
            hashes=_sorted(hashes),
            size_limit=size_limit,
            options=options,
        )


class CSVWriter(CsvWriter):
    r"""Writes samples as rows of values between commas; see `XSVWriter`.

    Args:
        columns: `str`, `int` or `float` by name.
        newline: What ends a row.
        out: See `MDSWriter`.
        keep_local: See `MDSWriter`.
        compression: See `MDSWriter`.
        hashes: See `MDSWriter`.
        size_limit: See `MDSWriter`.
        kwargs: See `MDSWriter`.
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        newline: str = "\n",
        out: Out,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = _SIZE_LIMIT,
        **kwargs: Any,
    ) -> None:
        options = _options(keep_local, kwargs)
        super().__init__(
            out,
            columns,
            newline=newline,
            compression=compression,
            hashes=_sorted(hashes),
            size_limit=size_limit,
            options=options,
        )


class TSVWriter(TsvWriter):
    r"""Writes samples as rows of values between tabs; see `XSVWriter`.

    Args:
        columns: `str`, `int` or `float` by name.
        newline: What ends a row.
        out: See `MDSWriter`.
        keep_local: See `MDSWriter`.
        compression: See `MDSWriter`.
        hashes: See `MDSWriter`.
        size_limit: See `MDSWriter`.
        kwargs: See `MDSWriter`.
    """

    def __init__(
        self,
        *,
        columns: dict[str, str],
        newline: str = "\n",
        out: Out,
        keep_local: bool = False,
        compression: str | None = None,
        hashes: Sequence[str] | None = None,
        size_limit: int | str | None = _SIZE_LIMIT,
        **kwargs: Any,
    ) -> None:
        options = _options(keep_local, kwargs)
        super().__init__(
            out,
            columns,
            newline=newline,
            compression=compression,
            hashes=_sorted(hashes),
            size_limit=size_limit,
            options=options,
        )


def _options(keep_local: bool, given: dict[str, Any]) -> WriteOptions:
    """Return how a dataset is stored.

    Raises:
        ConfigError: A parameter is not known.
    """
    if unknown := sorted(given.keys() - _KNOWN.keys()):
        raise ConfigError(
            f"{', '.join(unknown)} is no parameter of a writer: beside its own ones there are {', '.join(_KNOWN)}"
        )
    return WriteOptions(keep_local=keep_local, **{_KNOWN[name]: value for name, value in given.items() if value is not None})


def _sorted(hashes: Sequence[str] | None) -> list[str] | None:
    return None if hashes is None else sorted(hashes)
