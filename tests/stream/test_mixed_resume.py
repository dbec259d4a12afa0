"""What a resumed mixture takes from its state, on ranks other than those of the first start."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sqlstream.errors import ConfigError, StateError
from tests.stream.mixtures import MixedJob, streams_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def test_an_epoch_that_rounds_up_to_turns_of_ranks_is_that_of_the_first_ranks(tmp_path: Path) -> None:
    given: dict[str, Any] = {"unit": "rank", "epoch_size": None}
    with MixedJob(tmp_path, 2, 0, 20, **given) as job:
        size, batches = job.mixed.epoch_size, [sorted(batch) for batch in job.epoch()]
        state = job.loaders[0].state_dict() | {"epoch": 0, "sample_in_epoch": 40}
    with MixedJob(tmp_path, 4, 0, 20, **given) as other:
        assert other.mixed.epoch_size != size, "rounded up to turns of another size"
        other.load(state)
        assert other.mixed.epoch_size == size
        assert [sorted(batch) for batch in other.epoch()] == batches[2:]


def test_a_refused_state_leaves_the_turns_of_a_mixture_as_they_were(tmp_path: Path) -> None:
    given: dict[str, Any] = {"unit": "rank", "epoch_size": None}
    with MixedJob(tmp_path, 2, 0, 12, **given) as job:
        state = job.loaders[0].state_dict()
    with MixedJob(tmp_path, 3, 0, 12, **given) as other:
        size, batches = other.mixed.epoch_size, other.epoch()
        for loader in other.loaders:
            with pytest.raises(StateError, match="shuffle_seed"):
                loader.load_state_dict(state | {"shuffle_seed": 4})
            with pytest.raises(ConfigError, match="began with 5 ranks"):
                loader.load_state_dict(state | {"mixture": state["mixture"] | {"lanes": 5}})
            with pytest.raises(StateError, match="lanes='2' in the state's mixture is not a count"):
                loader.load_state_dict(state | {"mixture": state["mixture"] | {"lanes": "2"}})
            loader.set_epoch(0)
        assert other.mixed.epoch_size == size
        assert other.epoch() == batches


def test_an_epoch_beyond_what_64_bits_count_is_refused_by_its_number(tmp_path: Path) -> None:
    with MixedJob(tmp_path, 1, 0, 16, epoch_size=1 << 40) as job:
        loader = job.loaders[0]
        loader.set_epoch((1 << 23) - 2)
        assert len(next(iter(loader))) == 16
        loader.set_epoch(1 << 30)
        with pytest.raises(ConfigError, match=r"epoch=1073741824 .* epoch_size=1099511627776 .* an epoch below 8388607"):
            next(iter(loader))
        with pytest.raises(ConfigError, match="epoch=9223372036854775808 is out of range"):
            loader.set_epoch(1 << 63)
        with pytest.raises(StateError, match="epoch=9223372036854775808 in the state is not a count"):
            loader.load_state_dict(loader.state_dict() | {"epoch": 1 << 63})


# -- streams that come and go ----

BEFORE = {"web": 30, "code": 18}  # 4 steps an epoch
AFTER = {"web": 30, "av": 77}  # 9 steps an epoch
WEIGHTS = [(0, {"web": 1, "av": 2}), (8, {"web": 1, "av": 1}), (20, {"web": 1, "av": 0})]


def begun(folder: Path, num_steps: int) -> dict[str, Any]:
    """Return the state after some steps of a run with other streams."""
    options: dict[str, Any] = {"weights": {"web": 1, "code": 1}, "epoch_size": None}
    with MixedJob(folder, 1, 0, 12, lambda: streams_of(folder, BEFORE), **options) as job:
        list(job.loaders[0])
        *_, (_, state) = job.states(num_steps - 4)
    return state


def after(folder: Path, num_ranks: int = 1, num_workers: int = 0, **options: Any) -> MixedJob:
    given: dict[str, Any] = {"weights": WEIGHTS, "epoch_size": None} | options
    return MixedJob(folder, num_ranks, num_workers, 12, lambda: streams_of(folder, AFTER), **given)


def taken(job: MixedJob, num_steps: int) -> list[dict[str, int]]:
    """Return the samples of each stream in the next steps, over the ends of epochs."""
    steps: list[dict[str, int]] = []
    while len(steps) < num_steps:
        steps += [dict(Counter(name for name, *_ in batch)) for batch in job.epoch()]
    return steps[:num_steps]


@pytest.mark.parametrize("options", [{}, {"stop": "never"}, {"epoch_size": 36}])
def test_steps_are_counted_on_where_other_streams_make_epochs_of_another_length(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with after(tmp_path, 2, **options) as job:
        job.load(begun(tmp_path, 6), streams="continue")
        planned = list(job.mixed.plan(6, 24))
        assert [step.step for step in planned] == [*range(6, 24)]
        assert job.mixed.counts(6) == {"web": 36, "av": 0}
        with pytest.raises(ConfigError, match="went on with other streams at step 6: what was before is not known"):
            job.mixed.counts(5)
        av = [job.mixed.counts(step)["av"] for step in (6, 8, 20, 24)]
        assert 15 <= av[1] <= 17, "two of three up to step 8"
        assert 60 <= av[2] - av[1] <= 72, "then a half, with a short step at the end of an epoch"
        assert av[3] == av[2], "none from step 20 on"
        ((batch, state),) = job.states(1)
        assert Counter(name for name, *_ in batch) == Counter(planned[0].num_samples)
    with after(tmp_path, 1, **options) as again:
        again.load(state)  # the same streams: without `streams=`
        assert list(again.mixed.plan(6, 24)) == planned, "states say at which step the streams came"
        if "stop" not in options:
            assert taken(again, 17) == [dict(step.num_samples) for step in planned[1:]]
    with after(tmp_path, 1, **options) as once_more:
        once_more.load(state, streams="continue")
        assert once_more.mixed.counts(20)["av"] == once_more.mixed.counts(24)["av"], "the same step of the whole run"


def test_streams_come_only_where_all_canonical_nodes_have_come_equally_far(tmp_path: Path) -> None:
    def make(sizes: dict[str, int]) -> Any:
        return lambda: streams_of(tmp_path, sizes, num_canonical_nodes=2)

    options: dict[str, Any] = {"weights": [1, 1], "epoch_size": 60}
    with MixedJob(tmp_path, 1, 0, 5, make(BEFORE), **options) as job:
        states = [state for _, state in job.states(4)]
    with MixedJob(tmp_path, 1, 0, 5, make(AFTER), **options) as other:
        with pytest.raises(StateError, match="after 15 samples of an epoch, which are not the same number of each of num_can"):
            other.load(states[2], streams="continue")
        other.load(states[3], streams="continue")
        assert Counter(name for batch in other.epoch() for name, *_ in batch) == {"web": 20, "av": 20}
    with MixedJob(tmp_path, 1, 0, 5, make(BEFORE), **options) as again:
        again.load(states[2], streams="continue")  # the same streams: the run goes on as it was
        assert len(again.epoch()) == 9


def test_weights_by_step_may_be_lists_as_configuration_files_have_them(tmp_path: Path) -> None:
    with after(tmp_path) as job, after(tmp_path, weights=json.loads(json.dumps(WEIGHTS))) as other:
        assert list(other.mixed.plan(0, 24)) == list(job.mixed.plan(0, 24))


def test_a_state_of_an_earlier_version_goes_on_where_streams_have_come(tmp_path: Path) -> None:
    with after(tmp_path) as job:
        job.load(begun(tmp_path, 6), streams="continue")
        (_, state), *rest = job.states(3)
    assert state["version"] == 6
    first, *others = state["mixture"]["changes"]
    without = {key: value for key, value in first.items() if key != "step"}
    earlier = state | {"version": 4, "mixture": state["mixture"] | {"changes": [without, *others]}}
    with after(tmp_path) as again:
        again.load(earlier)
        assert [batch for batch, _ in again.states(2)] == [batch for batch, _ in rest]


def test_places_before_streams_have_come_are_refused(tmp_path: Path) -> None:
    with after(tmp_path) as job:
        job.load(begun(tmp_path, 6), streams="continue")
        (loader,) = job.loaders
        loader.set_epoch(1)  # begins before the place of the state
        with pytest.raises(StateError, match="with other streams at sample 24 of epoch 1: what was before is not known"):
            next(iter(loader))
        loader.set_epoch(2)
        assert Counter(name for name, *_ in next(iter(loader))) == Counter(next(job.mixed.plan(13, 14)).num_samples)


@pytest.mark.parametrize("weights", [{"web": 1, "av": 2}, [(0, {"web": 1, "av": 2}), (8, {"web": 1, "av": 1})]])
def test_a_run_whose_streams_did_not_change_goes_on_as_it_was_whatever_is_said_of_streams(tmp_path: Path, weights: Any) -> None:
    with after(tmp_path, weights=weights) as job:
        steps = [(batch, state) for batch, state in job.states(7)]
    for num_ranks, place in ((1, 0), (2, 2), (1, 4)):
        with after(tmp_path, num_ranks, weights=weights) as again:
            again.load(steps[place][1], streams="continue")
            assert [sorted(batch) for batch, _ in again.states(2)] == [
                sorted(batch) for batch, _ in steps[place + 1 : place + 3]
            ]


def test_a_run_that_once_went_on_with_other_streams_goes_on_as_it_was(tmp_path: Path) -> None:
    weights = {"web": 1, "av": 2}
    with after(tmp_path, weights=weights) as job:
        job.load(begun(tmp_path, 6), streams="continue")
        (_, state), (expected, _) = job.states(2)
    with after(tmp_path, weights=weights) as again:
        again.load(state, streams="continue")
        assert again.states(1)[0][0] == expected
    with after(tmp_path, weights={"web": 2, "av": 1}) as other:
        other.load(state, streams="continue")
        assert Counter(name for name, *_ in other.states(1)[0][0]) == {"web": 8, "av": 4}


@pytest.mark.parametrize("num_before", [6, 8])
def test_a_run_that_went_on_goes_on_as_it_was_with_weights_by_step(num_before: int, tmp_path: Path) -> None:
    weights = [(0, {"web": 1, "av": 2}), (8, {"web": 2, "av": 3})]
    with after(tmp_path, weights=weights) as job:
        job.load(begun(tmp_path, num_before), streams="continue")
        steps = job.states(6)
    for (_, state), (expected, _) in itertools.pairwise(steps):
        with after(tmp_path, weights=weights) as again:
            again.load(state, streams="continue")
            assert again.states(1)[0][0] == expected


def test_a_job_that_is_stopped_at_each_sample_draws_all_of_its_streams(tmp_path: Path) -> None:
    options: dict[str, Any] = {"weights": {"web": 1, "av": 2}, "epoch_size": None}
    names: list[str] = []
    state: dict[str, Any] | None = None
    for _ in range(9):
        with MixedJob(tmp_path, 1, 0, 1, lambda: streams_of(tmp_path, AFTER), **options) as job:
            if state is not None:
                job.load(state, streams="continue")
            (batch, state), *_ = job.states(1)
            names += [name for name, *_ in batch]
    assert Counter(names) == {"web": 3, "av": 6}


def test_streams_in_another_order_are_refused_and_go_on_where_they_were(tmp_path: Path) -> None:
    """Whose turn it is depends on their order: samples came twice, and others never."""
    sizes, weights = {"web": 30, "code": 18}, {"web": 1, "code": 7}
    turned = {"code": 18, "web": 30}

    def job_of(sizes: dict[str, int], seeds: dict[str, int]) -> MixedJob:
        streams = {name: streams_of(tmp_path, {name: size}, seed=seeds[name])[name] for name, size in sizes.items()}
        options: dict[str, Any] = {"weights": weights, "epoch_size": 480, "schedule": "consecutive"}
        return MixedJob(tmp_path, 1, 0, 4, lambda: streams, **options)

    seeds = {"web": 1, "code": 2}
    with job_of(sizes, seeds) as job:
        *_, (_, state) = states = job.states(5)
        given = [one for batch, _ in states for one in batch]
    with job_of(turned, seeds) as other:
        before = other.loaders[0].state_dict()
        with pytest.raises(StateError, match="in another order than code, web, which would not have given"):
            other.load(state)
        assert other.loaders[0].state_dict() == before
        other.load(state, "continue")
        given += [one for batch, _ in other.states(5) for one in batch]
    with job_of(sizes, seeds) as job:
        job.load({**state, "mixture": json.loads(json.dumps(state["mixture"], sort_keys=True))})
    for name, size in sizes.items():
        own = [one[1:3] for one in given if one[0] == name]
        assert len(own) == len(set(own))
        assert max(epoch for epoch, _ in own) == (len(own) - 1) // size
