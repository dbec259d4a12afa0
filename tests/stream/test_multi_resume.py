"""States of a MultiStreamDataLoader: every step goes on on every layout, rounds on their own, and streams come and go."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqlstream import ScheduleType, StreamingDataset, StreamOptions
from sqlstream.errors import ConfigError, StateError
from tests.stream.multi_jobs import SIZES, Job, opened, samples_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
LAYOUTS = [(2, 0), (1, 2)]
MANY = {"a": 400, "b": 300, "c": 500}
"""Rows of streams whose ends do not matter."""


def kept(state: dict[str, Any]) -> dict[str, Any]:
    """A state that was saved as JSON."""
    loaded: dict[str, Any] = json.loads(json.dumps(state))
    return loaded


def of_one(*names: str, ratio: float = 1, batch: int = 12) -> list[StreamOptions]:
    """Streams whose rounds fit 1, 2 and 4 ranks."""
    return [StreamOptions(name, ratio, index, {}, False, batch, 1) for index, name in enumerate(names)]


@pytest.mark.parametrize("schedule", list(ScheduleType))
@pytest.mark.parametrize("is_mixed", [False, True])
def test_every_step_goes_on_on_every_layout(schedule: ScheduleType, is_mixed: bool, tmp_path: Path) -> None:
    own = of_one("a", "b", "c")
    own = [
        replace(one, ratio=ratio, mixing_group_id=0 if is_mixed else one.mixing_group_id)
        for one, ratio in zip(own, (5, 3, 2), strict=True)
    ]
    options = {"schedule": schedule, "lanes": 4 if is_mixed else None}
    with Job(tmp_path, own, 1, 0, options, MANY) as whole:
        expected = samples_of(whole.steps(8))
    with Job(tmp_path, own, 2, 0, options, MANY) as job:
        states = [kept(job.state())]
        for _ in range(6):
            assert [*job.steps(1)]
            states.append(kept(job.state()))
    assert [state["step"] for state in states] == list(range(7))
    with Job(tmp_path, own, 1, 0, options, MANY) as one, Job(tmp_path, own, 4, 0, options, MANY) as four:
        for step, state in enumerate(states):
            job = four if step % 3 == 1 else one
            job.load(state)
            assert samples_of(job.steps(2)) == expected[step : step + 2], step


@pytest.mark.parametrize("is_mixed", [False, True])
def test_workers_go_on_from_a_state_of_any_number_of_them(is_mixed: bool, tmp_path: Path) -> None:
    own = [replace(one, mixing_group_id=0 if is_mixed else one.mixing_group_id) for one in of_one("a", "b", "c")]
    options = {"lanes": 4 if is_mixed else None}
    with Job(tmp_path, own, 1, 0, options) as whole:
        expected = samples_of(whole.steps(9))
    state: dict[str, Any] | None = None
    for stage, (num_ranks, num_workers) in enumerate([(1, 2), (2, 1), (1, 0)]):
        with Job(tmp_path, own, num_ranks, num_workers, options) as job:
            if state is not None:
                job.load(state)
            assert samples_of(job.steps(3)) == expected[3 * stage : 3 * stage + 3]
            state = kept(job.state())


def test_a_state_within_a_step_goes_on_with_the_round_on_the_same_layout_and_any_workers(tmp_path: Path) -> None:
    own = of_one("a", "b")
    with Job(tmp_path, own, 2) as job:
        rounds = [[batch["rows"] for batch in job.round()] for _ in range(30)]
    with Job(tmp_path, own, 2) as job:
        states = []
        for _ in range(14):
            states.append(kept(job.state()))
            job.round()
    assert [(state["step"], state["round"]) for state in states[5:8]] == [(0, 5), (1, 0), (1, 1)]
    for num_workers in (0, 2):
        with Job(tmp_path, own, 2, num_workers) as job:
            for number in (1, 5, 6, 9):
                job.load(states[number])
                assert [[batch["rows"] for batch in job.round()] for _ in range(8)] == rounds[number : number + 8]


def test_a_state_within_a_step_is_refused_on_another_layout_or_begins_the_step_anew(tmp_path: Path) -> None:
    own = of_one("a", "b")
    with Job(tmp_path, own, 1) as job:
        expected = samples_of(job.steps(4))
    with Job(tmp_path, own, 2) as job:
        assert [*job.steps(1)]
        job.round()
        state = kept(job.state())
    with Job(tmp_path, own, 1) as job:
        with pytest.raises(StateError, match=r"within step 1, after 1 of its rounds on 2 ranks .* this run has 1 ranks"):
            job.load(state)
        assert job.state()["step"] == 0, "what is refused changes nothing"
        job.load(state, strict=False)
        assert samples_of(job.steps(3)) == expected[1:]


def test_with_batch_gpu_alone_the_global_batch_comes_with_the_state_and_rounds_give_way(tmp_path: Path) -> None:
    """Defect 7 of sds: another number of ranks was another mixture."""
    own = [StreamOptions("a", 1, 0, {}, False, None, 4), StreamOptions("b", 1, 1, {}, False, None, 3, 2)]
    with Job(tmp_path, own, 2) as job:
        expected = samples_of(job.steps(12))
        assert [stream.opts.batch_size for stream in job.loaders[0].streams] == [8, 12]
    with Job(tmp_path, own, 2) as job:
        assert [*job.steps(3)]
        state = kept(job.state())
    for num_ranks, rounds in [(1, {2, 4}), (4, {1})]:
        with Job(tmp_path, own, num_ranks) as job:
            job.load(state)
            steps = list(job.steps(9))
        assert samples_of(iter(steps)) == expected[3:]
        assert {step.num_rounds for step in steps} == rounds


def test_streams_come_and_go_by_name_and_keep_their_counts(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b", batch=2)) as job:
        first = Counter(name for step in job.steps(20) for name, _, _ in step.samples)
        state = kept(job.state())
    with Job(tmp_path, of_one("a", "c", batch=2)) as job:
        with pytest.raises(StateError, match=r"streams \['a', 'b'\], this loader \['a', 'c'\]: .* streams='continue'"):
            job.load(state)
        job.load(state, streams="continue")
        steps = list(job.steps(20))
        assert [step.number for step in steps] == list(range(20, 40))
        second, middle = Counter(name for step in steps for name, _, _ in step.samples), kept(job.state())
        assert middle["away"] == ["b"]
        with pytest.raises(ConfigError, match="went on with other streams at step 20"):
            job.loaders[0].counts(3)
        assert job.loaders[0].counts(40) == {"a": first["a"] + second["a"], "c": second["c"]}
    with Job(tmp_path, of_one("b", "c", batch=2)) as job:
        job.load(middle, streams="continue")
        third = list(job.steps(20))
        final = job.state()
    drawn = {name: part["drawn"] for name, part in final["streams"].items()}
    assert drawn == {"a": first["a"] + second["a"], "b": 20 + 20, "c": second["c"] + 20}
    for name, before in (("b", first["b"]), ("c", second["c"])):
        came = sorted((epoch, row) for step in third for of, epoch, row in step.samples if of == name)
        assert came == in_order(tmp_path, name, before, before + 20)


def in_order(folder: Path, name: str, start: int, stop: int) -> list[tuple[int, int]]:
    """Draws [start, stop) of a stream alone, sorted."""
    with opened(folder, SIZES[name]) as dataset:
        draws = [(epoch, int(sample["__row__"])) for epoch in range(1 + stop // SIZES[name]) for sample in dataset]
    return sorted(draws[start:stop])


def test_a_run_that_went_on_with_other_streams_goes_on_from_its_later_states(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b", batch=4)) as job:
        assert [*job.steps(5)]
        state = kept(job.state())
    with Job(tmp_path, of_one("a", "c", batch=4)) as job:
        job.load(state, streams="continue")
        expected = samples_of(job.steps(12))
    with Job(tmp_path, of_one("a", "c", batch=4)) as job:
        job.load(state, streams="continue")
        assert [*job.steps(4)]
        later = kept(job.state())
    for num_ranks, num_workers in LAYOUTS:
        with Job(tmp_path, of_one("a", "c", batch=4), num_ranks, num_workers) as job:
            job.load(later)
            assert samples_of(job.steps(8)) == expected[4:]


def test_a_run_whose_streams_did_not_change_goes_on_as_it_was_whatever_is_said_of_streams(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b", batch=4)) as job:
        assert [*job.steps(5)]
        state, expected = kept(job.state()), samples_of(job.steps(3))
    for num_ranks, num_workers in LAYOUTS:
        with Job(tmp_path, of_one("a", "b", batch=4), num_ranks, num_workers) as job:
            job.load(state, streams="continue")
            assert samples_of(job.steps(3)) == expected
            assert job.loaders[0].counts(5) == {name: part["drawn"] for name, part in state["streams"].items()}


def test_a_run_that_went_on_goes_on_as_it_was_with_weights_by_step(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", batch=4)) as job:
        assert [*job.steps(5)]
        before = job.state()
    weights = {"weights": [(0, {"a": 1, "b": 2}), (4, {"a": 1, "b": 1}), (8, {"a": 2, "b": 1})]}
    with Job(tmp_path, of_one("a", "b", batch=4), loader_options=weights) as job:
        job.load(before, streams="continue")
        steps = [(samples_of(job.steps(1)), job.state()) for _ in range(7)]
    for (_, state), (expected, _) in itertools.pairwise(steps):
        with Job(tmp_path, of_one("a", "b", batch=4), loader_options=weights) as job:
            job.load(state, streams="continue")
            assert samples_of(job.steps(1)) == expected


def test_a_stream_that_comes_or_goes_may_make_or_end_a_group(tmp_path: Path) -> None:
    alone, together = of_one("a", "b"), [replace(one, mixing_group_id=0) for one in of_one("a", "c")]
    state: dict[str, Any] | None = None
    came: list[tuple[int, int]] = []
    for own, options in ((alone, {}), (together, {"lanes": 4}), (alone[:1], {}), (together, {"lanes": 2})):
        with Job(tmp_path, own, loader_options=options) as job:
            if state is not None:
                job.load(state, streams="continue")
            came += [(epoch, row) for step in job.steps(4) for of, epoch, row in step.samples if of == "a"]
            state = kept(job.state())
            assert state["lanes"] == options.get("lanes")
    assert sorted(came) == in_order(tmp_path, "a", 0, len(came)), "none is lost or comes twice"


def test_a_step_before_streams_came_is_refused(tmp_path: Path) -> None:
    """One batch came again and again, without end."""
    with Job(tmp_path, of_one("a", "b", batch=2)) as job:
        states = [kept(job.state()) for _ in job.steps(7)]
    with Job(tmp_path, of_one("a", "c", batch=2)) as job:
        job.load(states[6], streams="continue")
        assert next(job.steps(1)).number == 7
        with pytest.raises(StateError, match=r"went on with other streams at step 7: .* it cannot go to step 3"):
            job.load(states[2], strict=False)
        assert next(job.steps(1)).number == 8


def test_a_stream_may_begin_anew(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b", batch=2)) as job:
        assert [*job.steps(10)]
        state = kept(job.state())
    with Job(tmp_path, of_one("a", "b", batch=2)) as job:
        job.load(state, streams={"b": "restart"})
        came = sorted((epoch, row) for step in job.steps(6) for of, epoch, row in step.samples if of == "b")
        assert came == in_order(tmp_path, "b", 0, len(came))
        with pytest.raises(ConfigError, match="names \\['x'\\]"):
            job.load(state, streams={"x": "restart"})


def test_persistent_workers_go_on_from_a_state(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b", batch=4)) as job:
        expected = samples_of(job.steps(10))
    with Job(tmp_path, of_one("a", "b", batch=4), 1, 2) as job:
        assert samples_of(job.steps(3)) == expected[:3]
        state, loader = job.state(), job.loaders[0]._loader
        assert samples_of(job.steps(4)) == expected[3:7]
        job.load(state)
        assert samples_of(job.steps(7)) == expected[3:]
        assert job.loaders[0]._loader is loader, "its workers were kept"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "random"}, "the state has schedule='fixed_random_order', this loader 'random'"),
        ({"shuffle_seed": 1}, "the state has seed=42, this loader 1"),
        ({"epoch_size": 5}, "the state has epoch_size=None, this loader 5"),
    ],
)
def test_a_state_of_another_order_is_refused_with_both_values(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b")) as job:
        state = kept(job.state())
    with Job(tmp_path, of_one("a", "b"), loader_options=change) as job, pytest.raises(StateError, match=message):
        job.load(state)


def test_a_state_of_other_batches_groups_or_rows_is_refused(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a", "b")) as job:
        state = kept(job.state())
    with Job(tmp_path, of_one("a", "b", batch=6)) as job:
        with pytest.raises(StateError, match="batch_size=12 of stream 'a', this loader 6"):
            job.load(state)
        job.load(state, strict=False)
        assert next(job.steps(1)).number == 0
    mixed = [replace(one, mixing_group_id=0) for one in of_one("a", "b")]
    with Job(tmp_path, mixed) as job, pytest.raises(StateError, match="groups=None"):
        job.load(state)
    other = {"a": SIZES["b"], "b": SIZES["a"]}
    with Job(tmp_path, of_one("a", "b"), sizes=other) as job, pytest.raises(StateError, match="of stream 'a'"):
        job.load(state)


def test_states_of_loaders_and_datasets_are_told_apart(tmp_path: Path) -> None:
    with Job(tmp_path, of_one("a")) as job, opened(tmp_path, 22) as dataset:
        with pytest.raises(StateError, match="the state is of one dataset"):
            job.load(dataset.state_dict())
        with pytest.raises(StateError, match="the state is None"):
            job.load(None)  # type: ignore[arg-type]  # the mistake of the test
        with pytest.raises(StateError, match="the state is of sds"):
            job.load({"stream_states": []})
        with pytest.raises(StateError, match="the state is of a MultiStreamDataLoader"):
            StreamingDataset.load_state_dict(dataset, job.state())
        damaged = job.state() | {"step": -1}
        with pytest.raises(StateError, match="step=-1"):
            job.load(damaged)
        with pytest.raises(StateError, match="upgrade sqlstream"):
            job.load(job.state() | {"multi_stream": 2})


def test_streams_in_another_order_are_refused_and_go_on_where_they_were(tmp_path: Path) -> None:
    """Which stream a step has depends on their order: batches came twice, and others never."""
    own = [replace(one, ratio=ratio) for one, ratio in zip(of_one("a", "b"), (1, 7), strict=True)]
    with Job(tmp_path, own, sizes=MANY) as job:
        given = samples_of(job.steps(3))
        state = kept(job.state())
        job.round()
        within = kept(job.state())
    with Job(tmp_path, own[::-1], sizes=MANY) as other:
        with pytest.raises(StateError, match="within step 3, after 1 of its rounds"):
            other.load(within, streams="continue")
        with pytest.raises(StateError, match="in another order than b, a, which would not have given"):
            other.load(state)
        other.load(state, strict=False)
        assert {one.number for one in other.steps(2)} == {3, 4}
        other.load(state, streams="continue")
        given += samples_of(other.steps(9))
    for name in "ab":
        rows = [one for _, samples in given for one in samples if one[0] == name]
        assert len(rows) == len(set(rows)) > 0
        assert {epoch for _, epoch, _ in rows} == {0}
