"""Sends the requests of its users to the helper, and receives the answers in one thread.

Locks, always in this order: `_lock`, then `locks.fork_guard()` (where a helper is started) or the channel's own. `_lock` guards
the state and is held while sending, so that no grant or cancel overtakes its request (the helper always reads, so a send ends;
a helper that does not is killed by its receiver thread, without the lock); it is never held while waiting for an answer or
calling a sink. It is a section (`interrupts`): a handler that raises would leave half a frame.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from sqlstream.config import StorageOptions
from sqlstream.errors import CacheClosedError, SqlStreamError, StorageError
from sqlstream.process import fork, interrupts, locks
from sqlstream.process.threads import no_thread
from sqlstream.storage.client.outstanding import Answer, Ended, HelperUser, Outstanding, Question, Sink, Unanswered, cancelled
from sqlstream.storage.client.process import HelperProcess
from sqlstream.storage.client.starter import STARTER
from sqlstream.storage.protocol.channel import MAX_DESCRIPTORS, ChannelClosedError
from sqlstream.storage.protocol.messages import (
    Alive,
    Cancel,
    CheckProviders,
    EndListing,
    EndUser,
    Fetch,
    FetchDone,
    FetchEvent,
    FetchRequest,
    Grant,
    GrantNeeded,
    Head,
    HelperTiming,
    LogLine,
    NextPage,
    Put,
    Ranges,
    Reply,
    ToReader,
)

_logger = logging.getLogger(__name__)


class HelperClient:
    """Keeps at most one helper at work for all its users, started when one of them asks; thread safe, fork aware.

    Each helper has a receiver thread, which ends with it. A user is counted from its first question until `stop`.

    Args:
        options: The server and who asks it; how each user reads goes with its questions.
        timing: When a helper is taken for idle or hanging.
        environment: Of every helper; it chooses servers and identities as options do, so it must not change between two.
    """

    def __init__(self, options: StorageOptions, timing: HelperTiming, environment: Mapping[str, str]) -> None:
        self._options = options
        self._timing = timing
        self._environment = environment
        self._lock = locks.StateLock()
        self._users: set[HelperUser] = set()
        self._stopping: set[HelperUser] = set()
        """Those that wait for the end of what they gave up."""
        self._helper: HelperProcess | None = None
        self._unreaped: dict[HelperProcess, threading.Thread] = {}
        self._outstanding = Outstanding()
        self._listings: dict[str, HelperUser] = {}
        """Listings that are open in the helper."""
        self._telling: list[Unanswered] = []
        """Entries whose sinks are being called."""
        self._changes = interrupts.Changes()
        """Ends of entries."""
        fork.call_in_child(self, fork.Stage.MEMORY)

    def after_fork_in_child(self) -> None:
        """Forget users, helpers, threads and all that is outstanding: they are the parent's."""
        for helper in self._unreaped:
            helper.forget()
        self._users = set()
        self._stopping = set()
        self._helper = None
        self._unreaped = {}
        self._outstanding = Outstanding()
        self._listings = {}
        self._telling = []
        self._changes = interrupts.Changes()

    def helper_pid(self, user: HelperUser) -> int | None:
        """Return the process id of the helper that a user has asked, None when none runs."""
        with self._lock:
            helper = self._helper if user in self._users else None
        return None if helper is None else helper.wait_pid() or None

    def num_pending(self, user: HelperUser) -> int:
        """Return how many downloads and calls of a user have no answer yet."""
        with self._lock:
            return sum(not entry.is_over for entry in self._outstanding.of(user))

    def expect_forks(self, user: HelperUser) -> None:
        """Have a starter, until `stop`: this process and those that are forked from it will want helpers."""
        STARTER.keep(user, self._environment)

    def fetch(self, user: HelperUser, requests: Sequence[FetchRequest], sink: Sink) -> None:
        """Send downloads; the sink gets their events."""
        self._ask(user, {request.ticket: request for request in requests}, sink)

    def call(self, user: HelperUser, question: Head | NextPage | Put | Ranges | CheckProviders) -> Reply:
        """Send a question and wait for its answer; raise the error that it may be."""
        answer: Answer = queue.SimpleQueue()
        if isinstance(question, NextPage):
            self._listings[question.listing] = user
        self._ask(user, {question.call: question}, answer)
        reply = answer.get()
        error = reply.error if isinstance(reply, Reply) else reply
        if isinstance(reply, Reply) and error is None:
            return reply
        try:
            assert error is not None
            raise error
        finally:
            del (
                answer,
                reply,
                error,
            )  # else the error holds this frame, which holds the error, and the caller's objects with them

    def grant(self, user: HelperUser, ticket: str, granted_bytes: int) -> None:
        """Let a download write up to `granted_bytes`; without effect when it has ended."""
        with self._lock:
            if (entry := self._outstanding.get(ticket)) is not None and entry.user is user:
                entry.grant(granted_bytes)
                if entry.helper is not None:
                    _send(entry.helper, Grant(ticket=ticket, granted_bytes=granted_bytes))

    def cancel(self, user: HelperUser, tickets: Sequence[str]) -> None:
        """Give downloads up; each still ends with its FetchDone."""
        helpers: dict[HelperProcess, list[str]] = {}
        with self._lock:
            for ticket in tickets:
                if (entry := self._outstanding.get(ticket)) is not None and entry.user is user:
                    entry.is_cancelled = True
                    if entry.helper is not None:
                        helpers.setdefault(entry.helper, []).append(ticket)
            for helper, theirs in helpers.items():
                _send(helper, Cancel(tickets=tuple(theirs)))

    def end_listing(self, user: HelperUser, listing: str) -> None:
        """Tell the helper that a listing is not read on."""
        with self._lock:
            self._listings.pop(listing, None)
            if self._helper is not None:
                _send(self._helper, EndListing(user=user.options.user, listing=listing))

    def abandon(self, user: HelperUser) -> None:
        """Give up what a user has open, kill the helper if it was the last user, and wait for nothing. Safe in a finalizer."""
        self._users.discard(user)
        interrupts.call_outside(partial(STARTER.leave, user))
        for entry in self._outstanding.of(user):
            entry.is_cancelled = True
        if not self._users and (helper := self._helper) is not None:
            helper.kill()

    def stop(self, user: HelperUser) -> None:
        """Give up what a user has open, and kill the helper if it was the last user.

        Returns when every outstanding request of the user has its error, and a helper that was killed is reaped.
        """
        with interrupts.uninterrupted(), self._as_stopping(user):
            self.abandon(user)  # before the lock: a send to a helper that no longer reads would hold it for ever
            with self._lock:
                self._users.discard(user)
                entries = [*self._outstanding.of(user), *(entry for entry in self._telling if entry.user is user)]
                for entry in entries:
                    entry.is_cancelled = True
                for listing in [listing for listing, reader in self._listings.items() if reader is user]:
                    del self._listings[listing]
                helper, threads = self._helper, list(self._unreaped.values())
                if helper is not None and self._users:
                    threads.remove(self._unreaped[helper])
                    _send(helper, EndUser(user=user.options.user))
                elif helper is not None:
                    helper.kill()
                    self._helper = None
            calls = [entry for entry in entries if not isinstance(entry.question, FetchRequest) and not entry.is_over]
            _end([Ended(entry, cancelled(entry)) for entry in calls])  # the helper gives up downloads only
            for thread in threads:
                interrupts.join(thread)
            interrupts.wait_until(lambda: all(entry.is_over for entry in entries), self._changes)

    def close(self, user: HelperUser) -> None:
        """Stop, and answer nothing that this user asks from now on."""
        user.is_closed = True
        self.stop(user)

    @contextlib.contextmanager
    def _as_stopping(self, user: HelperUser) -> Iterator[None]:
        self._stopping.add(user)
        try:
            yield
        finally:
            self._stopping.discard(user)

    def end_idle(self) -> list[threading.Thread]:
        """Kill a helper that owes nothing and has no listing open; return the threads that are about to end. Never waits."""
        if not self._lock.try_for(0.0):
            return []
        try:
            if self._helper is None or len(self._outstanding) or self._listings or self._telling:
                return []
            self._helper.kill()
            threads = [self._unreaped[self._helper]]
            self._helper = None
            self._users.clear()
            return threads
        finally:
            self._lock.__exit__(None, None, None)

    def _ask(self, user: HelperUser, questions: Mapping[str, Question], answer: Sink | Answer) -> None:
        """Enter the questions as outstanding at the helper, started if need be, and send what may be sent."""
        with self._lock:
            if user.is_closed:
                raise CacheClosedError("the dataset or cache was closed: open it again to read more")
            helper = self._ensure_helper()
            self._users.add(user)
            self._outstanding.add(questions, user, answer)
            try:
                self._send_on(helper)
            except BaseException:  # half a frame may be out, and nothing can be read behind it
                self._outstanding.remove(questions)
                helper.channel.shutdown()
                raise

    def _send_on(self, helper: HelperProcess) -> None:
        """Send what waits and may be sent; the caller holds the lock."""
        _send_questions(helper, self._outstanding.take_sendable(helper))

    def _ensure_helper(self) -> HelperProcess:
        """Return the helper, started if need be; the caller holds the lock."""
        if self._helper is None or self._helper.is_stopping:  # a finalizer that has killed it took no lock to say so
            try:
                helper = HelperProcess(self._options, self._timing, self._environment)
            except OSError as error:
                text = f"the helper process does not start: {error}: see `ulimit -u` and `ulimit -n`"
                raise StorageError(text, errno=error.errno) from error
            self._unreaped[helper] = _start_receiver(self._receive, helper)
            self._helper = helper
        return self._helper

    # What follows runs in a receiver thread.

    def _receive(self, helper: HelperProcess) -> None:
        """Receive from a helper until it is gone."""
        interrupts.be_service()
        num_silent, has_spoken = 0, False
        while True:
            try:  # no name for what came: it would hold errors, and through them the frames of callers, until the next one
                if self._dispatch(helper, helper.receive(self._timing.look_seconds)):
                    num_silent, has_spoken = 0, True
            except TimeoutError:
                num_silent += 1
                if num_silent >= self._timing.max_idle_looks:
                    self.end_idle()
                if num_silent >= self._max_silent_looks(has_spoken=has_spoken):
                    self._end_if_hanging(helper)
            except ChannelClosedError:
                break
        helper.close()
        if helper.is_forked and not has_spoken and not helper.is_stopping:
            STARTER.distrust()
        try:
            self._after_death(helper, has_spoken=has_spoken)
        finally:
            with self._lock:
                del self._unreaped[helper]

    def _max_silent_looks(self, *, has_spoken: bool) -> int:
        """Return after how many silent looks a helper hangs: fewer while a user waits for it to give up what it has."""
        timing = self._timing
        if not has_spoken:
            return timing.max_silent_looks_at_start
        return min(timing.max_silent_looks, timing.max_silent_looks_at_stop) if self._stopping else timing.max_silent_looks

    def _end_if_hanging(self, helper: HelperProcess) -> None:
        """Kill a silent helper if it owes answers: its requests go to another one."""
        if self._lock.try_for(self._timing.look_seconds):  # else another thread sends, and it does not read
            is_idle = not self._outstanding.is_waiting_for(helper)
            self._lock.__exit__(None, None, None)
            if is_idle:
                return
        _logger.warning("the helper process %d gives no sign of life: it is killed", helper.pid)
        helper.end()

    def _dispatch(self, helper: HelperProcess, messages: Sequence[ToReader]) -> bool:
        """Give each answer to its caller or sink, events of one sink together; return False if there is no message."""
        if not messages:
            return False
        answers: list[FetchEvent | Reply] = []
        for message in messages:
            if isinstance(message, LogLine):
                logging.getLogger(message.name).log(message.level, "%s", message.text)
            elif not isinstance(message, Alive):
                answers.append(message)
        with self._lock:
            self._outstanding.note_sign_of_life()
            entries = [self._outstanding.entry_of(answer) for answer in answers]
            ended = self._outstanding.take_cancelled()
            with contextlib.suppress(ChannelClosedError):
                self._send_on(helper)
            told = [*filter(None, entries), *(entry for entry, _ in ended)]
            self._telling += told
        try:
            _tell(answers, entries)
            _end(ended)
        finally:
            self._forget_told(told)
        return True

    def _after_death(self, dead: HelperProcess, *, has_spoken: bool) -> None:
        """Ask a new helper what the dead one left open, and end what is not asked again."""
        with self._lock:
            if self._helper is dead:
                self._helper = None
            ended = self._outstanding.after_death(dead, has_spoken=has_spoken)
            if self._helper is None and len(self._outstanding):
                try:
                    self._ensure_helper()
                except SqlStreamError as error:
                    ended += self._outstanding.fail_all(error)
                else:
                    if dead.pid:  # else the starter has said what there is to say
                        num_open = len(self._outstanding)
                        _logger.warning("the helper process %d died; another one gets its %d open requests", dead.pid, num_open)
            if self._helper is not None:
                self._send_on(self._helper)
            told = [entry for entry, _ in ended]
            self._telling += told
        try:
            _end(ended)
        finally:
            self._forget_told(told)

    def _forget_told(self, told: Sequence[Unanswered]) -> None:
        with self._lock:
            for entry in told:
                self._telling.remove(entry)
        self._changes.notify_all()


