"""Programs that were written for an earlier version run: names and parameters may be added, none goes or changes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.pins import api
from tests.pins.pinned import pinned

HEDGING = "hedging is gone: its benchmark showed no gain, and two readers of one object are two ways to wrong bytes"
LIMIT = "left out it is 'as it is': who opens a shared cache without a limit must not evict it (DESIGN 4.3 rule 13)"
KEY = "left out it is `index` where that can name samples, else the row number; given it must be there (issue 16, DESIGN 5)"
BLOCKS = "row groups of content are blocks unless None asks for a whole shuffle (DESIGN 6); tables keep their order"
BATCHES = "left out it is 1, or what the dataset's batches= says, which a given 1 contradicts (issue 20)"
PACKING = (
    "never documented: the loader's workers kept their transport there, which packs what `collate_fn` returns now (issue 17)"
)
CHANGED = {
    "sqlstream:StreamingDataset(index_col_name)": KEY,
    "sqlstream.config:IndexOptions(key_column)": KEY,
    "sqlstream:StreamingDataset(cache_limit)": LIMIT,
    "sqlstream:Cache(limit)": LIMIT,
    "sqlstream.cache:Cache(limit)": LIMIT,
    "sqlstream.config:StorageOptions(hedge_factor)": HEDGING,
    "sqlstream:StreamingDataset(shuffle_block_size)": BLOCKS,
    "sqlstream:StreamingDataLoader(batch_size)": BATCHES,
    "sqlstream:StreamingDataset.packing": PACKING,
}
"""Parameters and members that are gone, or have another default, with the reason."""

EXPORT = "--config FILE says what they say (issue 16): given together they are taken as before, without both it is an error"
CHANGED_OPTIONS = {("index build", "--key-column"): KEY, ("index export", "dst"): EXPORT, ("index export", "out"): EXPORT}
"""The same of options of the command line."""


@functools.cache
def found() -> dict[str, Any]:
    """All names, as they are now: in any case those that are pinned."""
    return {place: api.resolve(place) for place in pinned("api")["names"]}


@pytest.mark.parametrize("place", pinned("api")["names"])
def test_a_public_name_takes_what_it_took(place: str) -> None:
    before, now = pinned("api")["names"][place], found()[place]
    assert now is not None, f"{place} is gone"
    assert now["kind"] == before["kind"]
    assert set(before.get("bases", ())) <= set(now.get("bases", ())), f"except clauses that caught {place} miss it"
    check_parameters(place, before.get("parameters"), now.get("parameters"))
    for name, value in before.get("members", {}).items():
        if f"{place}.{name}" in CHANGED:
            continue
        assert name in now["members"], f"{place}.{name} is gone"
        if isinstance(value, dict):
            check_parameters(f"{place}.{name}", value, now["members"][name])
        elif before["kind"] == "enum":
            assert now["members"][name] == value


def check_parameters(place: str, before: dict[str, str] | None, now: dict[str, str] | None) -> None:
    """Compare the parameters of one callable."""
    if before is None:
        return
    assert now is not None, f"{place} is no function any more"
    for name, parameter in before.items():
        if f"{place}({name})" not in CHANGED:
            assert now.get(name) == parameter, f"{place}({name})"
    placed = [name for name, parameter in before.items() if "POSITIONAL" in parameter]
    still = [name for name, parameter in now.items() if "POSITIONAL" in parameter]
    assert still[: len(placed)] == placed, f"{place}: the places of its arguments have changed"
    for name in now.keys() - before.keys():
        is_free = " = " in now[name] or now[name].startswith("VAR_")
        assert is_free, f"{place} wants {name}, which no earlier program gives"


def test_what_has_changed_on_purpose_is_in_the_pinned_names() -> None:
    names = pinned("api")["names"]
    for changed in CHANGED:
        place, _, parameter = changed.rstrip(")").partition("(")
        if parameter:
            assert parameter in names[place]["parameters"]
        else:
            place, _, member = changed.rpartition(".")
            assert member in names[place]["members"]


def test_every_command_takes_the_options_that_it_took() -> None:
    from sqlstream.cli.main import build_parser

    now = dict(api.commands_of(build_parser()))
    for command, before in pinned("api")["commands"].items():
        assert command in now, f"sqlstream {command} is gone"
        for name, argument in before.items():
            assert name in now[command], f"sqlstream {command} {name} is gone"
            if (command, name) not in CHANGED_OPTIONS:
                assert now[command][name] == argument, f"sqlstream {command} {name}"
        for name in now[command].keys() - before.keys():
            assert not now[command][name]["required"], f"sqlstream {command} wants {name}, which no earlier script gives"


def test_json_of_the_commands_has_the_keys_that_it_had(tmp_path: Path) -> None:
    before, now = pinned("api")["json"], api.documents(tmp_path)
    for words, keys in before.items():
        assert set(keys) <= set(now[words]), f"sqlstream {words} --json"


def test_the_signatures_are_those_that_python_shows() -> None:
    """Or else nothing would be compared."""
    names = pinned("api")["names"]
    assert names["sqlstream:StreamingDataset"]["parameters"]["shuffle_seed"] == "POSITIONAL_OR_KEYWORD = None"
    assert sum(value.get("parameters") is not None for value in names.values()) > 80
