"""Requests without an answer, and which of them are sent again after a helper died. No I/O but one fstat.

A request that kills helpers must fail alone. After the first death all that was open is asked again together; what has been
with two helpers that died is suspect: suspects are asked one at a time, with nothing beside them, and all others wait. So the
third helper dies of one request only, which ends with an error.
"""

from __future__ import annotations

import contextlib
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from sqlstream.errors import FetchCancelledError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.base.urls import redact
from sqlstream.storage.client.process import HelperProcess
from sqlstream.storage.protocol.messages import (
    CheckProviders,
    FetchEvent,
    FetchRequest,
    GrantNeeded,
    Head,
    NextPage,
    Put,
    Ranges,
    ReadOptions,
    Reply,
)

Question = FetchRequest | Head | NextPage | Put | Ranges | CheckProviders
Sink = Callable[[Sequence[FetchEvent]], None]
Answer: TypeAlias = "queue.SimpleQueue[Reply | SqlStreamError]"
"""The queue that takes the answer of a call. Not a Future: a signal handler that raises in its wait leaves its lock held."""

_MAX_SENDS = 3  # together with all, together with what was there when a helper died, alone
_MAX_STILLBORN = 2  # helpers in a row that died before their first word: then the fault is not in what they were asked


class _FileIdentity(NamedTuple):
    device: int
    inode: int


class HelperUser:
    """One of those who share a helper.

    Args:
        options: How it reads; replaced when that changes.
    """

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.is_closed = False
        """True: it asks nothing any more."""


@dataclass(slots=True, kw_only=True)
class Unanswered:
    """A download or a call without its answer."""

    question: Question
    """The request as it is sent again if the helper dies: with the latest grant."""
    user: HelperUser
    answer: Sink | Answer
    helper: HelperProcess | None = None
    """The helper that has it; None: it waits until suspects are through."""
    file: _FileIdentity | None = None
    """The file that a download writes to: the number of a descriptor that was closed too early may mean another file by now."""
    num_sends: int = 0
    is_cancelled: bool = False
    is_over: bool = False
    """Its user has the last word on it."""

    def grant(self, granted_bytes: int) -> None:
        """Note a grant, for the case that it must be asked again."""
        if isinstance(self.question, FetchRequest) and granted_bytes > self.question.granted_bytes:
            self.question = self.question._replace(granted_bytes=granted_bytes)


class Ended(NamedTuple):
    """An entry that ends without an answer, and why."""

    entry: Unanswered
    error: SqlStreamError


