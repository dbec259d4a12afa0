"""What libsndfile (1.2.2) gets wrong of MP3 and Ogg, so that a range of a file has the samples that the whole file has there.

MP3: without a tag in its first frame the length is a guess, and nothing beyond it is read; after a seek the first frames lack
the bits that lie in frames before them. Ogg: after a seek into the last page, samples are as much too late as its end is
trimmed; and more than two channels come in the order of Vorbis.
"""

from __future__ import annotations

import os
import re
from typing import Protocol

from sqlstream.transforms.content import Source, opened

_LENGTH_TAG = re.compile(rb"(?:Xing|Info)\0\0\0[\x03\x07\x0b\x0f].{4}(.{4})", re.DOTALL)
"""Of encoders: with the number of frames and, in the group, of bytes from this frame on."""
_TAG_PLACE = 4096
"""Bytes behind ID3 tags in which the tag lies. Arbitrary."""
_MORE_AUDIO = re.compile(rb"ID3|\xff[\xe0-\xff]")
"""What a file of another one's frames begins with, where two are one behind the other; tags at the end begin otherwise."""
_RESERVOIR_SAMPLES = 64 * 1152
"""A frame of MP3 begins at most 511 bytes before its place, and the smallest frames hold 11 bytes: 47 of them."""
_PAGE_BYTES = 27 + 255 + 255 * 255
_RUN_UP_SAMPLES = 2 * 8192
"""The largest blocks of Vorbis."""


class SoundFile(Protocol):
    """What of soundfile's class is asked here."""

    format: str
    frames: int
    channels: int


def check_exact(file: SoundFile, source: Source) -> None:
    """Check that libsndfile knows the length of a file, and gives its channels in the order of other formats.

    Raises:
        ValueError: It does not.
    """
    if file.format == "MP3" and not _has_length(source):
        raise ValueError("an MP3 without its length, or with more than that, has to be decoded to its end")
    if file.format == "OGG" and file.channels > 2:
        raise ValueError("more than two channels of an Ogg file come in another order than those of other formats")


def seekable(file: SoundFile, source: Source, start: int) -> int:
    """Return the last sample up to `start` from which on a file reads as it does from its beginning."""
    if file.format == "MP3":
        return max(0, start - _RESERVOIR_SAMPLES)
    if file.format == "OGG":
        return max(0, min(start, file.frames - _samples_of_last_page(source) - _RUN_UP_SAMPLES))
    return start


def _has_length(source: Source) -> bool:
    """Return whether the first frame of an MP3 says how long all are, and no others follow."""
    with opened(source) as file:
        begin = 0
        while (head := file.read(10)).startswith(b"ID3"):
            begin += 10 + sum(byte << 7 * place for place, byte in enumerate(head[:5:-1]))
            file.seek(begin)
        tag = _LENGTH_TAG.search(head + file.read(_TAG_PLACE))
        if tag is None:
            return False
        file.seek(begin + int.from_bytes(tag[1]))
        return _MORE_AUDIO.match(file.read(3)) is None


def _samples_of_last_page(source: Source) -> int:
    """Return how many samples the last page of an Ogg file has; more than any file where that cannot be told."""
    with opened(source) as file:
        serial = file.read(18)[14:]
        file.seek(max(0, file.seek(0, os.SEEK_END) - 2 * _PAGE_BYTES))
        tail = file.read()
    last = tail.rfind(b"OggS")
    before = tail.rfind(b"OggS", 0, max(last, 0))
    ends = [int.from_bytes(tail[at + 6 : at + 14], "little", signed=True) for at in (before, last)]
    is_one = before >= 0 and all(tail[at + 14 : at + 18] == serial for at in (before, last))
    return ends[1] - ends[0] if is_one and 0 <= ends[0] <= ends[1] else 1 << 62
