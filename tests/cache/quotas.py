"""A full disk as the quota of a user: its statistics say that there is room, and its errno is another one."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from sqlstream.cache.files import read_hold
from sqlstream.testing.system_calls import sqlite_system_calls

_CALLS = ("open", "mkdir", "link", "rename", "write", "pwrite", "ftruncate", "posix_fallocate")


@contextlib.contextmanager
def as_quota() -> Iterator[None]:
    """Make the full file system a quota to this process, while the body runs; its helper still sees ENOSPC."""
    statvfs = os.statvfs

    def renamed(call: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, **options: Any) -> Any:
            try:
                return call(*arguments, **options)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), *arguments[:1]) from None

        return made

    def roomy(path: Any) -> os.statvfs_result:
        found = statvfs(path)
        fields = [*found, found.f_fsid]
        fields[3] = fields[4] = fields[2]  # blocks: free, and free for users
        fields[6] = fields[7] = fields[5]  # inodes
        return os.statvfs_result(fields)

    with contextlib.ExitStack() as patches:
        # It only reads, and tells what a signal handler raises by its frames, of which `made` is one.
        patches.enter_context(patch.object(read_hold, "os", SimpleNamespace(**vars(os))))
        for name in _CALLS:
            patches.enter_context(patch.object(os, name, renamed(getattr(os, name))))
        patches.enter_context(patch.object(os, "statvfs", roomy))
        patches.enter_context(sqlite_system_calls(len, {errno.ENOSPC: errno.EDQUOT}))
        yield