class Outstanding:
    """The entries by name, in the order of asking. Not thread safe: the client's lock guards it."""

    def __init__(self) -> None:
        self._entries: dict[str, Unanswered] = {}
        self._suspects: deque[str] = deque()
        self._held: list[str] = []
        self._alone: str | None = None
        self._num_stillborn = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> Unanswered | None:
        """Return an entry, None when it has ended."""
        return self._entries.get(name)

    def is_waiting_for(self, helper: HelperProcess) -> bool:
        """Return whether this helper owes an answer."""
        return any(entry.helper is helper for entry in self._entries.values())

    def of(self, user: HelperUser) -> list[Unanswered]:
        """Return the entries of a user. Safe without the lock: the list is made in one step."""
        return [entry for entry in list(self._entries.values()) if entry.user is user]

    def add(self, questions: Mapping[str, Question], user: HelperUser, answer: Sink | Answer) -> None:
        """Enter questions; `take_sendable` says when they are to be sent.

        Raises:
            ValueError: A name is outstanding already.
            OSError: The descriptor of a download is closed.
        """
        if twice := questions.keys() & self._entries.keys():
            raise ValueError(f"tickets {sorted(twice)} are outstanding already: give each download its own")
        entries = {
            name: Unanswered(question=question, user=user, answer=answer, file=_file_of(question))
            for name, question in questions.items()
        }
        self._entries |= entries
        self._held += entries

    def remove(self, names: Iterable[str]) -> None:
        """Forget entries whose sending was broken off."""
        for name in names:
            self.pop(name)

    def pop(self, name: str) -> Unanswered | None:
        """Take out an entry that has its answer."""
        if name == self._alone:
            self._alone = None
        return self._entries.pop(name, None)

    def entry_of(self, answer: FetchEvent | Reply) -> Unanswered | None:
        """Return whose answer this is, taken out if it is the last one."""
        if isinstance(answer, GrantNeeded):
            return self.get(answer.ticket)
        return self.pop(answer.call if isinstance(answer, Reply) else answer.ticket)

    def note_sign_of_life(self) -> None:
        """A helper has started and speaks."""
        self._num_stillborn = 0

    def take_sendable(self, helper: HelperProcess) -> list[Unanswered]:
        """Return the entries to send to `helper` now, noted as sent: a suspect alone, or all that were held."""
        if self._alone is not None:
            return []
        names: list[str] = []
        while self._suspects and not names:
            if (name := self._suspects.popleft()) in self._entries:
                names, self._alone = [name], name
        if not names:
            names, self._held = [name for name in self._held if name in self._entries], []
        entries = [self._entries[name] for name in names]
        for entry in entries:
            entry.helper, entry.num_sends = helper, entry.num_sends + 1
        return entries

    def take_cancelled(self) -> list[Ended]:
        """Take out what was cancelled before it was sent."""
        waiting = [name for name in (*self._suspects, *self._held) if name in self._entries]
        return [
            Ended(self._entries.pop(name), cancelled(entry)) for name in waiting if (entry := self._entries[name]).is_cancelled
        ]

    def after_death(self, dead: HelperProcess, *, has_spoken: bool) -> list[Ended]:
        """Have what `dead` left open asked again; return what ends instead: cancelled, or sent too often."""
        self._alone = None
        ended = self.take_cancelled()
        self._num_stillborn = 0 if has_spoken or dead.is_stopping else self._num_stillborn + 1
        lost = {name: entry for name, entry in self._entries.items() if entry.helper is dead}
        if self._num_stillborn >= _MAX_STILLBORN:
            self._num_stillborn = 0
            return ended + self.fail_all(StorageError("the helper process dies when it starts; its error is on standard error"))
        again: list[str] = []
        for name, entry in lost.items():
            if (error := _reason_to_end(entry)) is not None:
                ended.append(Ended(self._entries.pop(name), error))
                continue
            entry.helper = None
            (again if entry.num_sends < _MAX_SENDS - 1 else self._suspects).append(name)
        self._held = again + self._held
        return ended

    def fail_all(self, error: SqlStreamError) -> list[Ended]:
        """Take out everything that no living helper has."""
        waiting = [name for name, entry in self._entries.items() if entry.helper is None or entry.helper.is_dead]
        self._suspects.clear()
        self._held.clear()
        return [Ended(self._entries.pop(name), error) for name in waiting]


def _reason_to_end(entry: Unanswered) -> SqlStreamError | None:
    """Return the error that a request ends with after the death of its helper; None when it is asked again."""
    question = entry.question
    where = _where(question)
    if entry.is_cancelled:
        return cancelled(entry)
    if entry.num_sends >= _MAX_SENDS:
        text = f"{where}: the helper process died {_MAX_SENDS} times while it had this request; its error is on standard error"
        return TransientStorageError(text, url=where)
    if isinstance(question, NextPage) and not question.is_first:
        return TransientStorageError(f"{where}: the helper process died in the middle of the listing: list again", url=where)
    with contextlib.suppress(OSError):
        if _file_of(question) == entry.file:
            return None
    return StorageError(f"{where}: its descriptor was closed before its FetchDone: keep it open until then", url=where)


def cancelled(entry: Unanswered) -> FetchCancelledError:
    """Return the error of a request that its user gave up."""
    where = _where(entry.question)
    return FetchCancelledError(f"{where}: it was given up before its end", url=where)


def _where(question: Question) -> str:
    if isinstance(question, CheckProviders):
        return "providers"
    return redact(question.prefix if isinstance(question, NextPage) else question.url)


def _file_of(question: Question) -> _FileIdentity | None:
    """Return which file a download writes to."""
    if not isinstance(question, FetchRequest):
        return None
    status = os.fstat(question.fd)
    return _FileIdentity(status.st_dev, status.st_ino)
