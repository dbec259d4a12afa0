"""Whole weights: integers in proportion to any numbers, worked out once, so that no float decides anything twice.

Numbers are read as they are written (`repr`), shares are fractions. A share that is within half a unit of its last decimal of a
rational with a small denominator becomes that rational: 0.333333 and 0.666667 are 1 : 2, 0.6 and 0.4 are 3 : 2. Integers and
fractions are meant exactly and stay. Where the total would pass 2**30, shares are rounded to that many parts by largest
remainder: an error of 5e-10, and no stream that has a share loses it.

Rejected: dividing by the smallest share and rounding, as sds does (0.6 and 0.4 become 1 : 1), and `int(weight * scale)`, as
grain does (63 of the 999 weights 0.001 … 0.999 lose a hundredth of themselves).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Context, Decimal, Overflow
from fractions import Fraction
from numbers import Rational, Real
from typing import TypeAlias

from sqlstream.config import check_at_least, plain_number
from sqlstream.errors import ConfigError

Number: TypeAlias = int | float | Fraction

MAX_WHOLE_TOTAL = 1 << 30
"""Parts into which shares are rounded at most: products of two weights fit into 64 bits, and independent draws take 31 bits."""
_DIGITS = Context(prec=50, Emax=9999)  # of temperatures: `decimal` computes in software, so all machines agree


def whole_weights(weights: Sequence[Number], precision: int = 6) -> tuple[int, ...]:
    """Return the smallest integers in proportion to `weights`; 0 stays 0, anything above stays above.

    Args:
        weights: One a stream, not negative, at least one above 0.
        precision: Decimals of a share that count: floats within half a unit of the last one are the same.

    Raises:
        ConfigError: A weight is negative or no number, or all are 0.

    Example:
        >>> whole_weights([0.7, 0.2, 0.1]), whole_weights([0.333333, 0.666667])
        ((7, 2, 1), (1, 2))
    """
    precision = check_at_least("precision", precision, 1)
    weights = [plain_number(weight) for weight in weights]
    exact = _integers("weights", weights)
    is_meant = all(isinstance(weight, Rational) for weight in weights)
    return _fitted(exact if is_meant else _simplified(exact, precision))


def temperature_weights(sizes: Sequence[int], temperature: float) -> tuple[int, ...]:
    """Return weights in proportion to size ** (1 / temperature): 1 is by size, large ones make all alike.

    Raises:
        ConfigError: `temperature` is not above 0, or too low for these sizes; a size is negative, or all are 0.

    Example:
        >>> temperature_weights([100, 400], 2)
        (1, 2)
    """
    temperature = plain_number(temperature)
    if not (_is_number(temperature) and temperature > 0):
        raise ConfigError(f"temperature={temperature!r} is out of range: give a number above 0 (1: by size)")
    _integers("sizes", sizes)
    divisor = Decimal(repr(float(temperature)))
    try:
        powers = [Fraction(_power(size, divisor)) if size else 0 for size in sizes]
    except Overflow:
        raise ConfigError(
            f"temperature={temperature!r} is too low for a stream of {max(sizes)}, beside which the others never come: give a "
            "higher one, or weights="
        ) from None
    return _fitted(_simplified(_integers("sizes", powers), precision=6))


def token_weights(weights: Sequence[Number], num_rows: Sequence[int], num_tokens: Sequence[int]) -> tuple[int, ...]:
    """Return weights of rows that give each stream its share of *tokens*: weight x rows / tokens.

    Args:
        weights: Shares of tokens, as `whole_weights` takes them.
        num_rows: Rows of each stream.
        num_tokens: Tokens of all rows of each stream.

    Raises:
        ConfigError: A stream with a weight has no rows or no tokens, or the lists differ in length.

    Example:
        >>> token_weights([1, 1], num_rows=[100, 100], num_tokens=[1000, 3000])  # rows of 10 and of 30 tokens
        (3, 1)
    """
    if not len(weights) == len(num_rows) == len(num_tokens):
        raise ConfigError(
            f"{len(weights)} weights, {len(num_rows)} numbers of rows and {len(num_tokens)} of tokens: "
            f"give one of each a stream"
        )
    by_rows = []
    for stream, (weight, rows, tokens) in enumerate(zip(whole_weights(weights), num_rows, num_tokens, strict=True)):
        if weight and (rows <= 0 or tokens <= 0):
            raise ConfigError(
                f"stream {stream} has {rows} rows with {tokens} tokens, so it cannot give a share of tokens: give it weight 0"
            )
        by_rows.append(Fraction(weight * rows, tokens) if weight else Fraction(0))
    return whole_weights(by_rows)


def exact(name: str, value: Number) -> Fraction:
    """Return a number as it is written, numpy's included.

    Raises:
        ConfigError: It is negative, not finite, or no number.
    """
    value = plain_number(value)
    if not _is_number(value) or value < 0 or not (isinstance(value, Rational) or math.isfinite(value)):
        raise ConfigError(f"{name}={value!r} is out of range: give a finite number, 0 or more")
    if isinstance(value, Rational):  # numpy's integers have parts of their own kind, which overflow
        return Fraction(int(value.numerator), int(value.denominator))
    return Fraction(repr(float(value)))


def absolute_choose(repeat: Number, size: int) -> int:
    """Return how many rows of `size` are drawn an epoch when the stream is repeated `repeat` times.

    Example:
        >>> absolute_choose(0.29, 100)  # int(0.29 * 100) is 28
        29
    """
    return round(exact("repeat", repeat) * size)


def relative_choose(proportions: Sequence[Number], total: int) -> tuple[int, ...]:
    """Return how many of `total` draws each stream gives: largest remainder, ties to the earlier stream; 0 stays 0.

    Example:
        >>> relative_choose([1, 0, 1], 101)
        (51, 0, 50)
    """
    check_at_least("total", total, 0)
    return _largest_remainder(_integers("proportions", proportions), total)


def _power(size: int, divisor: Decimal) -> Decimal:
    """Return size ** (1 / divisor)."""
    return _DIGITS.exp(_DIGITS.divide(_DIGITS.ln(Decimal(size)), divisor))


def _is_number(value: object) -> bool:
    """Return whether a value is a number, numpy's included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def _integers(name: str, values: Sequence[Number]) -> tuple[int, ...]:
    """Return integers in the exact proportion of numbers that are not negative, however large they are."""
    given = [exact(f"{name}[{stream}]", value) for stream, value in enumerate(values)]
    if not any(given):
        raise ConfigError(f"{name}={list(values)!r} are all 0: give at least one stream more than 0")
    scale = math.lcm(*(value.denominator for value in given))
    return tuple(value.numerator * (scale // value.denominator) for value in given)


def _simplified(weights: tuple[int, ...], precision: int) -> tuple[int, ...]:
    """Return integers in the proportion of shares with small denominators, if that keeps them small; else the weights."""
    total, parts, scale, factor = sum(weights), [], 1, 0
    for weight in weights:
        part = _simplest(Fraction(weight, total), precision)
        parts.append(part)
        scale, factor = math.lcm(scale, part.denominator), math.gcd(factor, part.numerator)
        if scale > 2 * MAX_WHOLE_TOTAL * max(
            1, factor
        ):  # the sum is scale / factor, a little more or less: no need for the rest
            return weights
    whole = tuple(part.numerator * (scale // part.denominator) for part in parts)
    return whole if sum(whole) // math.gcd(*whole) <= MAX_WHOLE_TOTAL else weights


def _simplest(share: Fraction, precision: int) -> Fraction:
    """Return a share with a small denominator, if there is one within the precision."""
    best = share.limit_denominator(10 ** (precision // 2))
    is_near = abs(best - share) <= Fraction(1, 2 * 10**precision) and (best > 0) == (share > 0)
    return best if is_near else share


def _fitted(weights: tuple[int, ...]) -> tuple[int, ...]:
    """Return the smallest integers in proportion to `weights`, or near it where those would be too large."""
    if sum(weights) // math.gcd(*weights) > MAX_WHOLE_TOTAL:
        rounded = _largest_remainder(weights, MAX_WHOLE_TOTAL)
        weights = tuple(max(1, number) if weight else 0 for number, weight in zip(rounded, weights, strict=True))
    divisor = math.gcd(*weights)
    return tuple(weight // divisor for weight in weights)


def _largest_remainder(weights: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Return whole numbers in proportion to `weights` that add up to `total`."""
    whole = sum(weights)
    divided = [divmod(weight * total, whole) for weight in weights]
    numbers = [number for number, _ in divided]
    by_remainder = sorted(range(len(weights)), key=lambda stream: (-divided[stream][1], stream))
    for stream in by_remainder[: total - sum(numbers)]:
        numbers[stream] += 1
    return tuple(numbers)
