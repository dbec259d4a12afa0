"""What a field may hold where the content of a file is wanted: a path, the bytes, or a struct of both.

The struct, `{"bytes": …, "path": …}`, is what columns of images, audio and videos of Hugging Face's `datasets` hold. Its bytes
are the content; where they are None, `path` leads to it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, BinaryIO, TypeGuard

from sqlstream.errors import DecodeError
from sqlstream.transforms.field import summary
from sqlstream.transforms.reading import check_there, read_file

Source = str | bytes
"""A path, or the file's bytes."""

STRUCT = frozenset(("bytes", "path"))
"""The keys of a struct that holds content."""


def is_struct(value: Any) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a struct of bytes and path."""
    return (
        isinstance(value, Mapping)
        and value.keys() == STRUCT
        and isinstance(value["bytes"], bytes | bytearray | memoryview | None)
        and isinstance(value["path"], str | os.PathLike | None)
    )


def is_content(value: Any) -> bool:
    """Return whether a value is content that is here: bytes, or a struct with bytes."""
    return isinstance(value, bytes) or (is_struct(value) and value["bytes"] is not None)


def opened(source: Source) -> BinaryIO:
    """Return the content of a file, to be read.

    Raises:
        OSError: There is no such file, or it may not be read.
    """
    return io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")


def source_of(value: Any) -> Source:
    """Return the content of a file, or the path of the file: what decoders open that read only what they need.

    Raises:
        DecodeError: It is none of path, bytes and struct; or a path that leads to no local file.
    """
    given = value
    if is_struct(value):
        value = value["path"] if value["bytes"] is None else value["bytes"]
    if isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str | os.PathLike) and (path := os.fsdecode(value)):
        check_there(path)
        return path
    what = "a struct without bytes and path" if given is not value else summary(given)
    raise DecodeError(f"expected the path of a file, its bytes, or a struct of both ({{'bytes', 'path'}}), got {what}")


def read_bytes(value: Any) -> bytes:
    """Return the content of a file.

    Raises:
        DecodeError: It is none of path, bytes and struct, or the file cannot be read.
    """
    source = source_of(value)
    return source if isinstance(source, bytes) else read_file(source)


def read_text(value: Any) -> str:
    """Return the text of a file, in UTF-8, with a line feed at the end of each line.

    Raises:
        DecodeError: It is none of path, bytes and struct, cannot be read, or is no UTF-8.
    """
    data = read_bytes(value)
    try:
        return data.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        raise DecodeError(f"{summary(value)} is not UTF-8: {error}") from error
