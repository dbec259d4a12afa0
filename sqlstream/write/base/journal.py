"""The journal of a writing: which shards are stored, so that a writing that ended early can go on.

    .sqlstream-write.jsonl
        {"version": 1, "settings": {…}}                                  what a resumed writing must have in common
        {"number": 0, "samples": 812, "files": {"shard.00000.mds": 67108800}, "record": {…}, "point": [812, 0]}
        …                                                                shards in the order in which they were stored
        {"resumed": 3}                                                   from here on: 3 and what followed are written again
        {"is_complete": true}                                            written behind the index

In a store the first line has the name of its writer, too: no lock holds there, so a writer looks for its own name before it
stores the journal again, and before the index.

It lies beside the shards. On a disk a line is appended for each shard, and the journal is removed when the index is there,
unless the source has a name. An object store has no appending: there it is stored anew, whenever a 32nd of the shards is new.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sqlstream.errors import ConfigError, ObjectChangedError, ObjectNotFoundError, OutputExistsError
from sqlstream.process import locks
from sqlstream.storage.base.protocols import RemoteReader, RemoteWriter
from sqlstream.storage.base.unfinished import END, JOURNAL_NAME
from sqlstream.storage.base.urls import is_remote, local_path, redact
from sqlstream.write.base.disk import named_disk, temporary_disk
from sqlstream.write.base.options import ReaderWriter

_VERSION = 1
_SHOWN, _SHOWN_BEFORE = 120, 40
"""Characters of a setting in a message, and of them before the first that differs. Arbitrary."""
_NEW_SHARE = 32
"""A remote journal is stored anew when more than 1/32 of its shards are new: so its bytes are sent 33 times in all at most."""


class SourcePoint(NamedTuple):
    """A place in a source of samples, at which a resumed writing goes on."""

    position: int
    """The next position of the source."""
    num_taken: int = 0
    """Samples made of that position which are stored already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredShard:
    """A shard that is where it belongs."""

    number: int
    num_samples: int
    files: Mapping[str, int]
    """Sizes in bytes by name."""
    record: Mapping[str, Any]
    """What the index of the format needs of it."""
    point: SourcePoint | None = None
    """Where the source goes on behind it; None: the writer was not told."""

    def as_json(self) -> str:
        """Return it as a line of a journal."""
        values = {"number": self.number, "samples": self.num_samples, "files": self.files, "record": self.record}
        values |= {"point": self.point} if self.point is not None else {}
        return json.dumps(values, separators=(",", ":"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Progressed:
    """What a journal says."""

    settings: Mapping[str, Any]
    shards: tuple[StoredShard, ...] = ()
    """The shards 0, 1, … up to the first one that is not stored."""
    is_complete: bool = False
    """The index is stored as well."""


class WriteJournal(Protocol):
    """A journal that is written."""

    def add(self, shard: StoredShard) -> None:
        """Note a stored shard."""

    def check(self) -> None:
        """Raise OutputExistsError if another writer has begun there."""

    def complete(self) -> None:
        """Note that the index is stored."""

    def close(self) -> None:
        """Keep what is noted, for a later writing."""


def parse_journal(text: str, where: str) -> Progressed:
    """Return what a journal says; a last line that is cut off counts for nothing.

    Raises:
        ConfigError: It is none, or one of another version.
    """
    lines = text.splitlines()[: text.count("\n")]
    try:
        head = json.loads(lines[0]) if lines else {}
        entries = [json.loads(line) for line in lines[1:]]
        if head.get("version") != _VERSION:
            raise ValueError(f"its version is {head.get('version')!r}")
        stored: dict[int, StoredShard] = {}
        for entry in entries:
            if "resumed" in entry:  # a shard that was stored before one that was not may begin with other samples now
                stored = {number: shard for number, shard in stored.items() if number < entry["resumed"]}
            elif "number" in entry:
                stored[entry["number"]] = _stored_shard(entry)
        settings = dict(head["settings"])
        is_complete = any(entry.get("is_complete") for entry in entries)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is no journal of a writing ({error!r}): say exist_ok to write anew") from error
    first = next((number for number in range(len(stored) + 1) if number not in stored), 0)
    return Progressed(settings=settings, shards=tuple(stored[number] for number in range(first)), is_complete=is_complete)


def _stored_shard(entry: Mapping[str, Any]) -> StoredShard:
    return StoredShard(
        number=entry["number"],
        num_samples=entry["samples"],
        files=entry["files"],
        record=entry["record"],
        point=SourcePoint(*entry["point"]) if "point" in entry else None,
    )


def check_settings(found: Mapping[str, Any], wanted: Mapping[str, Any], where: str) -> None:
    """Raise unless a writing that is resumed has the settings of the one that ended early.

    Raises:
        ConfigError: One differs.
    """
    wanted = json.loads(json.dumps(wanted))
    for key in sorted({*found, *wanted}):
        if found.get(key) != wanted.get(key):
            begun, resumed = _where_they_differ(repr(found.get(key)), repr(wanted.get(key)))
            raise ConfigError(
                f"{where}: it was begun with {key}={begun} and is resumed with {resumed}: "
                "resume with the same, or say exist_ok to write anew"
            )


def _where_they_differ(*texts: str) -> list[str]:
    """Return what is to be seen of texts that may be long: some characters around the first in which they differ."""
    at = next((at for at, pair in enumerate(zip(*texts, strict=False)) if len({*pair}) > 1), min(map(len, texts)))
    start = max(0, at - _SHOWN_BEFORE) if max(map(len, texts)) > _SHOWN else 0
    return ["…" * (start > 0) + text[start : start + _SHOWN] + "…" * (len(text) > start + _SHOWN) for text in texts]


def _head(settings: Mapping[str, Any], **more: str) -> str:
    return json.dumps({"version": _VERSION, "settings": settings, **more}, separators=(",", ":"))


class LocalJournal:
    """A journal in a directory. One writer at a time has it: the lock comes before any other look at the directory.

    Args:
        directory: Where it lies.
        is_kept: It stays when the index is stored, and says so.

    Raises:
        OutputExistsError: Another process writes there.
    """

    def __init__(self, directory: Path, *, is_kept: bool) -> None:
        self._is_kept = is_kept
        self._path = directory / JOURNAL_NAME
        self._fds: list[int] = []
        while not self._is_there():
            self.close()
            self._fds = [locks.open_descriptor(self._path, os.O_RDWR | os.O_CREAT, 0o666)]
            if not locks.try_lock(self._fds[0]):
                self._free()
                raise OutputExistsError(f"{directory} is being written by another process: wait for it, or write elsewhere")

    def _is_there(self) -> bool:
        """Return whether what is locked is the file at the path: another writer may have ended, and removed it, meanwhile."""
        return bool(self._fds) and self._path.exists() and os.path.samestat(os.fstat(self._fds[0]), os.stat(self._path))

    @property
    def text(self) -> str:
        """What it says; empty: nothing has begun."""
        return self._path.read_bytes().decode(errors="replace")  # a damaged one is told as it is parsed

    def begin(self, settings: Mapping[str, Any]) -> None:
        """Forget what it says, and begin a writing with what a resumed one must have in common."""
        os.ftruncate(self._fds[0], 0)
        self._write(f"{_head(settings)}\n")

    def resume(self, num_shards: int) -> None:
        """Go on with the writing that it has, behind so many shards; what was stored behind them is written again."""
        os.ftruncate(self._fds[0], self._path.read_bytes().rfind(b"\n") + 1)
        self._write(f"{json.dumps({'resumed': num_shards})}\n")

    def add(self, shard: StoredShard) -> None:
        """Append a stored shard."""
        self._write(f"{shard.as_json()}\n")

    def check(self) -> None:
        """Do nothing: the lock is held."""

    def complete(self) -> None:
        """Remove it, since the index says what is there; or say that it is complete."""
        if self._is_kept:
            self._write(END.decode())
        else:
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give the lock back; where nothing has begun, nothing is left."""
        if self._fds and not os.fstat(self._fds[0]).st_size and self._is_there():
            self._path.unlink(missing_ok=True)
        self._free()

    def _free(self) -> None:
        locks.close_descriptors(self._fds)

    def _write(self, text: str) -> None:
        """Append a line as a whole; on a full disk a part of it may fit, behind which the next one would make the file none."""
        end = os.lseek(self._fds[0], 0, os.SEEK_END)
        left = memoryview(text.encode())
        try:
            while left:
                left = left[os.write(self._fds[0], left) :]
        except BaseException:
            os.ftruncate(self._fds[0], end)
            raise


class RemoteJournal:
    """A journal in an object store.

    Args:
        prefix: URL of the directory, with '/' at its end.
        remote: Reads and stores it.
        settings: What a resumed writing must have in common.
        shards: Shards that are stored already.
    """

    def __init__(self, prefix: str, remote: ReaderWriter, settings: Mapping[str, Any], shards: Sequence[StoredShard]) -> None:
        self._url, self._remote, self._writer = prefix + JOURNAL_NAME, remote, uuid.uuid4().hex
        self._lines = [_head(settings, writer=self._writer), *(shard.as_json() for shard in shards)]
        self._num_sent = 0
        self._send()

    def check(self) -> None:
        """Raise if another writer has stored its journal since.

        Raises:
            OutputExistsError: It has.
        """
        try:
            text = read_text(self._remote, self._url)
        except ObjectChangedError:  # between two requests: we store it ourselves, one thread at a time
            text = ""
        try:
            writer = self._writer if text is None else json.loads(text.partition("\n")[0]).get("writer")
        except (ValueError, AttributeError):
            writer = None
        if writer != self._writer:
            place = redact(self._url).removesuffix(JOURNAL_NAME)
            raise OutputExistsError(f"{place} is being written by another process as well: give each a place of its own")

    def add(self, shard: StoredShard) -> None:
        """Note a stored shard, and store the journal when enough of it is new."""
        self._lines.append(shard.as_json())
        if len(self._lines) - self._num_sent > self._num_sent // _NEW_SHARE:
            self._send()

    def complete(self) -> None:
        """Say that the index is stored; the shards are in that."""
        self._lines = [self._lines[0], END.decode().rstrip()]
        self._send()

    def close(self) -> None:
        """Store what is noted and not stored yet."""
        if len(self._lines) != self._num_sent:
            self._send()

    def _send(self) -> None:
        if self._num_sent:
            self.check()
        put_bytes(self._remote, self._url, "".join(f"{line}\n" for line in self._lines).encode())
        self._num_sent = len(self._lines)


def put_bytes(remote: RemoteWriter | None, url: str, content: bytes) -> None:
    """Store a few bytes as an object; or as a file of this disk, for which nothing remote is needed."""
    if not is_remote(url):
        path = local_path(url)
        part = path.with_name(f".{path.name}.part")
        with named_disk(str(path)), contextlib.ExitStack() as exit_:
            exit_.callback(part.unlink, missing_ok=True)  # a part of it would be in the way of what makes room
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(path)
        return
    assert remote is not None, redact(url)
    with contextlib.ExitStack() as exit_:
        with temporary_disk(f"{redact(url)} waits there for its upload"):
            file = exit_.enter_context(tempfile.NamedTemporaryFile(prefix="sqlstream-write-"))
            file.write(content)
            file.flush()
        remote.upload(Path(file.name), url)


def read_text(remote: RemoteReader | None, url: str) -> str | None:
    """Return an object, or a file of this disk, as a text, in which bytes that are none are replaced; None: there is none."""
    data = read_object(remote, url)
    return None if data is None else data.decode(errors="replace")


def read_object(remote: RemoteReader | None, url: str) -> bytes | None:
    """Return an object, or a file of this disk; None: there is none."""
    if not is_remote(url):
        path = local_path(url)
        return path.read_bytes() if path.is_file() else None
    assert remote is not None, redact(url)
    try:
        size = remote.head(url).size_bytes
    except ObjectNotFoundError:
        return None
    assert size is not None, redact(url)
    return remote.get_ranges(url, [(0, size)], size)[0] if size else b""


def has_object(remote: RemoteReader, url: str) -> bool:
    """Return whether there is an object."""
    try:
        remote.head(url)
    except ObjectNotFoundError:
        return False
    return True
