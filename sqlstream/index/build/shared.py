"""Builds an index once a node, and once for all nodes that have a store: it is asked before, and given what was built."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sqlstream.config import IndexOptions
from sqlstream.errors import IndexDatabaseError, MigrationError, StorageError
from sqlstream.index.file.index import Index
from sqlstream.index.file.room import IndexRoom
from sqlstream.index.file.store import IndexStore, Manifest, check_shared
from sqlstream.index.file.workplace import Workplace, build_once
from sqlstream.index.sources.plan.source_plan import SourcePlan

logger = logging.getLogger(__name__)

AnyIndex = TypeVar("AnyIndex", bound=Index)


def check_shareable(plan: SourcePlan, store: IndexStore | None) -> None:
    """Raise if there is a store, and the source is nothing that other nodes see under the same name.

    Raises:
        ConfigError: It is of this machine.
    """
    if store is not None:
        check_shared([part.source.url for part in plan.all_parts], plan.paths_base_url)


def build_shared(
    store: IndexStore | None,
    options: IndexOptions,
    place: tuple[Path, str],
    find: Callable[[], AnyIndex | None],
    build: Callable[[Workplace], AnyIndex],
    *,
    check: Callable[[], None],
    show_progress: bool,
) -> AnyIndex:
    """Return the index that is here, else the one of the store, else the one that `build` makes, which then goes to the store.

    A store that fails never stops a run: what is wrong with it is logged, and the index is built here.

    Args:
        store: Where indexes are shared; None: nowhere.
        options: How much room index files have.
        place: The directory of index files, and the build key.
        find: Returns the index that is here; None when there is none, or it is damaged.
        build: Makes it.
        check: Raises if the source is another one than before, and that must not be (`on_source_change`).
        show_progress: Show a bar, if stderr is a terminal.
    """
    directory, key = place
    if store is None:
        return build_once(directory, key, find, build, show_progress=show_progress)
    exchange, built = _Exchange(store, key), list[AnyIndex]()

    def take_or_build(workplace: Workplace) -> AnyIndex:
        if options.on_source_change == "raise":
            check()
        if exchange.take(workplace, IndexRoom(directory, options)) and (found := find()) is not None:
            return found
        built.append(build(workplace))
        return built[0]

    index = build_once(directory, key, find, take_or_build, show_progress=show_progress)
    if built:  # no process of this node waits for what follows
        exchange.offer(index.path)
    return index


class _Exchange:
    """What one builder asks a store, and gives it."""

    def __init__(self, store: IndexStore, key: str) -> None:
        self._store, self._key = store, key
        self._refused: Manifest | None = None
        """The index that is there, and was not taken; it is replaced."""
        self._is_reachable = True

    def take(self, place: Workplace, room: IndexRoom) -> bool:
        """Return whether the index came from the store."""
        try:
            self._refused = self._store.find(self._key)
            if self._refused is None:
                return False
            self._store.take(self._refused, place, room)
        except (StorageError, IndexDatabaseError) as error:
            self._is_reachable = self._refused is not None or isinstance(error, IndexDatabaseError)
            logger.warning("the index store %s gives no index (%s): it is built here", self._store, error)
            return False
        logger.info("the index %s came from %s, %d bytes", self._key, self._store, self._refused.size_bytes)
        return True

    def offer(self, path: Path) -> None:
        """Put a built index there, unless another node was faster, or the store could not be reached before."""
        if not self._is_reachable:
            return
        try:
            try:
                there = self._store.find(self._key)
            except MigrationError:  # it is good for others
                return
            except IndexDatabaseError:  # no manifest; it was said before
                there = None
            if there is None or there == self._refused:
                self._store.put(path)
        except (StorageError, IndexDatabaseError) as error:
            logger.warning("the index store %s does not take an index (%s): other nodes build it, too", self._store, error)
