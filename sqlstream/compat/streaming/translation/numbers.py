"""Sizes and numbers as MosaicML's users write them: `'64kb'`, `'100k'`."""

from __future__ import annotations

from sqlstream.errors import ConfigError

_BYTES = {f"{letter}b": 1024**power for power, letter in enumerate("kmgtpezy", start=1)}
_NUMBERS = {"k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def bytes_to_int(bytes_str: int | str) -> int:
    """Return the bytes of `'64kb'`, `'100b'` or a number; units are powers of 1024.

    Raises:
        ConfigError: It is no size.
    """
    return _to_int(bytes_str, _BYTES | {"b": 1}, "a size in bytes: give a number, or a text such as '100b', '64kb' or '2gb'")


def number_abbrev_to_int(abbrev_str: int | str) -> int:
    """Return the number of `'100k'`, `'64M'` or a number; units are powers of 1000.

    Raises:
        ConfigError: It is no number.
    """
    return _to_int(abbrev_str, _NUMBERS, "a number: give one, or a text such as '100k', '64M' or '1b'")


def _to_int(value: int | str, units: dict[str, int], what: str) -> int:
    try:
        if not isinstance(value, str):
            return int(value)
        text = value.strip().lower()
        unit = next((name for name in units if text.endswith(name)), "")
        return int(float(text.removesuffix(unit)) * units[unit]) if unit else int(text)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(f"{value!r} is not {what}") from None
