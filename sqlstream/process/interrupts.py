"""Sections: stretches of a thread in which no signal handler and no finalizer of ours begins anything.

What a section promises:
- No handler of a signal that is written in Python runs inside it, whatever signal it is for: half a change to pins would be a
  leak, and a handler that reads the cache would wait for what its own thread holds. What came is handed to its handler at the
  end of the section, in order. (Python runs such handlers in the main thread only: elsewhere this costs nothing.)
- Work that the garbage collector asks for (an abandoned iterator, a forgotten cache) waits for the end of the section of that
  thread (`call_outside`): it may come in the middle of a transaction, and would begin another one, or wait for what it stops.
- A wait for others is no part of a section: `wait_in_kernel` returns when a signal comes, and `let_through` hands it over while
  nothing is held. So Ctrl-C ends such a wait at once, and a handler may use the cache.

Handlers are replaced for the time being, not for good: others (asyncio, notebooks, trainers) look at who handles a signal.
Rejected: to mask signals (another thread gets them, and Python runs the handler in the main one all the same); a thread that
does the ledger's work for the main one (two switches of threads for each hit).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without its enums: they cost ten times the call
import _thread
import contextlib
import logging
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any]

JOIN_SECONDS = 0.05
"""How often a wait for a thread looks for signals, where they are put off."""
_SIGNALS = tuple(sorted(set(map(int, signal.valid_signals())) - {signal.SIGKILL, signal.SIGSTOP}))


class _SignalCameError(BaseException):
    """Ends a wait in the kernel; never leaves this module."""


class Section:
    """The section of one thread; a context manager that nests. Get it from `uninterrupted()`."""

    def __init__(self) -> None:
        self.depth = 0
        """How deep the thread is in sections; `locks.StateLock`, whose every use would call here, counts by itself."""
        self.is_main = threading.current_thread() is threading.main_thread()
        self._handler: Handler = self._on_signal  # one object: to ask whether it is installed is a comparison
        self.originals: dict[int, Handler] = {}
        """Whose signals are put off, by number."""
        self._found: tuple[list[object], list[tuple[int, Handler]]] = [], []
        """What handled each signal when it was looked at last, and which of it is written in Python. One value: a handler that
        raised between two would leave handlers known that are not put off, and every later section would let them run."""
        self._came: deque[int] = deque()
        self._ends_wait = False
        self.late: deque[Callable[[], object]] = deque()
        self.is_late = False
        """Whether it does what had to wait for the end of a section."""
        self.is_service = False
        """Whether this is a thread of ours, which others wait for."""

    def __enter__(self) -> Section:
        if self.depth == 0 and self.is_main:
            self.put_off()
        self.depth += 1  # no handler can run between this line and the last call before it
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.depth == 1 and (self.originals or self.late):
            self.end()
        else:
            self.depth -= 1

    @property
    def is_inside(self) -> bool:
        """Whether this thread is inside."""
        return self.depth > 0

    @property
    def has_signal(self) -> bool:
        """Whether a signal waits for its handler."""
        return bool(self._came)

    def call_outside(self, work: Callable[[], object]) -> None:
        """Call `work` now, or at the end of the section that this thread is in."""
        if self.depth:
            self.late.append(work)
        else:
            work()

    def wait_in_kernel(self, wait: Callable[[], object]) -> bool:
        """Call `wait`, a blocking system call; False if a signal came, before, after or meanwhile.

        As with every system call of Python, a signal that comes after the last bytecode and before the kernel waits is seen
        with the next one, or when the wait ends.
        """
        if not self.is_main or not self.depth:
            wait()
            return True
        if self._came:
            return False
        try:
            self._ends_wait = True
            wait()
            self._ends_wait = False
        except _SignalCameError:
            return False
        finally:
            self._ends_wait = False
        return True

    def let_through(self) -> None:
        """Hand over what came, as if outside of the section: the caller holds nothing that a handler could want."""
        depth, self.depth = self.depth, 0
        try:
            self._hand_over()
        finally:
            self.depth = depth
            if depth:
                try:
                    self.put_off()
                except BaseException:  # of the handler of one signal, before that was put off
                    self.put_off()
                    raise

    def after_fork_in_child(self) -> None:
        """Become the main thread's if it was another thread that forked, and drop what came for the parent."""
        self._came.clear()
        self.is_main = True

    def adopt(self, parents: Section) -> None:
        """Take over what the parent's main thread had put off, and give it back if we are outside."""
        parents._came.clear()
        for signum, original in parents.originals.items():
            if _signal.getsignal(signum) is parents._handler:
                _signal.signal(signum, self._handler if self.depth else original)
                if self.depth:
                    self.originals[signum] = original

    def put_off(self) -> None:
        """Have signals noted in place of their handlers."""
        ours, originals = self._handler, self.originals
        found = [*map(_signal.getsignal, _SIGNALS)]
        known, handled = self._found
        if found != known:  # to compare takes a fifth of going through them
            handled = [
                (signum, handler)
                for signum, handler in zip(_SIGNALS, found, strict=True)
                if callable(handler) and handler is not ours
            ]
            self._found = found, handled
        try:
            for signum, handler in handled:
                originals[signum] = handler  # first: from the next line on it is asked for
                _signal.signal(signum, ours)
        except BaseException:  # of a handler: the section does not begin
            if not self.depth:
                self._give_back()
            raise

    def end(self) -> None:
        """Give signals back to their handlers, hand over what came, and do what had to wait: nothing is held."""
        try:
            self.depth = 0  # not before: a handler that raised outside of this `try` would leave the others put off
            self._give_back()
        except BaseException:  # of the handler of one signal: the others are given back all the same
            self._give_back()
            raise
        finally:
            if self._came or self.late:
                try:
                    self._hand_over()
                except BaseException:  # of a handler before the first of them
                    self._hand_over()
                    raise
                finally:
                    self._do_late_work()

    def _give_back(self) -> None:
        ours, originals = self._handler, self.originals
        for signum in tuple(
            originals
        ):  # numbers alone: pairs would be made while it is gone through, and the collector may come
            original = originals.get(signum)
            if original is None:  # a finalizer came with a section of its own, which gave it back
                continue
            if _signal.getsignal(signum) is ours:
                _signal.signal(signum, original)
            originals.pop(signum, None)  # last: a handler that raises before leaves it to the next call

    def _hand_over(self) -> None:
        came = self._came
        while True:
            try:
                if not came:  # asked here: a signal that comes as the loop goes round has all handed over with it
                    return
                signum, frame = came[0], sys._getframe(2)
                handler = self.originals.get(signum) or _signal.getsignal(signum)
                if not callable(handler) or handler is self._handler:
                    handler = _ignore
                if came and came[0] == signum:  # else a signal came since, and with it this one was handed over
                    del came[0]  # no call from here to that of the handler: another one that raised there would lose this one
                    handler(signum, frame)
            except BaseException:
                if came:  # the others get theirs as well
                    self._hand_over()
                raise

    def _do_late_work(self) -> None:
        if self.is_late:  # in a section of such work: the loop below goes on with the next when this one is done
            return
        self.is_late = True
        try:
            while self.late:
                try:
                    self.late.popleft()()
                except Exception:
                    logger.exception("what the garbage collector has left to be done failed")
        finally:
            self.is_late = False

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.depth:
            self._came.append(signum)
            if self._ends_wait:
                self._ends_wait = False
                raise _SignalCameError
        elif self._came:  # a section ends: those that it noted are first
            self._came.append(signum)
            self._hand_over()
        elif (original := self.originals.get(signum)) is not None:  # left behind by a handler that raised meanwhile
            original(signum, frame)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Do nothing: its handler was taken away meanwhile."""


class Changes:
    """Wakes threads that wait for a change.

    A handler may raise at any place here, which `threading.Condition` does not survive: its lock then stays held, or is
    released by whom it does not belong to.
    """

    def __init__(self) -> None:
        self._waiting: deque[_thread.LockType] = deque()

    def wait(self, seconds: float, is_over: Callable[[], bool] = bool) -> bool:
        """Wait until `notify_all` or for `seconds`; not at all if `is_over()`. Return whether there was a change."""
        waiter = _thread.allocate_lock()
        waiter.acquire()
        self._waiting.append(waiter)
        try:
            return is_over() or waiter.acquire(True, seconds)
        finally:
            with contextlib.suppress(ValueError, IndexError):  # notified: then it is gone already
                self._waiting.remove(waiter)

    def notify_all(self) -> None:
        """Wake all who wait."""
        with contextlib.suppress(IndexError):
            while True:
                self._waiting.popleft().release()


_main: Section | None = None
"""The main thread's, once it has one: this module may be imported by another thread."""


