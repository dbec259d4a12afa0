"""The steps of `tarfile_to_samples`, for scripts that have one of their own: shards are opened, and their files grouped.

    shards ─ url_opener ─→ open files ─ tar_file_expander ─→ members ─ group_by_keys ─→ samples

Each step takes and gives dicts. Local shards are read in place, others come into the cache whole.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import IO, Any

from sqlstream import Cache
from sqlstream.compat.webdataset.handlers import Handler, reraise_exception
from sqlstream.config import AS_IT_IS, AsItIs, default_cache_directory
from sqlstream.environment import environment
from sqlstream.errors import DamagedShardError
from sqlstream.index.sources.places.wildcard import has_wildcard, match_files
from sqlstream.storage.base import urls
from sqlstream.storage.members.braces import url_of
from sqlstream.storage.members.names import ends_before
from sqlstream.storage.members.tar import read_members
from sqlstream.storage.members.unpack import MAGIC_BYTES, compression_of, decompress

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
_META = r"__[^/]*__($|/)"
"""Members that are no part of samples."""
_BAD = "__bad__"
"""Extension of the file that stands for the rest of a sample that the damage of its archive may have cut."""
_OWN = ("__key__", "__url__")
"""What each sample has."""
_PIECE = 1 << 20
"""Bytes of a read of what is copied first; arbitrary."""


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Return the key and the extension that the name of a member has; None where it has none."""
    match = _NAME.match(path)
    return (None, None) if match is None else (match[1], match[2])


def valid_sample(sample: dict[str, Any] | None) -> bool:
    """Return whether there is a sample that has something, and that the damage of its archive has not cut."""
    return isinstance(sample, dict) and bool(sample) and not sample.get(_BAD, False)


def url_opener(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    **kw: Any,  # noqa: ARG001 - theirs hands them to gopen
) -> Iterator[dict[str, Any]]:
    """Yield shards with their open file under `stream`, until the next one is asked for.

    Args:
        data: Shards, with their URL under `url`.
        handler: What becomes of one that cannot be opened.
        kw: Ignored.
    """
    return opened(data, handler, environment("WDS_CACHE").get("WDS_CACHE"))


def opened(
    shards: Iterable[dict[str, Any]], handler: Handler, dst: str | None = None, cache_limit: int | AsItIs | None = AS_IT_IS
) -> Iterator[dict[str, Any]]:
    """Yield shards with their open file; see `url_opener`.

    Args:
        shards: Shards, with their URL, or a wildcard, under `url`.
        handler: What becomes of one that cannot be opened.
        dst: Directory of the cache; None: the user's own.
        cache_limit: Its limit.
    """
    with contextlib.ExitStack() as stack:
        caches: list[Cache] = []

        def cache() -> Cache:
            if not caches:  # local shards need none
                caches.append(stack.enter_context(Cache(dst or default_cache_directory(), limit=cache_limit)))
            return caches[0]

        def named(url: str) -> list[str]:
            return [file.url for file in match_files(url, cache().fetcher)] if has_wildcard(url) else [url]

        for shard in shards:
            try:
                found = named(url_of(urls.without_file(shard["url"])))
            except Exception as error:
                if handler(error):
                    continue
                return
            for url in found:
                with contextlib.ExitStack() as held:
                    try:
                        path = held.enter_context(cache().pinned(url)) if urls.is_remote(url) else urls.local_path(url)
                        stream = held.enter_context(open(path, "rb"))
                    except Exception as error:
                        if handler(error):
                            continue
                        return
                    yield {**shard, "url": shard["url"] if len(found) == 1 else url, "stream": stream}


