"""Names, parameters and defaults are those of the real packages (`tests/compat/peer_signatures.py` wrote them)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import sqlstream.compat.webdataset as wds
from sqlstream.compat import wids
from tests.compat.peer_signatures import parameters

PEERS = json.loads((Path(__file__).parent / "signatures.json").read_text())
OTHERWISE = {
    "DecodingError": "it is sqlstream's DecodeError, whose text has url, key and field",
    "LMDBCached": "refused",
    "xdecode": "there is no default decoder for pickles; a tuple in place of a list",
    "info": "stream=None is standard error",
}
"""Names with other parameters, and why."""
OTHER_METHODS = {
    "create_url_iterator": "an inner step of their constructor",
    "update_cache_info": "an inner step of their constructor",
    "invoke": "of a stage: theirs does nothing",
}
"""Methods that are not here, and why."""


def same(here: dict[str, str], there: dict[str, str]) -> bool:
    """Whether a program that gives what one takes can give it to the other: names, kinds and defaults are equal."""
    return list(here.items())[: len(there)] == list(there.items()) and all(
        " = " in more for more in list(here.values())[len(there) :]
    )


@pytest.mark.parametrize("name", [name for name in PEERS["webdataset"]["names"] if name not in wds.REFUSED])
def test_a_name_of_webdataset_takes_what_it_takes(name: str) -> None:
    check(wds, name, PEERS["webdataset"]["names"][name])


@pytest.mark.parametrize("name", PEERS["wids"]["names"])
def test_a_name_of_wids_takes_what_it_takes(name: str) -> None:
    check(wids, name, PEERS["wids"]["names"][name])


def check(module: Any, name: str, theirs: dict[str, Any]) -> None:
    ours = getattr(module, name)
    if name not in OTHERWISE:
        assert same(parameters(ours), theirs["parameters"]), f"{parameters(ours)} is not {theirs['parameters']}"
    for method, given in theirs.get("methods", {}).items():
        if method not in OTHER_METHODS:
            assert same(parameters(getattr(ours, method)), given), (
                f"{name}.{method}{parameters(getattr(ours, method))}: {given}"
            )


def test_names_that_are_not_here_are_theirs_and_say_what_to_do() -> None:
    for name in wds.REFUSED:
        with pytest.raises(AttributeError, match=f"'{name}': "):
            getattr(wds, name)