class _ThreadSection(threading.local):
    def __init__(self) -> None:
        global _main
        self.section = Section()
        if self.section.is_main:
            _main = self.section

    def __getattr__(self, name: str) -> Section:
        """Make the section also where the garbage collector calls a finalizer of ours while `__init__` makes it."""
        if name != "section":
            raise AttributeError(name)
        section = self.section = Section()
        return section


here = _ThreadSection()
"""`here.section` is the section of this thread."""


def uninterrupted() -> Section:
    """Return this thread's section, to be entered; nests, and costs a few microseconds where it begins."""
    return here.section


def is_inside() -> bool:
    """Return whether this thread is inside a section."""
    return here.section.is_inside


def call_outside(work: Callable[[], object]) -> None:
    """Call `work` now, or at the end of this thread's section: what a finalizer calls that needs a lock, or waits."""
    here.section.call_outside(work)


def acquire(lock: threading.RLock, seconds: float) -> bool:
    """Wait for a lock that others hold for long, for so many seconds at most; signals are handed over meanwhile."""
    section = here.section
    deadline = time.monotonic() + seconds
    while not lock.acquire(timeout=max(0.0, min(JOIN_SECONDS, deadline - time.monotonic()))):
        if time.monotonic() > deadline:
            return False
        if section.has_signal:
            section.let_through()
    return True


