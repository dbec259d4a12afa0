"""The keys of a state: which version writes and reads which, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sqlstream.errors import StateError
from sqlstream.index.types.content import ColumnType, Content
from sqlstream.stream.run.state import STATE_VERSION, RunIdentity, StreamPart, StreamState

SINGLE = StreamState(epoch=2, sample_in_epoch=24, fingerprint="f", shuffle_seed=5, global_batch_size=8, epoch_size=50)
CONTENT = Content(columns=(ColumnType("index", "string"),), num_rows=70, values="v")
KNOWN = replace(SINGLE, content=CONTENT)
CHANGE = {"epoch": 1, "sample": 8, "expression": "score", "fingerprint": "w"}


def part(fingerprint: str, drawn: int = 0) -> StreamPart:
    identity = RunIdentity(fingerprint=fingerprint, shuffle_seed=3, num_canonical_nodes=1, blocks=None, epoch_size=70)
    return StreamPart(identity=identity, drawn=drawn, weights=(CHANGE,))


MIXED = replace(SINGLE, fingerprint=None, streams={"web": part("a", 16), "code": part("b", 8)})


def sent(state: dict[str, Any]) -> dict[str, Any]:
    """The state after a file of JSON."""
    found: dict[str, Any] = json.loads(json.dumps(state))
    return found


def test_the_state_of_a_dataset_whose_rows_are_not_known_is_one_that_earlier_programs_read() -> None:
    state = sent(SINGLE.to_dict())
    assert state["version"] == 1
    assert "streams" not in state
    assert StreamState.from_dict(state) == SINGLE
    del state["version"]
    assert StreamState.from_dict(state) == SINGLE


def test_the_state_of_several_streams_has_version_2_and_comes_back() -> None:
    state = sent(MIXED.to_dict())
    assert state["version"] == 2 < STATE_VERSION
    assert state["streams"]["web"] == {
        "fingerprint": "a",
        "shuffle_seed": 3,
        "num_canonical_nodes": 1,
        "blocks": None,
        "epoch_size": 70,
        "drawn": 16,
        "weights": [CHANGE],
    }
    assert StreamState.from_dict(state) == MIXED
    StreamState.from_dict(state).check(MIXED)


def test_rows_that_are_known_make_it_version_3() -> None:
    state = sent(KNOWN.to_dict())
    assert state["version"] == 3
    assert StreamState.from_dict(state) == KNOWN
    mixed = replace(MIXED, streams={"web": replace(part("a"), identity=replace(part("a").identity, content=CONTENT))})
    state = sent(mixed.to_dict())
    assert state["version"] == 3
    assert StreamState.from_dict(state) == mixed
    with pytest.raises(StateError, match=r"unknown keys \['content'\]"):
        StreamState.from_dict(KNOWN.to_dict() | {"version": 2})


def test_streams_of_other_rows_are_refused_by_name() -> None:
    one, other = (
        replace(MIXED, streams={"web": replace(part("a"), identity=replace(part("a").identity, content=content))})
        for content in (CONTENT, replace(CONTENT, num_rows=60))
    )
    one.check(replace(one, streams={"web": replace(part("a", 9), identity=replace(part("b").identity, content=CONTENT))}))
    with pytest.raises(StateError, match=r"other rows of stream 'web'.* rows \(it was 70, and is 60\)"):
        one.check(other)


def test_a_single_dataset_may_have_version_2() -> None:
    assert StreamState.from_dict(SINGLE.to_dict() | {"version": 2}) == SINGLE


@pytest.mark.parametrize("version", [STATE_VERSION + 1, "2", None])
def test_a_state_of_a_later_version_is_refused(version: object) -> None:
    with pytest.raises(StateError, match=rf"version {version!r}, this sqlstream knows {STATE_VERSION}: upgrade"):
        StreamState.from_dict(SINGLE.to_dict() | {"version": version})


def test_the_ranks_of_the_first_start_make_it_version_5_and_belong_to_it() -> None:
    state = replace(KNOWN, rank_multiple=4).to_dict()
    assert state["version"] == 5
    assert StreamState.from_dict(state).rank_multiple == 4
    assert "rank_multiple" not in KNOWN.to_dict()
    with pytest.raises(StateError, match=r"unknown keys \['rank_multiple'\]"):
        StreamState.from_dict(state | {"version": 4})
    with pytest.raises(StateError, match="rank_multiple=-1 in the state is not a count"):
        StreamState.from_dict(state | {"rank_multiple": -1})


def test_streams_belong_to_version_2() -> None:
    with pytest.raises(StateError, match=r"unknown keys \['streams'\]"):
        StreamState.from_dict(MIXED.to_dict() | {"version": 1})


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        (["web"], "is not a dict of streams by name"),
        ({"web": 3}, "stream 'web' in the state is 3, no dict of blocks, drawn"),
        ({"web": part("a").to_dict() | {"more": 1}}, "stream 'web' in the state"),
        ({"web": part("a").to_dict() | {"drawn": -1}}, "drawn=-1 in stream 'web'"),
        ({"web": part("a").to_dict() | {"epoch_size": True}}, "epoch_size=True in stream 'web'"),
        ({"web": part("a").to_dict() | {"weights": [{"epoch": 1}]}}, "is not a list of dicts"),
    ],
)
def test_what_says_nothing_of_a_stream_is_refused(streams: object, message: str) -> None:
    with pytest.raises(StateError, match=message):
        StreamState.from_dict(MIXED.to_dict() | {"streams": streams})


@pytest.mark.parametrize(
    ("saved", "current", "message"),
    [
        (SINGLE, MIXED, r"of a single dataset, this run has streams \['code', 'web'\]"),
        (replace(SINGLE, fingerprint=None), MIXED, "of a single dataset"),
        (MIXED, SINGLE, r"of streams \['code', 'web'\], this run has a single dataset"),
        (replace(MIXED, streams={"web": part("a")}), MIXED, r"of streams \['web'\]"),
        (replace(MIXED, streams={"web": part("c"), "code": part("b")}), MIXED, "fingerprint='c' of stream 'web', this run 'a'"),
        (replace(MIXED, shuffle_seed=9), MIXED, "shuffle_seed=9"),
    ],
)
def test_the_state_of_other_streams_is_refused_by_name(saved: StreamState, current: StreamState, message: str) -> None:
    with pytest.raises(StateError, match=message):
        saved.check(current)


def test_streams_may_stand_anywhere_in_their_epochs() -> None:
    replace(MIXED, streams={"web": part("a", 99), "code": part("b", 1)}).check(MIXED)


BEYOND = {"rank": 0, "world_size": 1, "num_workers": 1, "first_worker": 0, "taken": [], "unfinished": []}


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        ({"beyond": BEYOND | {"taken": [[0, 0, 1 << 63]]}}, r"beyond\['taken'\]=.* is not a list of \[epoch, number, number\]"),
        ({"beyond": BEYOND | {"rank": 1 << 63}}, r"rank=9223372036854775808 in beyond of the state is not a count"),
        ({"weights": [CHANGE | {"epoch": None}]}, r"epoch=None in weights of the state is not a count"),
        ({"weights": [CHANGE | {"sample": 1 << 63}]}, r"sample=9223372036854775808 in weights of the state is not a count"),
        ({"weights": [CHANGE | {"fingerprint": []}]}, r"fingerprint=\[\] in weights of the state is no text"),
    ],
)
def test_values_of_a_damaged_state_are_refused_by_name(damaged: dict[str, Any], message: str) -> None:
    """They were errors of numpy and of comparisons, some of them as the run went on."""
    with pytest.raises(StateError, match=message):
        StreamState.from_dict(sent(SINGLE.to_dict()) | damaged)
