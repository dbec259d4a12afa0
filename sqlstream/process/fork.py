"""What is done when this process forks, in one order; nothing else in the package is registered with `os.register_at_fork`.

    stage        before the fork, from the top     after it, from the bottom: in the parent | in the child
    SECTION      no signal handler runs            handlers run again                       | the same
    IDLE         helpers that owe nothing end
    LEASES       a pipe to the child is opened     leased batches wait for the child, too   | it keeps its end
    MEMORY                                                                                  | objects forget the parent's work
    DATABASES                                                                               | connections to SQLite are leaked
    LOCKS                                                                                   | locks of memory are new
    DESCRIPTORS                                                                             | recorded descriptors are closed
    SIGNALS                                                                                 | those of the parent are dropped
    FORK_LOCKS   no thread uses a connection       given back                               | given back
    CALLS        no thread calls SQLite otherwise  given back                               | given back
    GUARD        no thread opens a descriptor      given back                               | it is new

Each step may use what the steps below it have repaired, and nothing above it: a connection is leaked before anything could ask
the database, and helpers end while no lock is held that their threads may want. A fork that runs no hooks (a C
library's) is noticed by the process id, the next time that a lock is asked for: then the child's column is done.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from enum import IntEnum, auto
from functools import partial
from typing import Protocol

from sqlstream.process import interrupts


class Stage(IntEnum):
    """When something is done at a fork; see the table of this module."""

    SECTION = auto()
    IDLE = auto()
    LEASES = auto()
    MEMORY = auto()
    DATABASES = auto()
    LOCKS = auto()
    DESCRIPTORS = auto()
    SIGNALS = auto()
    FORK_LOCKS = auto()
    CALLS = auto()
    GUARD = auto()


class ForkAware(Protocol):
    """What holds something that a forked child must not use."""

    def after_fork_in_child(self) -> None:
        """Forget everything that belongs to the parent; reopen on the next use."""


class Bracket(Protocol):
    """What is done before a fork and undone after it, in parent and child."""

    def before_fork(self) -> None:
        """Do it; in the thread that forks, and others may fork at the same time."""

    def after_fork(self, *, is_child: bool) -> None:
        """Undo it; called if `before_fork` returned."""


class _Enclosed(threading.local):
    """What the fork of this thread has done and is to undo."""

    def __init__(self) -> None:
        self.brackets: dict[Stage, list[Bracket]] = {stage: [] for stage in Stage}


class _Section:
    """Keeps signal handlers and finalizers out of a fork, and out of its repair."""

    def before_fork(self) -> None:
        interrupts.uninterrupted().__enter__()

    def after_fork(self, *, is_child: bool) -> None:
        del is_child  # the same in both
        interrupts.uninterrupted().__exit__(None, None, None)

    def after_fork_in_child(self) -> None:
        interrupts.after_fork_in_child()


class Forks:
    """Runs the stages of each fork."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        """The process that all of this has been repaired for."""
        self.mutex = threading.RLock()
        """See `guard`, which looks first whether this is a forked child."""
        self._brackets: dict[Stage, dict[int, weakref.ref[Bracket]]] = {stage: {} for stage in Stage}
        """Those that live, by identity: a list of them is made in one step, while other threads add some."""
        self._holders: dict[Stage, weakref.WeakSet[ForkAware]] = {stage: weakref.WeakSet() for stage in Stage}
        self._enclosed = _Enclosed()
        self._section = _Section()
        self.enclose(self._section, Stage.SECTION)
        self.enclose(self, Stage.GUARD)
        self.call_in_child(self._section, Stage.SIGNALS)

    def guard(self) -> threading.RLock:
        """Return the process mutex: held, no other thread forks, or opens or closes a guarded descriptor. The innermost lock.

        Ask for it anew each time (`with fork_guard():`): a forked child gets another one. Code that makes objects in it that
        the garbage collector looks at is in a section, too: else a finalizer may wait for a thread that wants the guard.
        """
        if os.getpid() != self.pid:
            self.repair()
        return self.mutex

    def notice(self) -> None:
        """Do what the hooks do, in a child that was forked without them."""
        if os.getpid() != self.pid:
            self.repair()

    def call_in_child(self, holder: ForkAware, stage: Stage) -> None:
        """Have `holder.after_fork_in_child()` called in every forked child, for as long as it lives."""
        with interrupts.uninterrupted(), self.guard():
            self._holders[stage].add(holder)

    def enclose(self, bracket: Bracket, stage: Stage) -> None:
        """Have every fork enclosed by what `bracket` does, for as long as it lives."""
        enclosing, key = self._brackets[stage], id(bracket)
        enclosing[key] = weakref.ref(bracket, lambda _: enclosing.pop(key, None))

    def before_fork(self) -> None:
        """Take the guard."""
        self.mutex.acquire()

    def after_fork(self, *, is_child: bool) -> None:
        """Give it back; the child has another one."""
        if not is_child:
            self.mutex.release()

    def repair(self) -> None:
        """Do what is due in a child, of a fork with or without hooks."""
        self.pid, self.mutex = os.getpid(), threading.RLock()  # another thread may have waited for the old one
        _do_all(reversed(Stage), self._repair_stage)

    def begin(self) -> None:
        """Do what is due before a fork, in the thread that forks."""
        self.notice()
        _do_all(Stage, self._enter_stage)

    def end(self) -> None:
        """Undo it in the parent."""
        _do_all(reversed(Stage), partial(self._leave_stage, is_child=False))

    def _enter_stage(self, stage: Stage) -> None:
        for reference in list(self._brackets[stage].values()):
            if (bracket := reference()) is not None:
                bracket.before_fork()
                self._enclosed.brackets[stage].append(bracket)

    def _leave_stage(self, stage: Stage, *, is_child: bool) -> None:
        brackets = self._enclosed.brackets[stage]
        while brackets:
            brackets.pop().after_fork(is_child=is_child)

    def _repair_stage(self, stage: Stage) -> None:
        self._leave_stage(stage, is_child=True)
        for holder in list(self._holders[stage]):
            holder.after_fork_in_child()


def _do_all(stages: Iterable[Stage], work: Callable[[Stage], None]) -> None:
    """Do the work of each stage, also behind one that failed; then raise the first error, which Python prints."""
    with contextlib.ExitStack() as steps:
        for stage in reversed([*stages]):
            steps.callback(work, stage)


FORKS = Forks()
"""Of this process."""
os.register_at_fork(before=FORKS.begin, after_in_parent=FORKS.end, after_in_child=FORKS.repair)
fork_guard, notice_fork = FORKS.guard, FORKS.notice
call_in_child, enclose = FORKS.call_in_child, FORKS.enclose


def is_guarded() -> bool:
    """Return whether this thread holds the guard."""
    return fork_guard()._is_owned()  # type: ignore[attr-defined, no-any-return]  # what threading.Condition asks, too
