"""Writers that run in a process of their own, and die there."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from sqlstream.write import MdsWriter, TarWriter, WriteOptions
from sqlstream.write.base.writer import SampleWriter
from tests.index.kills import kill_at

NUM_SAMPLES = 7


def samples(kind: str) -> Iterator[dict[str, Any]]:
    """Yield what is written."""
    for n in range(NUM_SAMPLES):
        yield {"x": bytes([n]) * 100, "n": n} if kind == "mds" else {"__key__": f"{n:03}", "bin": bytes([n]) * 100}


def open_writer(kind: str, out: Any, options: WriteOptions) -> SampleWriter[Any]:
    """Return a writer whose shards have two samples."""
    if kind == "mds":
        return MdsWriter(out, {"x": "bytes", "n": "int"}, size_limit=480, options=options)
    return TarWriter(out, max_samples=2, extras=("energon",) if kind == "energon" else (), options=options)


def write(kind: str, out: Any, options: WriteOptions, before: Callable[[int], object] = int) -> int:
    """Write what is missing, and return how many samples that was."""
    with open_writer(kind, out, options) as writer:
        first = writer.num_samples
        for number, sample in enumerate(islice(samples(kind), first, None), first):
            before(number)
            writer.write(sample)
    return NUM_SAMPLES - first


def die_at_each_side_effect(kind: str, folder: Path) -> None:
    """Write into `folder/1`, `folder/2`, … in a process each, which dies before side effect 1, 2, … until one is through.

    Runs in a process without threads, which forks: so none of them imports anything.
    """
    number, status = 0, 1
    while status:
        number += 1
        out = folder / str(number)
        pid = os.fork()
        if pid == 0:
            kill_at(number, out)
            write(kind, out, WriteOptions(num_uploads=1))
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        assert status in (0, signal.SIGKILL)


def die_at(event: str, ending: str, kind: str, out: Path, options: WriteOptions) -> None:
    """Write, and die before the first event of that name whose last path ends so."""

    def hook(name: str, args: tuple[Any, ...]) -> None:
        paths = [os.fspath(arg) for arg in args if isinstance(arg, str | os.PathLike)]
        if name == event and paths and str(paths[-1]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    write(kind, out, options)
