"""Finds JPEGs whose pixels need a decoder alone, by their headers.

Pillow's own reading of the header makes objects of tables, profiles and comments, which costs a tenth of a photo's decode.
"""

from __future__ import annotations

import sys

from sqlstream.transforms.resize import Size

MAX_PIXELS = 64 << 20
"""Larger images are left to Pillow, which warns of them, or refuses them, from its own limit on (89 million pixels)."""
_START = b"\xff\xd8"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))
"""Baseline, extended and progressive: what libjpeg-turbo decodes with 8 bits."""
_SKIPPED = frozenset((0xC4, 0xDB, 0xDD, 0xE0, 0xED, 0xFE))
"""Tables, restart interval, JFIF, Photoshop's resources, comments."""
_PROFILE = 0xE2
_SCAN = 0xDA


def plain_size(data: bytes) -> Size | None:
    """Return (height, width) of a grey or three-channel JPEG that stands upright, and is the only picture in its file.

    None: it is something else, or may be (it has EXIF, which may turn it, or a segment that is not known here): ask Pillow.
    """
    if not data.startswith(_START):
        return None
    size: Size | None = None
    at, end = 2, len(data) - 9
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if marker == _SCAN:
            return size
        if marker in _FRAMES:
            height, width = data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
            if size is not None or data[at + 4] != 8 or data[at + 9] not in (1, 3) or not 0 < height * width <= _most_pixels():
                return None
            size = height, width
        elif marker not in _SKIPPED and not (marker == _PROFILE and data.startswith(b"ICC_PROFILE\0", at + 4)):
            return None
        at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def _most_pixels() -> int:
    """Return the most pixels that need no look by Pillow; a program that has not imported it has not set its limit either."""
    limit = getattr(sys.modules.get("PIL.Image"), "MAX_IMAGE_PIXELS", None)
    return MAX_PIXELS if limit is None else min(MAX_PIXELS, limit)
