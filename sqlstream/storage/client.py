"""What is outstanding at the helper, and the one thread that hears from it.

Locks, always in this order: `locks.fork_guard()` (only where a helper may be started), `_lock`, the channel's own. `_lock`
guards the state and is held while sending, so that no grant or cancel overtakes its request (the helper always reads, so a send
ends); it is never held while waiting for an answer or calling a sink.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import NamedTuple

from sqlstream import locks
from sqlstream.config import StorageOptions
from sqlstream.errors import FetchCancelledError, SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.channel import MAX_DESCRIPTORS, ChannelClosedError
from sqlstream.storage.helper_process import HelperProcess
from sqlstream.storage.messages import (
    Cancel,
    EndListing,
    Fetch,
    FetchDone,
    FetchEvent,
    FetchRequest,
    Grant,
    GrantNeeded,
    Head,
    LogLine,
    NextPage,
    Reply,
    ToReader,
)
from sqlstream.storage.urls import redact

Question = FetchRequest | Head | NextPage
Sink = Callable[[Sequence[FetchEvent]], None]

_MAX_SENDS = 3  # the first, and two more to helpers that follow dead ones: a request that kills them must not do so for ever

_logger = logging.getLogger(__name__)


class _FileIdentity(NamedTuple):
    device: int
    inode: int


@dataclass(slots=True, kw_only=True)
class _Outstanding:
    """A download or a call without its answer."""

    question: Question
    """As it must be asked again if the helper dies: with the latest grant."""
    answer: Sink | Future[Reply]
    helper: HelperProcess
    file: _FileIdentity | None
    """What a download writes to: the number of a descriptor that was closed too early may mean another file by now."""
    num_sends: int = 1
    is_cancelled: bool = False

    def fail(self, error: SqlStreamError) -> None:
        """End it with an error of our side."""
        if isinstance(self.question, FetchRequest):
            assert not isinstance(self.answer, Future)
            _call_sink(self.answer, [FetchDone(ticket=self.question.ticket, error=error)])
        else:
            assert isinstance(self.answer, Future)
            self.answer.set_exception(error)


class HelperClient:
    """Keeps at most one helper at work, started when something is asked; thread safe, fork aware.

    Each helper has a receiver thread, which ends with it.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._lock = threading.RLock()  # reentrant: a finalizer may call stop() wherever this thread is
        self._helper: HelperProcess | None = None
        self._unreaped: dict[HelperProcess, threading.Thread] = {}
        self._outstanding: dict[str, _Outstanding] = {}
        locks.call_after_fork(self)

    def after_fork_in_child(self) -> None:
        """Forget helpers, threads and all that is outstanding: they are the parent's."""
        self._lock = threading.RLock()
        for helper in self._unreaped:
            helper.forget()
        self._helper = None
        self._unreaped = {}
        self._outstanding = {}

    @property
    def helper_pid(self) -> int | None:
        """Process id of the helper, None when none runs."""
        with self._lock:
            return self._helper.pid if self._helper is not None else None

    @property
    def num_pending(self) -> int:
        """Downloads and calls without their answer."""
        with self._lock:
            return len(self._outstanding)

    def fetch(self, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Send downloads; the sink gets their events."""
        self._ask({request.ticket: request for request in requests}, sink)

    def call(self, question: Head | NextPage) -> Reply:
        """Send a question and wait for its answer; raise the error that it may be."""
        future: Future[Reply] = Future()
        self._ask({question.call: question}, future)
        reply = future.result()
        if reply.error is None:
            return reply
        try:
            raise reply.error
        finally:
            del future, reply  # else the error holds this frame, which holds the error, and the caller's objects with them

    def grant(self, ticket: str, granted_bytes: int) -> None:
        """Let a download write up to `granted_bytes`; without effect when it has ended."""
        with self._lock:
            entry = self._outstanding.get(ticket)
            if entry is None or not isinstance(entry.question, FetchRequest):
                return
            entry.question = replace(entry.question, granted_bytes=max(granted_bytes, entry.question.granted_bytes))
            _send(entry.helper, Grant(ticket=ticket, granted_bytes=granted_bytes))

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up; each still ends with its FetchDone."""
        helpers: dict[HelperProcess, list[str]] = {}
        with self._lock:
            for ticket in tickets:
                if entry := self._outstanding.get(ticket):
                    entry.is_cancelled = True
                    helpers.setdefault(entry.helper, []).append(ticket)
            for helper, theirs in helpers.items():
                _send(helper, Cancel(tickets=tuple(theirs)))

    def end_listing(self, listing: str) -> None:
        """Tell the helper that a listing is not read on."""
        with self._lock:
            if self._helper is not None:
                _send(self._helper, EndListing(listing=listing))

    def stop(self) -> None:
        """Kill the helper; return when it is reaped, its thread has ended and every outstanding request has its error."""
        if (helper := self._helper) is not None:
            helper.kill()  # before the lock: a send to a helper that no longer reads would hold it for ever
        with self._lock:
            if self._helper is not None:
                self._helper.kill()
                self._helper = None
            threads = list(self._unreaped.values())
        for thread in threads:
            if thread is not threading.current_thread():  # a sink may stop us
                thread.join()

    def _ask(self, questions: Mapping[str, Question], answer: Sink | Future[Reply]) -> None:
        """Enter the questions as outstanding at the helper, started if need be, and send them."""
        with self._at_helper() as helper:
            if twice := questions.keys() & self._outstanding.keys():
                raise ValueError(f"tickets {sorted(twice)} are outstanding already: give each download its own")
            entries = {
                name: _Outstanding(question=question, answer=answer, helper=helper, file=_file_of(question))
                for name, question in questions.items()
            }
            try:
                self._outstanding.update(entries)
                _send_questions(helper, list(questions.values()))
            except BaseException:  # Ctrl-C: half a frame may be out, nobody can read on behind it
                for name in entries:
                    self._outstanding.pop(name, None)
                helper.channel.shutdown()
                raise

    @contextlib.contextmanager
    def _at_helper(self) -> Iterator[HelperProcess]:
        """Hold `_lock` with a helper running."""
        with self._lock:
            if self._helper is not None:
                yield self._helper
                return
        with locks.fork_guard(), self._lock:
            yield self._ensure_helper()

    def _ensure_helper(self) -> HelperProcess:
        """Return the helper, started if need be; the caller holds both locks."""
        if self._helper is None:
            try:
                helper = HelperProcess(self._options)
            except OSError as error:
                raise StorageError(f"the helper process does not start: {error}", errno=error.errno) from error
            thread = threading.Thread(target=self._receive, args=(helper,), name="sqlstream-fetcher", daemon=True)
            self._helper, self._unreaped[helper] = helper, thread
            thread.start()
        return self._helper

    # What follows runs in a receiver thread.

    def _receive(self, helper: HelperProcess) -> None:
        """Hear a helper until it is gone."""
        while True:
            try:  # no name for what came: it would hold errors, and through them the frames of callers, until the next one
                self._dispatch(helper.channel.receive()[0])
            except ChannelClosedError:
                break
        helper.close()
        try:
            self._after_death(helper)
        finally:
            with self._lock:
                del self._unreaped[helper]

    def _dispatch(self, messages: Sequence[ToReader]) -> None:
        """Give each answer to the one who waits for it; events of one sink go together."""
        batches: dict[int, tuple[Sink, list[FetchEvent]]] = {}
        for message in messages:
            if isinstance(message, LogLine):
                logging.getLogger(message.name).log(message.level, "%s", message.text)
                continue
            name = message.call if isinstance(message, Reply) else message.ticket
            with self._lock:
                is_last = not isinstance(message, GrantNeeded)
                entry = self._outstanding.pop(name, None) if is_last else self._outstanding.get(name)
            if entry is None:
                continue
            if isinstance(message, Reply):
                assert isinstance(entry.answer, Future)
                entry.answer.set_result(message)
            else:
                assert not isinstance(entry.answer, Future)
                batches.setdefault(id(entry.answer), (entry.answer, []))[1].append(message)
        for sink, events in batches.values():
            _call_sink(sink, events)

    def _after_death(self, dead: HelperProcess) -> None:
        """Ask a new helper what the dead one left open; end what was cancelled, stopped, or sent too often."""
        failed: list[tuple[_Outstanding, SqlStreamError]] = []
        with locks.fork_guard(), self._lock:
            if self._helper is dead:
                self._helper = None
            lost = {name: entry for name, entry in self._outstanding.items() if entry.helper is dead}
            again = {}
            for name, entry in lost.items():
                if (reason := _reason_to_end(entry)) is None:
                    again[name] = entry
                else:
                    failed.append((entry, reason))
            try:
                self._ask_again(list(again.values()), dead)
            except StorageError as error:
                failed += [(entry, error) for entry in again.values()]
                again = {}
            for name in lost.keys() - again.keys():
                del self._outstanding[name]
        for entry, reason in failed:
            entry.fail(reason)

    def _ask_again(self, entries: Sequence[_Outstanding], dead: HelperProcess) -> None:
        """Send what a dead helper left open to the one that follows; the caller holds both locks."""
        if not entries:
            return
        helper = self._ensure_helper()
        _logger.warning("the helper process %d died; another one gets its %d open requests", dead.pid, len(entries))
        for entry in entries:
            entry.helper, entry.num_sends = helper, entry.num_sends + 1
        _send_questions(helper, [entry.question for entry in entries])


def _reason_to_end(entry: _Outstanding) -> SqlStreamError | None:
    """Return the error that a request ends with after the death of its helper; None when it is asked again."""
    question = entry.question
    where = redact(question.prefix if isinstance(question, NextPage) else question.url)
    if entry.is_cancelled or entry.helper.is_stopping:
        return FetchCancelledError(f"{where}: the download was {'cancelled' if entry.is_cancelled else 'stopped'}", url=where)
    if entry.num_sends >= _MAX_SENDS:
        text = f"{where}: the helper process died {_MAX_SENDS} times while it had this request; its error is on standard error"
        return TransientStorageError(text, url=where)
    if isinstance(question, NextPage) and not question.is_first:
        return TransientStorageError(f"{where}: the helper process died in the middle of the listing: list again", url=where)
    with contextlib.suppress(OSError):
        if _file_of(question) == entry.file:
            return None
    return StorageError(f"{where}: its descriptor was closed before its FetchDone: keep it open until then", url=where)


def _file_of(question: Question) -> _FileIdentity | None:
    """Return which file a download writes to."""
    if not isinstance(question, FetchRequest):
        return None
    status = os.fstat(question.fd)
    return _FileIdentity(status.st_dev, status.st_ino)


def _send(helper: HelperProcess, *messages: object) -> None:
    """Send to a helper that may just have died: then its receiver thread finds the request outstanding and acts."""
    with contextlib.suppress(ChannelClosedError):
        if messages:
            helper.channel.send(messages)


def _send_questions(helper: HelperProcess, questions: Sequence[Question]) -> None:
    """Send downloads with their descriptors, and calls."""
    fetches = [question for question in questions if isinstance(question, FetchRequest)]
    with contextlib.suppress(ChannelClosedError):
        for start in range(0, len(fetches), MAX_DESCRIPTORS):
            part = tuple(fetches[start : start + MAX_DESCRIPTORS])
            helper.channel.send([Fetch(requests=part)], [request.fd for request in part])
    _send(helper, *[question for question in questions if not isinstance(question, FetchRequest)])


def _call_sink(sink: Sink, events: Sequence[FetchEvent]) -> None:
    try:
        sink(events)
    except Exception:
        _logger.exception("a sink of fetch events raised")
