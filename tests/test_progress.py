"""A bar on a terminal, silence elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from sqlstream.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("show", [True, False])
def test_a_bar_is_shown_only_on_a_terminal_and_when_asked(
    is_terminal: bool, show: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Terminal() if is_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress(10, " rows", "indexing", show) as bar:
        bar.update(10)
    assert bool(stream.getvalue()) is (is_terminal and show)
    if is_terminal and show:
        assert "indexing: 100%" in stream.getvalue()


class Log:
    """What programs put in the place of standard error."""

    def write(self, text: str) -> None: ...


def test_a_standard_error_that_is_closed_or_only_a_log_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (closed, Log(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        with progress(10, " rows", "indexing") as bar:
            bar.update(10)
