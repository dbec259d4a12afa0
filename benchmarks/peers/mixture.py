"""What is mixed: the photos as three streams, at 0.7, 0.2 and 0.1.

The first stream is that which ends first, so a library that stops there (LitData, HF) and one that is told how many samples
an epoch has (sqlstream, MosaicML) give epochs of one size.
"""

from __future__ import annotations

from collections.abc import Sized

WEIGHTS = {"a": 0.7, "b": 0.2, "c": 0.1}
FIFTHS = {"a": 3, "b": 1, "c": 1}
"""Of the photos: with these the first stream ends first, whatever is drawn."""
NUMBER_AT = slice(6, 12)
"""Of a photo's bytes: its comment begins with its name (`data.with_comment`)."""


def parts(num_samples: int) -> dict[str, range]:
    """Return the numbers of the photos of each stream."""
    found: dict[str, range] = {}
    start = 0
    for name, fifths in FIFTHS.items():
        found[name] = range(start, start + num_samples * fifths // 5)
        start = found[name].stop
    return found


def epoch_size(num_samples: int) -> int:
    """Return the samples of an epoch: a whole number of tens, so that the shares are whole, and the first stream suffices."""
    return int(len(parts(num_samples)["a"]) / WEIGHTS["a"]) // 10 * 10


def number_of(photo: Sized) -> int:
    """Return the number of a photo."""
    assert isinstance(photo, bytes), f"a payload of {type(photo)}: all contenders of mixtures give bytes"
    return int(photo[NUMBER_AT])


def drift(numbers: list[int], num_samples: int) -> float:
    """Return the most samples that a stream was ahead or behind its share, after any of the samples."""
    worst = 0.0
    for name, part in parts(num_samples).items():
        given = 0
        for position, number in enumerate(numbers, start=1):
            given += number in part
            worst = max(worst, abs(given - position * WEIGHTS[name]))
    return worst
