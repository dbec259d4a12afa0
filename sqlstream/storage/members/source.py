"""What archives are read from."""

from __future__ import annotations

from typing import Protocol


class ByteRange(Protocol):
    """The bytes of one archive, of one version."""

    @property
    def size_bytes(self) -> int:
        """Size of the archive."""
        ...

    def read_at(self, offset: int, num_bytes: int, /) -> bytes:
        """Return the bytes from `offset` on; fewer than `num_bytes` at the end of the archive only."""
        ...
