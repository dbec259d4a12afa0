"""The writers of MosaicML Streaming: their parameters, translated to ours.

All of them take `out` (a directory, a URL, or both), `keep_local`, `compression`, `hashes`, `size_limit`, `progress_bar`,
`max_workers` (shards stored at a time), `retry` and `exist_ok`. They raise ConfigError for a wrong one, and OutputExistsError
where something is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Required, TypedDict, Unpack

from sqlstream.compat.streaming.translation.signatures import shows_parameters_of
from sqlstream.errors import ConfigError
from sqlstream.write import CsvWriter, JsonWriter, MdsWriter, Out, TsvWriter, WriteOptions, XsvWriter

_OPTIONS = {"progress_bar": "show_progress", "max_workers": "num_uploads", "retry": "num_retries", "exist_ok": "exist_ok"}
"""Parameters that are fields of our options."""


class Stored(TypedDict, total=False):
    """How a dataset is stored, in MosaicML's words."""

    out: Required[Out]
    keep_local: bool
    compression: str | None
    hashes: Sequence[str] | None
    size_limit: int | str | None
    progress_bar: bool
    max_workers: int | None
    retry: int
    exist_ok: bool


def _stored(
    *,
    out: Out,
    keep_local: bool = False,
    compression: str | None = None,
    hashes: Sequence[str] | None = None,
    size_limit: int | str | None = 1 << 26,
    **kwargs: Any,
) -> dict[str, Any]:
    """Return the parameters of our writers.

    Raises:
        ConfigError: A parameter is not known.
    """
    if unknown := sorted(kwargs.keys() - _OPTIONS.keys()):
        raise ConfigError(
            f"{', '.join(unknown)} is no parameter of a writer: beside its own ones there are {', '.join(_OPTIONS)}"
        )
    options = {_OPTIONS[name]: value for name, value in kwargs.items() if value is not None}
    return {
        "out": out,
        "compression": compression,
        "hashes": hashes if hashes is None or isinstance(hashes, str) else sorted(hashes),
        "size_limit": size_limit,
        "options": WriteOptions(keep_local=keep_local, **options),
    }


class MDSWriter(MdsWriter):
    """Writes samples as MDS.

    Args:
        columns: Encodings by name, `pkl` among them.
        stored: How they are stored.
    """

    @shows_parameters_of(_stored)
    def __init__(self, *, columns: dict[str, str], **stored: Unpack[Stored]) -> None:
        super().__init__(columns=columns, allow_pickle=True, **_stored(**stored))


class JSONWriter(JsonWriter):
    """Writes samples as JSON lines.

    Args:
        columns: `str`, `int` or `float` by name.
        newline: What ends a row.
        stored: How they are stored.
    """

    @shows_parameters_of(_stored)
    def __init__(self, *, columns: dict[str, str], newline: str = "\n", **stored: Unpack[Stored]) -> None:
        super().__init__(columns=columns, newline=newline, **_stored(**stored))


class XSVWriter(XsvWriter):
    """Writes samples as rows of separated values.

    Args:
        columns: `str`, `int` or `float` by name.
        separator: What stands between values.
        newline: What ends a row.
        stored: How they are stored.
    """

    @shows_parameters_of(_stored)
    def __init__(self, *, columns: dict[str, str], separator: str, newline: str = "\n", **stored: Unpack[Stored]) -> None:
        super().__init__(columns=columns, separator=separator, newline=newline, **_stored(**stored))


class CSVWriter(CsvWriter):
    """Writes samples as rows of values between commas; see `XSVWriter`."""

    @shows_parameters_of(_stored)
    def __init__(self, *, columns: dict[str, str], newline: str = "\n", **stored: Unpack[Stored]) -> None:
        super().__init__(columns=columns, newline=newline, **_stored(**stored))


class TSVWriter(TsvWriter):
    """Writes samples as rows of values between tabs; see `XSVWriter`."""

    @shows_parameters_of(_stored)
    def __init__(self, *, columns: dict[str, str], newline: str = "\n", **stored: Unpack[Stored]) -> None:
        super().__init__(columns=columns, newline=newline, **_stored(**stored))
