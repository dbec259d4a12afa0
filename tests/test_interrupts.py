"""Sections: no handler runs inside one, whatever a handler that raises has done to the one before."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import pytest

from sqlstream.process import interrupts, locks
from tests.handlers import HandlerError, Injector, handler


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


@pytest.mark.parametrize("uses_section", [False, True], ids=["returns", "uses a section"])
@pytest.mark.parametrize("third_raises", [False, True], ids=["returns", "raises"])
def test_a_third_signal_while_two_are_handed_over_loses_none_and_leaves_the_section_whole(
    uses_section: bool, third_raises: bool
) -> None:
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if uses_section:
            with interrupts.uninterrupted():
                pass

    def note_third(number: int, frame: FrameType | None) -> None:
        came.append(number)
        if third_raises:
            raise HandlerError

    before = {number: signal.signal(number, note) for number in (signal.SIGHUP, signal.SIGUSR2)}
    before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, note_third)
    section = interrupts.uninterrupted()
    try:
        for nth in itertools.count(1):
            came.clear()
            with contextlib.suppress(HandlerError), section:
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGUSR2)
                with contextlib.suppress(HandlerError), Injector(nth) as injector:
                    section.let_through()
                num_came = len(came)
                signal.raise_signal(signal.SIGHUP)
                assert len(came) == num_came, nth
            num_third = int(injector.num_places >= nth)
            assert sorted(came) == [signal.SIGHUP, signal.SIGHUP, *[signal.SIGUSR1] * num_third, signal.SIGUSR2], nth
            assert signal.getsignal(signal.SIGUSR1) is note_third
            if not num_third:
                assert nth > 10
                return
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def test_a_finalizer_may_run_while_the_section_of_its_thread_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bool] = []

    class Section(interrupts.Section):
        def __init__(self) -> None:
            if not made:  # as the garbage collector does, which may begin with any object that is made
                made.append(True)
                with interrupts.uninterrupted():
                    made.append(interrupts.is_inside())
            super().__init__()

    monkeypatch.setattr(interrupts, "Section", Section)
    thread = threading.Thread(target=lambda: made.append(interrupts.is_inside()))
    thread.start()
    thread.join()
    assert made == [True, True, False]


class Abandoned:
    """Garbage that only the collector finds, and whose finalizer needs a lock, as a forgotten cache's does."""

    def __init__(self, ended: list[bool]) -> None:
        self.itself, self.ended = self, ended

    def __del__(self) -> None:
        with interrupts.uninterrupted():
            self.ended.append(interrupts.is_inside())


@pytest.fixture
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    gc.collect()
    yield
    gc.set_threshold(*thresholds)
    gc.enable()


@pytest.mark.usefixtures("collector")
@pytest.mark.parametrize("num_allocations", range(12))
def test_a_finalizer_may_run_at_any_object_that_the_end_of_a_section_makes(num_allocations: int) -> None:
    came: list[int] = []
    ended: list[bool] = []
    numbers = [signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM]
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        handlers = [signal.getsignal(number) for number in numbers]
        gc.disable()
        with interrupts.uninterrupted() as section:
            Abandoned(ended)
            gc.set_threshold(gc.get_count()[0] + num_allocations)
            gc.enable()
        gc.disable()
        assert section.originals == {}
        assert [signal.getsignal(number) for number in numbers] == handlers
        signal.raise_signal(signal.SIGUSR1)
    finally:
        for number, original in zip(numbers, before, strict=True):
            signal.signal(number, original)
    assert came == [signal.SIGUSR1]
    gc.collect()
    assert ended == [True]