def tar_file_iterator(
    fileobj: IO[bytes],
    skip_meta: str | None = _META,
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield the regular files of an archive: `fname` and `data`.

    Args:
        fileobj: The archive, also compressed by gzip, bzip2, xz or zstd.
        skip_meta: Pattern of names that are passed over; None: no name is.
        handler: What becomes of a file that `select_files` or `rename_files` fails on.
        select_files: Says for the (other) name of a file whether it is wanted.
        rename_files: Returns another name of a file.

    Raises:
        SourceError: The archive is damaged, or ends early; what lies before that has been yielded.
    """
    shown = urls.redact(str(getattr(fileobj, "name", fileobj)))
    with contextlib.ExitStack() as stack:
        archive = _Archive(_plain(fileobj, shown, stack))
        for member in read_members(archive, shown):
            name = member.name
            if skip_meta is not None and re.match(skip_meta, name):
                continue
            try:
                name = name if rename_files is None else rename_files(name)
                is_wanted = select_files is None or select_files(name)
            except Exception as error:
                if handler(error):
                    continue
                return
            if is_wanted:
                yield {"fname": name, "data": archive.read_at(member.offset, member.size)}


class _Archive:
    """An open file as our reader of archives takes it.

    Args:
        file: The file, which can seek.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = file.seek(0, io.SEEK_END)

    def read_at(self, offset: int, num_bytes: int, /) -> bytes:
        """Return bytes from a place on."""
        self._file.seek(offset)
        return self._file.read(num_bytes)


def _plain(file: IO[bytes], shown: str, stack: contextlib.ExitStack) -> IO[bytes]:
    """Return a file that can seek and is not compressed: itself, or a copy of it."""
    first = file.read(MAGIC_BYTES)
    compression = compression_of(first)
    if compression is None and file.seekable():
        return file
    pieces = _pieces(file, first)
    copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    for piece in pieces if compression is None else decompress(pieces, compression, shown):
        copy.write(piece)
    return copy


def _pieces(file: IO[bytes], first: bytes) -> Iterator[bytes]:
    yield first
    while piece := file.read(_PIECE):
        yield piece


def tar_file_expander(
    data: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
    eof_value: dict[str, Any] | None = {},  # noqa: B006 - theirs; it is handed out, and not written to
) -> Iterator[dict[str, Any]]:
    """Yield the files of archives, with the URL of theirs under `__url__`.

    Where an archive is damaged, a file follows that makes the sample before the damage invalid (`valid_sample`), if that may
    lack a part.

    Args:
        data: Shards, with their open file under `stream`.
        handler: What becomes of an archive that cannot be read to its end.
        select_files: Says for the name of a file whether it is wanted.
        rename_files: Returns another name of a file.
        eof_value: What is yielded behind each archive; None: nothing.
    """
    for shard in data:
        key: str | None = None
        try:
            for file in tar_file_iterator(
                shard["stream"], handler=handler, select_files=select_files, rename_files=rename_files
            ):
                key = base_plus_ext(file["fname"])[0] or key
                file["__url__"] = shard["url"]
                if shard.get("local_path") is not None:
                    file["__local_path__"] = shard["local_path"]
                yield file
            if eof_value is not None:
                yield eof_value
        except Exception as error:
            is_whole = isinstance(error, DamagedShardError) and key is not None and ends_before(key, error)
            if key is not None and not is_whole:
                yield {"fname": f"{key}.{_BAD}", "data": True, "__url__": shard["url"]}
            if not handler(error):
                return


def group_by_keys(
    data: Iterable[dict[str, Any]],
    keys: Callable[[str], tuple[str, str] | tuple[None, None]] = base_plus_ext,
    lcase: bool = True,
    suffixes: Collection[str] | None = None,
    handler: Handler = reraise_exception,
) -> Iterator[dict[str, Any]]:
    """Yield samples: files with one key that follow each other.

    Args:
        data: Files; an empty dict ends an archive.
        keys: From the name of a file to its key and its extension; (None, None): it is no part of a sample.
        lcase: Extensions in lower case.
        suffixes: Extensions that samples have; None: all.
        handler: What becomes of a file whose extension its sample has already.
    """
    sample: dict[str, Any] = {}
    for file in data:
        if not file:
            if valid_sample(sample):
                yield sample
            sample = {}
            continue
        try:
            named = _named(file, keys, sample, lcase=lcase)
        except Exception as error:
            if handler(error):
                continue
            break
        if named is None:
            continue
        key, extension = named
        if key != sample.get("__key__"):
            if valid_sample(sample):
                yield sample
            sample = {"__key__": key, "__url__": file["__url__"]}
        if suffixes is None or extension in suffixes or extension == _BAD:
            sample[extension] = file["data"]
        if (path := file.get("__local_path__")) is not None:
            sample["__local_path__"] = path
    if valid_sample(sample):
        yield sample


def _named(
    file: dict[str, Any],
    keys: Callable[[str], tuple[str, str] | tuple[None, None]],
    sample: dict[str, Any],
    *,
    lcase: bool,
) -> tuple[str, str] | None:
    """Return the key and the extension of a file; None: it is no part of a sample.

    Raises:
        ValueError: Its sample has that extension already.
    """
    key, extension = keys(file["fname"])
    if key is None or extension is None:
        return None
    extension = extension.lower() if lcase else extension
    if extension in (sample if key == sample.get("__key__") else _OWN):
        raise ValueError(
            f"{file['fname']!r} of {urls.redact(file['__url__'])} has the extension {extension!r}, which its sample has "
            "already: rename one of them"
        )
    return key, extension
