"""Archives for tests: in memory, on disk, and what the standard library reads in them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"


class Bytes:
    """An archive in memory, which counts its reads."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.size_bytes = len(data)
        self.reads: list[tuple[int, int]] = []

    def read_at(self, offset: int, num_bytes: int, /) -> bytes:
        self.reads.append((offset, num_bytes))
        return self.data[offset : offset + num_bytes]

    @property
    def num_bytes_read(self) -> int:
        return sum(num_bytes for _, num_bytes in self.reads)


@functools.cache
def expected(name: str) -> Any:
    """What the real libraries read, by `fixtures/NAME`."""
    return json.loads((FIXTURES / name).read_text())