def is_of_system_call(error: OSError) -> bool:
    """Return whether a system call in the very function that has caught `error` raised it, and not a handler that ran there.

    A handler's error has come through the handler's own frame. For what is too short for a section, which takes microseconds.
    """
    return error.__traceback__ is not None and error.__traceback__.tb_next is None


def is_of_handler(error: BaseException) -> bool:
    """Return whether a signal handler raised `error` where the section that has caught it let signals through."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is Section._hand_over.__code__:
            return True
        trace = trace.tb_next
    return False


def join(thread: threading.Thread) -> None:
    """Wait for the end of a thread of ours; signals are handed over meanwhile. Not at all where that might be for ever."""
    section = here.section
    if not section.is_service and thread is not threading.current_thread() and not section.is_late:
        while thread.is_alive():
            thread.join(JOIN_SECONDS if section.is_inside else None)
            if section.has_signal:
                section.let_through()


def wait_until(is_met: Callable[[], bool], changes: Changes) -> None:
    """Wait for what a thread of ours does; signals are handed over meanwhile. Not at all where that might be for ever."""
    section = here.section
    if not section.is_service and not section.is_late:
        while not is_met():
            changes.wait(JOIN_SECONDS, is_met)
            if section.has_signal:
                section.let_through()


def be_service() -> None:
    """Note that this is a thread of ours: it never waits for another one."""
    here.section.is_service = True


def after_fork_in_child() -> None:
    """The parent's main thread may have put off signals that are not ours."""
    global _main
    section = here.section
    section.after_fork_in_child()
    if _main is not None and section is not _main:
        section.adopt(_main)
    _main = section
