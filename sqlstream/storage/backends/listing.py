"""Lists the folders below a prefix side by side: one listing of a store gives its pages one after the other.

A small or flat prefix is listed as it is. Else its folders are looked up, and several of them listed at a time, each a bounded
number of objects ahead. Objects come in the order of their names all the same, as retries need it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

from sqlstream.errors import StorageError
from sqlstream.storage.base.protocols import ObjectInfo
from sqlstream.storage.base.urls import redact

PAGE = 1000
"""Objects of one answer, as S3 has it."""
_LOOK_SECONDS = 0.2

Listed: TypeAlias = Callable[[str, str], Iterator[ObjectInfo]]
"""Lists a prefix, in order, behind a URL; `''`: all of it."""

_ListedFolders: TypeAlias = Callable[[str], Iterator[ObjectInfo]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Objects and folders directly below a prefix."""

    objects: tuple[ObjectInfo, ...]
    folders: tuple[str, ...]
    """URLs that end in '/'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListingBounds:
    """How much is listed ahead."""

    page: int = PAGE
    """Objects that are handed over together."""
    folders_at_a_time: int = 16
    """Folders that are listed side by side; arbitrary."""
    max_pages_ahead: int = 16
    """Pages that each of these is ahead of the reader."""


def spread(
    prefix: str,
    listed: Listed,
    level_of: Callable[[str], Level],
    bounds: ListingBounds = ListingBounds(),
    *,
    after: str = "",
) -> Iterator[ObjectInfo]:
    """Yield the objects below `prefix`, by name, its folders listed side by side.

    Args:
        prefix: Ends in '/'.
        listed: Lists a prefix, in order.
        level_of: Looks up what is directly below a prefix; only asked where there are folders.
        bounds: How much is listed ahead.
        after: The objects up to this URL are left out, and folders before it not listed.
    """
    listing = listed(prefix, after)
    first = list(islice(listing, bounds.page + 1))  # one more: a server that cannot go on shows it here, for folders as well
    if len(first) <= bounds.page or not _is_nested(first, prefix):
        yield from first
        yield from listing
        return
    level = level_of(prefix)
    if len(level.folders) == 1 and not level.objects:
        yield from spread(level.folders[0], listed, level_of, bounds, after=after)
        return
    places: list[ObjectInfo | str] = [info for info in level.objects if info.url > after]
    places += [folder for folder in level.folders if folder > after or after.startswith(folder)]
    places.sort(key=lambda place: place if isinstance(place, str) else place.url)
    yield from _side_by_side(places, lambda folder: listed(folder, after if after.startswith(folder) else ""), bounds)


def once(prefix: str, pages: Iterable[Sequence[ObjectInfo]]) -> Iterator[ObjectInfo]:
    """Yield the objects of pages that are below `prefix`, each once.

    A page is compared with the one before it, and with the first names of all: that needs little memory.

    Raises:
        StorageError: The server gives the same pages again, and would for ever.
    """
    firsts: set[str] = set()
    before: set[str] = set()
    for page in pages:
        new: dict[str, ObjectInfo] = {}
        for info in page:
            if info.url not in before:
                new.setdefault(info.url, info)  # the second is the mark of a folder, to obstore an object of the folder's name
        if not new or page[0].url in firsts:
            where = redact(prefix)
            text = f"{where}: the server gives the same page of its listing again and again (it does not do ListObjectsV2)"
            raise StorageError(f"{text}: give a table or a text file of URLs as the source", url=where)
        firsts.add(page[0].url)
        before = {info.url for info in page}
        yield from (info for info in new.values() if info.url.startswith(prefix))


def behind(prefix: str, after: str, objects: Iterable[ObjectInfo]) -> Iterator[ObjectInfo]:
    """Yield what follows the object `after` in a listing that has no order of names.

    Raises:
        StorageError: It is not there any more.
    """
    is_behind = False
    for info in objects:
        if is_behind:
            yield info
        is_behind = is_behind or info.url == after
    if not is_behind:
        where = redact(prefix)
        raise StorageError(f"{where}: its listing broke off, and {redact(after)}, behind which it goes on, is gone: list again")


def _is_nested(first: list[ObjectInfo], prefix: str) -> bool:
    return any("/" in info.url.removeprefix(prefix) for info in first)


def _side_by_side(places: list[ObjectInfo | str], listed: _ListedFolders, bounds: ListingBounds) -> Iterator[ObjectInfo]:
    is_over = threading.Event()
    folders = (_ListedFolder(place, listed, is_over, bounds) for place in places if isinstance(place, str))
    started = list(islice(folders, bounds.folders_at_a_time))
    try:
        for place in places:
            if isinstance(place, str):
                yield from started[0].objects()
                del started[0]
                started += islice(folders, 1)
            else:
                yield place
    finally:
        is_over.set()
        for folder in started:
            folder.thread.join()


class _ListedFolder:
    """A folder that a thread of its own lists."""

    def __init__(self, url: str, listed: _ListedFolders, is_over: threading.Event, bounds: ListingBounds) -> None:
        self._pages: queue.Queue[list[ObjectInfo] | BaseException] = queue.Queue(bounds.max_pages_ahead)
        self._is_over = is_over
        self._page = bounds.page
        self.thread = threading.Thread(target=self._list, args=(url, listed), name="list", daemon=True)
        self.thread.start()

    def objects(self) -> Iterator[ObjectInfo]:
        """Yield what it lists; raise what it raised."""
        while page := self._pages.get():
            if isinstance(page, BaseException):
                raise page
            yield from page

    def _list(self, url: str, listed: _ListedFolders) -> None:
        try:
            listing = listed(url)
            while page := list(islice(listing, self._page)):
                if not self._put(page):
                    return
            self._put([])
        except BaseException as error:
            self._put(error)

    def _put(self, page: list[ObjectInfo] | BaseException) -> bool:
        """Hand a page over; return False when the reader has left."""
        while not self._is_over.is_set():
            try:
                self._pages.put(page, timeout=_LOOK_SECONDS)
            except queue.Full:
                continue
            return True
        return False
