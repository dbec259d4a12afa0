"""The way to the helper, and the one thread that hears from it.

Locks, always in this order: `locks.fork_guard()` (only where a helper may be started), `_lock`, the channel's own. `_lock`
guards the state and is held while sending, so that no grant or cancel overtakes its request (the helper always reads, so a send
ends; a helper that does not is killed by its receiver thread, without the lock); it is never held while waiting for an answer
or calling a sink.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from sqlstream import locks
from sqlstream.config import StorageOptions
from sqlstream.errors import StorageError
from sqlstream.storage.channel import MAX_DESCRIPTORS, ChannelClosedError
from sqlstream.storage.helper_process import HelperProcess
from sqlstream.storage.messages import (
    Alive,
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
    Ranges,
    Reply,
    ShareNode,
    ToReader,
)
from sqlstream.storage.outstanding import Ended, Entry, Outstanding, Question, Sink

_LOOK_SECONDS = 2.0
_MAX_SILENT_LOOKS = 15
"""A helper that owes answers gives a sign every 2 s; one that is silent for 15 looks of 2 s hangs. Looks, not time: a job that
was stopped as a whole (SIGSTOP, a suspended machine) must not find its helper overdue when it goes on."""
_MAX_SILENT_LOOKS_AT_START = 60  # its imports may come from a cold network disk
_MAX_IDLE_LOOKS = 15
"""A helper that was asked nothing for 30 s ends, and gives back its 40 MB; the next question starts one in 0.15 s (m)."""

_logger = logging.getLogger(__name__)


class HelperClient:
    """Keeps at most one helper at work, started when something is asked; thread safe, fork aware.

    Each helper has a receiver thread, which ends with it.
    """

    def __init__(self, options: StorageOptions) -> None:
        self._options = options
        self._lock = threading.RLock()  # reentrant: a finalizer may call stop() wherever this thread is
        self._helper: HelperProcess | None = None
        self._unreaped: dict[HelperProcess, threading.Thread] = {}
        self._outstanding = Outstanding()
        self._listings: set[str] = set()
        """Those that are open in the helper."""
        self._num_processes = 1
        locks.call_after_fork(self)
        _clients.add(self)

    def after_fork_in_child(self) -> None:
        """Forget helpers, threads and all that is outstanding: they are the parent's."""
        self._lock = threading.RLock()
        for helper in self._unreaped:
            helper.forget()
        self._helper = None
        self._unreaped = {}
        self._outstanding = Outstanding()
        self._listings = set()

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

    def call(self, question: Head | NextPage | Ranges) -> Reply:
        """Send a question and wait for its answer; raise the error that it may be."""
        future: Future[Reply] = Future()
        if isinstance(question, NextPage):
            self._listings.add(question.listing)
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
            if (entry := self._outstanding.get(ticket)) is not None:
                entry.grant(granted_bytes)
                if entry.helper is not None:
                    _send(entry.helper, Grant(ticket=ticket, granted_bytes=granted_bytes))

    def cancel(self, tickets: Sequence[str]) -> None:
        """Give downloads up; each still ends with its FetchDone."""
        helpers: dict[HelperProcess, list[str]] = {}
        with self._lock:
            for ticket in tickets:
                if (entry := self._outstanding.get(ticket)) is not None:
                    entry.is_cancelled = True
                    if entry.helper is not None:
                        helpers.setdefault(entry.helper, []).append(ticket)
            for helper, theirs in helpers.items():
                _send(helper, Cancel(tickets=tuple(theirs)))

    @property
    def num_processes(self) -> int:
        """Processes that share the node, as far as we were told."""
        return self._num_processes

    def end_listing(self, listing: str) -> None:
        """Tell the helper that a listing is not read on."""
        with self._lock:
            self._listings.discard(listing)
            if self._helper is not None:
                _send(self._helper, EndListing(listing=listing))

    def share_node(self, num_processes: int) -> None:
        """Tell this helper, and those that follow, how many processes share the node."""
        if num_processes == self.num_processes:
            return
        with self._lock:
            self._num_processes = num_processes
            if self._helper is not None:
                _send(self._helper, ShareNode(num_processes=num_processes))

    def stop(self) -> None:
        """Kill the helper; return when it is reaped, its thread has ended and every outstanding request has its error."""
        if (helper := self._helper) is not None:
            helper.kill()  # before the lock: a send to a helper that no longer reads would hold it for ever
        with self._lock:
            if self._helper is not None:
                self._helper.kill()
                self._outstanding.give_up(self._helper)
                self._helper = None
            threads = list(self._unreaped.values())
        for thread in threads:
            if thread is not threading.current_thread():  # a sink may stop us
                thread.join()

    def end_idle(self) -> list[threading.Thread]:
        """Kill a helper that owes nothing and has no listing open; return the threads that are about to end."""
        with self._lock:
            if self._helper is None or len(self._outstanding) or self._listings:
                return []
            self._helper.kill()
            threads = [self._unreaped[self._helper]]
            self._helper = None
            return threads

    def _ask(self, questions: Mapping[str, Question], answer: Sink | Future[Reply]) -> None:
        """Enter the questions as outstanding at the helper, started if need be, and send what may be sent."""
        with self._at_helper() as helper:
            self._outstanding.add(questions, answer)
            try:
                self._send_on(helper)
            except BaseException:  # Ctrl-C: half a frame may be out, nobody can read on behind it
                self._outstanding.remove(questions)
                helper.channel.shutdown()
                raise

    def _send_on(self, helper: HelperProcess) -> None:
        """Send what waits and may be sent; the caller holds the lock."""
        _send_questions(helper, [entry.question for entry in self._outstanding.take_sendable(helper)])

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
            if self._num_processes > 1:
                _send(helper, ShareNode(num_processes=self._num_processes))
        return self._helper

    # What follows runs in a receiver thread.

    def _receive(self, helper: HelperProcess) -> None:
        """Hear a helper until it is gone."""
        num_silent, has_spoken = 0, False
        while True:
            try:  # no name for what came: it would hold errors, and through them the frames of callers, until the next one
                self._dispatch(helper, helper.channel.receive(_LOOK_SECONDS)[0])
                num_silent, has_spoken = 0, True
            except TimeoutError:
                num_silent += 1
                if num_silent >= _MAX_IDLE_LOOKS:
                    self.end_idle()
                if num_silent >= (_MAX_SILENT_LOOKS if has_spoken else _MAX_SILENT_LOOKS_AT_START):
                    self._end_if_hanging(helper)
            except ChannelClosedError:
                break
        helper.close()
        try:
            self._after_death(helper, has_spoken=has_spoken)
        finally:
            with self._lock:
                del self._unreaped[helper]

    def _end_if_hanging(self, helper: HelperProcess) -> None:
        """Kill a silent helper if it owes answers: its requests go to another one."""
        is_free = self._lock.acquire(timeout=_LOOK_SECONDS)  # taken: somebody sends, and it does not read
        try:
            if is_free and not self._outstanding.is_waiting_for(helper):
                return
        finally:
            if is_free:
                self._lock.release()
        _logger.warning("the helper process %d gives no sign of life: it is killed", helper.pid)
        helper.end()

    def _dispatch(self, helper: HelperProcess, messages: Sequence[ToReader]) -> None:
        """Give each answer to the one who waits for it; events of one sink go together."""
        batches: dict[int, tuple[Sink, list[FetchEvent]]] = {}
        answers: list[FetchEvent | Reply] = []
        for message in messages:
            if isinstance(message, LogLine):
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            elif not isinstance(message, Alive):
                answers.append(message)
        with self._lock:
            self._outstanding.note_sign_of_life()
            entries = [self._entry_of(answer) for answer in answers]
            ended = self._outstanding.take_cancelled()
            with contextlib.suppress(ChannelClosedError):
                self._send_on(helper)
        for answer, entry in zip(answers, entries, strict=True):
            if entry is None:
                continue
            if isinstance(answer, Reply):
                assert isinstance(entry.answer, Future)
                entry.answer.set_result(answer)
            else:
                assert not isinstance(entry.answer, Future)
                batches.setdefault(id(entry.answer), (entry.answer, []))[1].append(answer)
        for sink, events in batches.values():
            _call_sink(sink, events)
        _end(ended)

    def _entry_of(self, answer: FetchEvent | Reply) -> Entry | None:
        """Return whose answer this is, taken out if it is the last one."""
        if isinstance(answer, GrantNeeded):
            return self._outstanding.get(answer.ticket)
        return self._outstanding.pop(answer.call if isinstance(answer, Reply) else answer.ticket)

    def _after_death(self, dead: HelperProcess, *, has_spoken: bool) -> None:
        """Ask a new helper what the dead one left open, and end what is not asked again."""
        with locks.fork_guard(), self._lock:
            if self._helper is dead:
                self._helper = None
            ended = self._outstanding.after_death(dead, has_spoken=has_spoken)
            if self._helper is None and len(self._outstanding):
                try:
                    self._ensure_helper()
                except StorageError as error:
                    ended += self._outstanding.fail_all(error)
                else:
                    num_open = len(self._outstanding)
                    _logger.warning("the helper process %d died; another one gets its %d open requests", dead.pid, num_open)
            if self._helper is not None:
                self._send_on(self._helper)
        _end(ended)


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


def _end(ended: Sequence[Ended]) -> None:
    """Give entries that end without an answer their error."""
    for entry, error in ended:
        if isinstance(entry.question, FetchRequest):
            assert not isinstance(entry.answer, Future)
            _call_sink(entry.answer, [FetchDone(ticket=entry.question.ticket, error=error)])
        else:
            assert isinstance(entry.answer, Future)
            entry.answer.set_exception(error)


def _call_sink(sink: Sink, events: Sequence[FetchEvent]) -> None:
    try:
        sink(events)
    except Exception:
        _logger.exception("a sink of fetch events raised")


_clients: weakref.WeakSet[HelperClient] = weakref.WeakSet()


def _before_fork() -> None:
    """End the helpers that nobody waits for, and their threads: a process that forks should have few, and workers start theirs.

    Runs before the guard is taken (`locks` was imported first), which those threads want. Who forks while it holds the guard
    keeps them.
    """
    if locks.is_guarded():
        return
    for thread in [thread for client in list(_clients) for thread in client.end_idle()]:
        if thread is not threading.current_thread():
            thread.join()


os.register_at_fork(before=_before_fork)
