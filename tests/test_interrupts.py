"""Sections: no handler runs inside one, whatever a handler that raises has done to the one before."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from sqlstream.process import interrupts, locks
from tests.cache.test_signals import HandlerError, Injector, handler


def fail(number: int, frame: FrameType | None) -> None:
    raise HandlerError


@contextlib.contextmanager
def noted(came: list[int]) -> Iterator[None]:
    """Note when a handler of SIGUSR2 is called."""
    before = signal.signal(signal.SIGUSR2, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR2, before)


Sections = Callable[[], contextlib.AbstractContextManager[object]]
SECTIONS = pytest.mark.parametrize("section", [interrupts.uninterrupted, locks.StateLock])


def interrupted_sections(section: Sections, inside: str | None, came: list[int]) -> Iterator[int]:
    """Interrupt sections in which SIGUSR2 comes, each at the next place; yield after each of them whether it was entered."""
    for nth in itertools.count(1):
        came.clear()
        num_entered = 0
        entered = section()
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        with entered:  # has seen that SIGUSR1 is not to be put off
            pass
        signal.signal(signal.SIGUSR1, fail)
        with contextlib.suppress(HandlerError), Injector(nth, inside) as injector, entered:
            num_entered += 1
            signal.raise_signal(signal.SIGUSR2)
        yield num_entered
        if injector.num_places < nth:
            assert nth > 3
            return


@SECTIONS
def test_a_handler_that_raises_at_any_place_of_a_section_leaves_the_next_one_whole(section: Sections) -> None:
    came: list[int] = []
    with handler(lambda: None), noted(came):
        for num_entered in interrupted_sections(section, None, came):
            assert came == [signal.SIGUSR2] * num_entered
            with pytest.raises(HandlerError), section():  # noqa: PT012 - the end of the section raises
                signal.raise_signal(signal.SIGUSR1)
                came.append(0)
            assert came[-1] == 0
            assert signal.getsignal(signal.SIGUSR1) is fail


@SECTIONS
@pytest.mark.parametrize("inside", ["put_off", "end"])
def test_a_handler_that_raises_as_a_section_begins_or_ends_leaves_no_signal_put_off(section: Sections, inside: str) -> None:
    came: list[int] = []
    with handler(lambda: None), noted(came):
        for num_entered in interrupted_sections(section, inside, came):
            assert came == [signal.SIGUSR2] * num_entered
            assert signal.getsignal(signal.SIGUSR1) is fail
