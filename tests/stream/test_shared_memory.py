"""Memory that a trainer shares with its workers, where /dev/shm has no room."""

from __future__ import annotations

import errno
import os
import pickle
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch

from sqlstream.errors import ConfigError
from sqlstream.stream.run.shared.memory import as_shared, is_shared, shared_bytes


def place_of(tensor: torch.Tensor) -> str:  # [...]
    """Return the name of the memory that a tensor lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, *_, name = line.split(maxsplit=5)
        start, stop = (int(number, 16) for number in span.split("-"))
        if start <= tensor.data_ptr() < stop:
            return name
    return ""


def test_shared_memory_takes_nothing_of_dev_shm_and_other_processes_see_what_is_written() -> None:
    shared = shared_bytes(100_000)  # [bytes]
    assert place_of(shared).startswith("/memfd:")
    assert place_of(as_shared(torch.arange(5))).startswith("/memfd:")
    sent: torch.Tensor = pickle.loads(ForkingPickler.dumps(shared))  # [bytes]
    pid = os.fork()
    if pid == 0:
        sent.numpy()[7] = 1
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert shared.nonzero().tolist() == [[7]]
    assert is_shared(shared)


def test_without_any_room_for_shared_memory_the_error_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: str) -> int:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def fail(_: int) -> None:
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(os, "memfd_create", refuse)
    assert place_of(shared_bytes(5000)).startswith("/dev/shm/torch_")
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared", fail)
    with pytest.raises(ConfigError, match=r"5000 bytes.*No space left.*--shm-size"):
        shared_bytes(5000)