def _tell(answers: Sequence[FetchEvent | Reply], entries: Sequence[Unanswered | None]) -> None:
    """Give each answer to its caller or sink; events of one sink go together."""
    batches: dict[int, tuple[Sink, list[FetchEvent]]] = {}
    for answer, entry in zip(answers, entries, strict=True):
        if entry is None:
            continue
        if isinstance(answer, Reply):
            assert isinstance(entry.answer, queue.SimpleQueue)
            entry.answer.put(answer)
        else:
            assert not isinstance(entry.answer, queue.SimpleQueue)
            batches.setdefault(id(entry.answer), (entry.answer, []))[1].append(answer)
    for sink, events in batches.values():
        _call_sink(sink, events)
    for answer, entry in zip(answers, entries, strict=True):
        if entry is not None and not isinstance(answer, GrantNeeded):
            entry.is_over = True


def _start_receiver(receive: Callable[[HelperProcess], None], helper: HelperProcess) -> threading.Thread:
    """Start the receiver thread of a helper, before either is noted: nothing else would receive its messages."""
    thread = threading.Thread(target=receive, args=(helper,), name="sqlstream-fetcher", daemon=True)
    try:
        thread.start()
    except BaseException as error:
        helper.close()
        if not isinstance(error, RuntimeError | MemoryError):
            raise
        raise no_thread("read from the helper process", error) from error
    return thread


