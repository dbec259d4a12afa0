"""The drop-in takes what MosaicML Streaming takes, with the same defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.compat.streaming.make_signatures import VERSION, signatures

THEIRS = Path(__file__).with_name("signatures.json")
MORE = {"writers": ()}
"""Parameters that the drop-in has beside theirs."""


def comparable(parameters: list[list[Any]]) -> tuple[list[list[Any]], dict[str, Any]]:
    """Parameters by position, in order, and those by name, whose order does not matter; numbers by value."""

    def value(default: str | None) -> object:
        try:
            return float(default or "")
        except ValueError:
            return default

    by_name = {name: value(default) for name, kind, default in parameters if kind == "KEYWORD_ONLY"}
    return [one for one in parameters if one[1] != "KEYWORD_ONLY"], by_name


def test_signatures_and_defaults_are_those_of_the_real_package() -> None:
    theirs = json.loads(THEIRS.read_text())
    ours = signatures("sqlstream.compat.streaming")
    assert VERSION in (THEIRS.parent / "make_signatures.py").read_text()
    different = {name: (ours.get(name), theirs[name]) for name in theirs if comparable(ours[name]) != comparable(theirs[name])}
    assert different == {}
    assert ours.keys() == theirs.keys()
