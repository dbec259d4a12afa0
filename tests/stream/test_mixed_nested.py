"""A mixture that is a stream of another one: its weight, and what it says of a run of its own, which is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sqlstream import MixedDataset, World
from sqlstream.errors import ConfigError
from tests.stream.mixtures import streams_of

INNER = {"code": 17, "av": 5}
OUTER = {"web": 1, "small": 1}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    "options",
    [
        {"unit": "batch", "batch_size": 2},
        {"schedule": "consecutive"},
        {"stop": "never"},
        {"epoch_size": 8},
        {"batch_size": 2},
        {"drop_last": True},
        {"world": World(rank=0, world_size=2)},
        {"replication": 2},
        {"infinite_iteration": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_concerns_the_whole_run_is_refused(options: dict[str, Any], tmp_path: Path, stack: ExitStack) -> None:
    inner = stack.enter_context(MixedDataset(streams_of(tmp_path, INNER), [1, 1], **options))
    with pytest.raises(ConfigError, match=f"and has {', '.join(options)}, which concern the whole run: give them to the outer"):
        MixedDataset({"web": streams_of(tmp_path)["web"], "small": inner}, OUTER)


def test_weights_that_have_changed_are_refused(tmp_path: Path, stack: ExitStack) -> None:
    inner = stack.enter_context(MixedDataset(streams_of(tmp_path, INNER), [3, 1]))
    with MixedDataset({"web": streams_of(tmp_path)["web"], "small": inner}, OUTER) as outer:
        assert outer.weights == {"web": 4, "small/code": 3, "small/av": 1}
    inner.reweight({"code": 1, "av": 1})
    with pytest.raises(ConfigError, match="has weights that change by step, so it cannot be a stream"):
        MixedDataset({"web": streams_of(tmp_path)["web"], "small": inner}, OUTER)


@pytest.mark.parametrize("kind", [int, np.int64, np.float32])
def test_its_streams_share_its_weight_whatever_kind_of_number_that_is(kind: Any, tmp_path: Path, stack: ExitStack) -> None:
    inner = stack.enter_context(MixedDataset(streams_of(tmp_path, INNER), {"code": kind(3), "av": kind(1)}))
    with MixedDataset({"web": streams_of(tmp_path)["web"], "small": inner}, {"web": kind(1), "small": kind(2)}) as outer:
        assert outer.weights == {"web": 2, "small/code": 3, "small/av": 1}
        outer.reweight({"web": kind(1), "small": kind(1)})
        *_, change = outer.state_dict()["mixture"]["changes"]  # type: ignore[index]  # a mixture has changes
        assert change["weights"] == {"web": 4, "small/code": 3, "small/av": 1}
