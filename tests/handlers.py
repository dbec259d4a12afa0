"""Signals at every place where Python looks for them.

Python runs handlers in the main thread, between two of its instructions: after a call, at the begin of a function, at the
end of a loop's round. `Injector` counts these places in our package, and has a signal come at the n-th.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import sqlstream
from sqlstream.errors import TransformError

PACKAGE = str(Path(sqlstream.__file__).parent)
LOOKS = ("RESUME", "CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
"""Instructions after which CPython 3.11 looks for signals; later ones look at fewer places."""


class HandlerError(Exception):
    """What a handler raises that has to do with no work of ours: a timeout, a preemption."""


class Looks(NamedTuple):
    """Where Python looks for signals in a function."""

    after: frozenset[int]
    """Offsets of the instructions before which it has looked."""
    jumps: frozenset[tuple[int, int]]
    """Offsets of jumps back, and of what they go on with: it has not looked where that is come to in another way."""


def _looks_in(code: CodeType, known: dict[CodeType, Looks] = {}) -> Looks:  # noqa: B006 - a cache
    if code not in known:
        looking = [
            (before, after)
            for before, after in itertools.pairwise(dis.get_instructions(code))
            if before.opname.startswith(LOOKS) and not before.opname.endswith("NO_INTERRUPT")
        ]
        known[code] = Looks(
            frozenset(after.offset for before, after in looking if "JUMP" not in before.opname),
            frozenset((before.offset, before.argval) for before, _ in looking if "JUMP" in before.opname),
        )
    return known[code]


class Injector:
    """Has SIGUSR1 come at the `nth` place of our package in this thread; counts the places.

    Args:
        nth: From 1; 0: never.
        inside: The name of the functions whose places count; None: of all.
    """

    def __init__(self, nth: int, inside: str | None = None) -> None:
        self._nth = nth
        self._inside = inside
        self._thread = threading.get_ident()
        self._last = -1
        """Offset of the instruction that came last."""
        self.num_places = 0

    def __enter__(self) -> Injector:
        if sys.version_info >= (3, 12):  # there `settrace` gives no instructions of functions that run already
            monitoring = sys.monitoring
            monitoring.use_tool_id(monitoring.DEBUGGER_ID, "Injector")
            monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, self._monitor)
            monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION)
        else:
            sys.settrace(self._trace)
        return self

    def __exit__(self, *exception: object) -> None:
        if sys.version_info >= (3, 12):
            monitoring = sys.monitoring
            monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.NO_EVENTS)
            monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, None)
            monitoring.free_tool_id(monitoring.DEBUGGER_ID)
        else:
            sys.settrace(None)

    def _counts_in(self, code: CodeType) -> bool:
        """Return whether the places of a function count."""
        is_ours = code.co_filename.startswith(PACKAGE) and "/testing/" not in code.co_filename
        return is_ours and self._inside in (None, code.co_name)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not self._counts_in(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._trace_instruction

    def _trace_instruction(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode":
            self._come_to(frame.f_code, frame.f_lasti)
        return self._trace_instruction

    def _monitor(self, code: CodeType, offset: int) -> None:
        if threading.get_ident() == self._thread and self._counts_in(code):
            self._come_to(code, offset)

    def _come_to(self, code: CodeType, offset: int) -> None:
        looks, jump, self._last = _looks_in(code), (self._last, offset), offset
        if offset in looks.after or jump in looks.jumps:
            self.num_places += 1
            if self.num_places == self._nth:
                signal.raise_signal(signal.SIGUSR1)


@contextlib.contextmanager
def handler(handle: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda signum, frame: handle())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def fail() -> None:
    raise HandlerError


def raised_everywhere(error: type[Exception], inside: str | None, work: Callable[[], object]) -> Iterator[int]:
    """Have a handler raise at one place after the other, and check that it comes out; yield after each."""
    num_raised = 0

    def fail() -> None:
        nonlocal num_raised
        num_raised += 1
        raise error

    with handler(fail):
        for nth in itertools.count(1):
            num_raised = 0
            raised: BaseException | None = None
            try:
                with Injector(nth, inside) as injector:
                    work()
            except Exception as caught:
                raised = caught.__cause__ if isinstance(caught, TransformError) else caught  # around a call of a transform
            assert (type(raised) is error) == bool(num_raised), (nth, raised)
            raised = None
            yield nth
            if injector.num_places < nth:
                assert nth > 3
                return