def _send(helper: HelperProcess, *messages: object) -> None:
    """Send to a helper that may just have died: then its receiver thread finds the request outstanding and acts."""
    with contextlib.suppress(ChannelClosedError):
        if messages:
            helper.channel.send(messages)


def _send_questions(helper: HelperProcess, entries: Sequence[Unanswered]) -> None:
    """Send downloads with their descriptors, those of each user together, and calls."""
    fetches: dict[HelperUser, list[FetchRequest]] = {}
    for entry in entries:
        if isinstance(entry.question, FetchRequest):
            fetches.setdefault(entry.user, []).append(entry.question)
    with contextlib.suppress(ChannelClosedError):
        for user, requests in fetches.items():
            for start in range(0, len(requests), MAX_DESCRIPTORS):
                part = tuple(requests[start : start + MAX_DESCRIPTORS])
                helper.channel.send([Fetch(options=user.options, requests=part)], [request.fd for request in part])
    _send(helper, *[entry.question for entry in entries if not isinstance(entry.question, FetchRequest)])


def _end(ended: Sequence[Ended]) -> None:
    """Give entries that end without an answer their error."""
    for entry, error in ended:
        if isinstance(entry.question, FetchRequest):
            assert not isinstance(entry.answer, queue.SimpleQueue)
            _call_sink(entry.answer, [FetchDone(ticket=entry.question.ticket, error=error)])
        else:
            assert isinstance(entry.answer, queue.SimpleQueue)
            entry.answer.put(error)
        entry.is_over = True


def _call_sink(sink: Sink, events: Sequence[FetchEvent]) -> None:
    try:
        sink(events)
    except Exception:
        _logger.exception("a sink of fetch events raised")
