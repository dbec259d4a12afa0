"""Versions of a source: what an earlier run has indexed of it, whether it only grew, and what changed if it did not.

Every index file names its *lineage* (source and options, whatever its version) and the version of each of its parts. So who is
about to build looks at the relatives: one whose parts are the first of ours is copied and goes on with the new ones only.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from sqlstream.errors import IndexDatabaseError, SourceChangedError
from sqlstream.index.file.connection import reading

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relative:
    """An index of another version of the same source."""

    path: Path
    created_at: str
    parts: tuple[str, ...]
    """Digest of each part with its version, in order."""
    urls: tuple[str, ...]
    """Redacted."""


def find_relatives(directory: Path, lineages: Collection[str]) -> list[Relative]:
    """Return the indexes of these lineages, the oldest first, without those that cannot be read: they were not asked for."""
    found = []
    for path in directory.glob("*.sqlite"):
        try:
            with reading(path) as connection:
                meta = dict(connection.execute("SELECT key, value FROM meta WHERE key IN ('lineage', 'created_at')").fetchall())
                if meta.get("lineage") not in lineages:
                    continue
                sources = connection.execute("SELECT identity, url FROM sources ORDER BY position").fetchall()
        except IndexDatabaseError as error:
            logger.warning("%s", error)
            continue
        parts, urls = tuple(part for part, _ in sources), tuple(url for _, url in sources)
        found.append(Relative(path=path, created_at=str(meta.get("created_at")), parts=parts, urls=urls))
    return sorted(found, key=lambda relative: relative.created_at)


def grown_from(relatives: Sequence[Relative], parts: Sequence[str]) -> Relative | None:
    """Return the relative with the most parts whose parts are the first of `parts`; None when there is none."""
    beginnings = [relative for relative in relatives if relative.parts == tuple(parts[: len(relative.parts)])]
    return max(beginnings, key=lambda relative: len(relative.parts), default=None)


def what_changed(relative: Relative, parts: Sequence[str], urls: Sequence[str]) -> str:
    """Return the first difference between a relative's parts and ours, for people."""
    before, now = dict(zip(relative.urls, relative.parts, strict=True)), dict(zip(urls, parts, strict=True))
    for url, part in before.items():
        if url not in now:
            return f"{url} is gone"
        if now[url] != part:
            return f"{url} has another version (size or etag)"
    new = next((url for url in now if url not in before), None)
    return "its files have another order" if new is None else f"{new} is new and not the last"


def check_unchanged(relatives: Sequence[Relative], parts: Sequence[str], urls: Sequence[str], src: str, reaction: str) -> None:
    """Say that the source is not what was indexed before.

    Args:
        relatives: Of which none grew into what the source is now.
        parts: The digests of its parts.
        urls: Their URLs, redacted.
        src: The source, for the message.
        reaction: `'rebuild'` logs it, `'raise'` raises it.

    Raises:
        SourceChangedError: It changed, and that is what was asked for.
    """
    if not relatives:
        return
    message = f"{src} is not what was indexed at {relatives[-1].created_at}: {what_changed(relatives[-1], parts, urls)}"
    if reaction == "raise":
        raise SourceChangedError(
            f"{message}. Restore it, pass on_source_change='rebuild' to index it again, "
            f"or remove {relatives[-1].path} to forget the old version"
        )
    logger.warning("%s: indexing it again", message)
