"""One starter of helpers for all tests of a process: most of them want a helper, and few are about its start.

A helper that is started with the interpreter imports for 0.2 s of CPU before its first request, and a dataset that expects
forks starts another process as costly as that; a fork of a starter that is there already imports nothing. What shows starts
asks for the fixture `starts_anew`.
"""

from __future__ import annotations

import os

from sqlstream.environment import child_environment
from sqlstream.storage.client.starter import STARTER


class _Tests:
    """The user that keeps the starter."""


_TESTS = _Tests()


def keep_starter() -> None:
    """Have a starter in this process, and in those that are forked from it, until `leave_starter`."""
    leave_out_name_of_test()
    if (pid := STARTER.pid) is not None and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
        leave_starter()  # it ends by itself when no helper was wanted for ten minutes
    STARTER.keep(_TESTS, child_environment())


def leave_out_name_of_test() -> None:
    """Take out of the environment what pytest put there: a helper is forked only where the environment is the starter's."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


def leave_starter() -> None:
    """Let it end, unless a dataset keeps it, too."""
    STARTER.leave(_TESTS)
