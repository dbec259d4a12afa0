"""What holds for all tests."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# No test fails by the time that it takes: the machine may be busy with other things.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Shells start what runs in the background without Ctrl-C; tests press it, and children inherit that it is ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def usual_priority() -> Iterator[None]:
    """No test leaves this process at a real-time priority (some encoders take one): all that it starts would starve others."""
    before = os.sched_getscheduler(0)
    yield
    assert os.sched_getscheduler(0) == before
