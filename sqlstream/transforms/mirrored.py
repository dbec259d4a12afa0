"""Whether a video is shown mirrored: by its header, since a frame of PyAV whose side data is asked for refers to itself.

Such a frame is freed by the collector, together with the threads of what converted it; in a forked child, where these are
not, that waits for ever.
"""

from __future__ import annotations

import re
import struct
from typing import BinaryIO

from sqlstream.transforms.content import Source, opened

_TRACK_HEADER = re.compile(rb"tkhd(?:\x00.{39}|\x01.{51})(.{20})", re.DOTALL)
"""Of MP4, with the matrix up to its fifth number."""
_MOST_HEADER = 1 << 26  # bytes; a damaged file may claim any number


def is_mirrored(source: Source) -> bool:
    """Return whether a track of an MP4 is shown mirrored, by the matrix in its header.

    Raises:
        OSError: The file cannot be read.
    """
    with opened(source) as file:
        return file.read(8)[4:] == b"ftyp" and _has_mirror(file)


def _has_mirror(file: BinaryIO) -> bool:
    """Return whether a track of an MP4 is shown mirrored, by the matrix in its header; torchcodec and decord only rotate."""
    at = 0
    while file.seek(at) == at and len(head := file.read(16)) == 16:
        length = int.from_bytes(head[:4])
        length = int.from_bytes(head[8:]) if length == 1 else length
        if head[4:8] == b"moov":
            matrices = (track[1] for track in _TRACK_HEADER.finditer(file.read(min(length, _MOST_HEADER))))
            return any(a * d < b * c for a, b, _, c, d in map(struct.Struct(">5i").unpack, matrices))
        if not 8 <= length < 1 << 48:
            return False
        at += length
    return False
