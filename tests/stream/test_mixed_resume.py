"""What a resumed mixture takes from its state, on ranks other than those of the first start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlstream.errors import ConfigError, StateError
from tests.stream.mixtures import MixedJob

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
            loader.set_epoch(0)
        assert other.mixed.epoch_size == size
        assert other.epoch() == batches
