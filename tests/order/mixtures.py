"""Mixtures for tests: golden values, strategies of weights, and schedules counted turn by turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from sqlstream.order import Mixture, ScheduleType, StreamSchedule

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "mixing"
DESIGN: dict[str, Any] = json.loads((FIXTURES / "design.json").read_text())
SDS: dict[str, Any] = json.loads((FIXTURES / "sds.json").read_text())

BLOCKED = (
    ScheduleType.CONSECUTIVE,
    ScheduleType.CONSECUTIVE_INTERLEAVED,
    ScheduleType.RANDOM_ORDER,
    ScheduleType.FIXED_RANDOM_ORDER,
)
WEIGHTS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 400)), min_size=1, max_size=30).filter(any).map(tuple)
SCHEDULES = st.sampled_from(ScheduleType)


def mixture(
    *weights: int, schedule: ScheduleType = ScheduleType.PROPORTIONAL, seed: int = 42, block: int | None = None
) -> Mixture:
    """Return a mixture without changes."""
    return Mixture(num_streams=len(weights), changes=((0, weights),), schedule=schedule, seed=seed, block=block)


def digits(schedule: StreamSchedule, stop: int = 40) -> str:
    """Return the streams of the first turns, a digit each."""
    return "".join(map(str, schedule.at(np.arange(stop)).stream.tolist()))


@st.composite
def mixtures(draw: st.DrawFn) -> Mixture:
    """Return mixtures of some streams with some changes."""
    num_streams = draw(st.integers(1, 6))
    weights = st.tuples(*[st.integers(0, 20)] * num_streams).filter(any)
    starts = draw(st.lists(st.integers(1, 300), max_size=4, unique=True))
    return Mixture(
        num_streams=num_streams,
        changes=tuple((start, draw(weights)) for start in [0, *sorted(starts)]),
        schedule=draw(SCHEDULES),
        seed=draw(st.integers(0, 2**63)),
        block=draw(st.one_of(st.none(), st.integers(1, 90))),
    )
