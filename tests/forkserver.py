"""What the fork server of `tests/processes.py` imports last: the processes that it forks find a starter of helpers."""

from __future__ import annotations

from tests.starters import keep_starter

keep_starter()
