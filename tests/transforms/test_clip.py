"""Planning of clips: pure functions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.errors import ConfigError, DecodeError
from sqlstream.transforms.clip import ClipOptions, plan_clip, shown_at


def generator() -> np.random.Generator:
    return np.random.default_rng(0)


@given(
    st.integers(1, 64),
    st.floats(0.1, 100),
    st.floats(1, 120),
    st.none() | st.floats(1, 120),
    st.none() | st.floats(0.25, 4),
    st.booleans(),
)
def test_a_clip_is_evenly_spaced_inside_the_video_or_an_error(
    num_frames: int, duration: float, fps: float, target: float | None, speedup: float | None, shorter: bool
) -> None:
    options = ClipOptions(framerate=target, speedup_factor=speedup, allow_shorter_videos=shorter)
    step = (speedup or 1) / (target or fps)
    try:
        clip = plan_clip(options, num_frames, duration, fps, generator)
    except DecodeError:
        assert not shorter
        assert num_frames * step > duration
        return
    assert len(clip.times) == num_frames or (shorter and len(clip.times) < num_frames)
    assert clip.start >= 0
    assert clip.times[-1] <= duration + 1e-9 or len(clip.times) == 1
    assert np.allclose(np.diff(clip.times), step)
    assert clip.duration == pytest.approx(len(clip.times) * step)


def test_starts_are_uniform() -> None:
    rng = np.random.default_rng(0)
    starts = [plan_clip(ClipOptions(), 24, 11.0, 24.0, lambda: rng).start for _ in range(2000)]
    assert min(starts) >= 0
    assert max(starts) <= 10
    assert np.histogram(starts, 5, (0, 10))[0].min() > 340


def test_a_header_that_rounds_the_duration_still_fits_the_whole_video() -> None:
    assert len(plan_clip(ClipOptions(), 60, 2.499, 24.0, generator).times) == 60


def test_the_frame_shown_is_the_last_that_began_up_to_rounding() -> None:
    begins = np.array([0.0, 0.042, 0.083])  # Matroska: rounded to milliseconds
    assert shown_at(begins, np.array([0.0, 1 / 24, 2 / 24, 0.06, 9.0]), 24.0).tolist() == [0, 1, 2, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        {"framerate": 0},
        {"speedup_factor": -1},
        {"frame_seek_timeout_sec": 0},
        {"thread_type": "MANY"},
        {"crop_interval": (2, 1)},
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        ClipOptions(**options)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("times", [[], [float("nan")], [-1.0], ["x"], [None]])
def test_wrong_timestamps_are_decode_errors(times: list[object]) -> None:
    with pytest.raises(DecodeError, match="timestamps"):
        plan_clip(ClipOptions(frame_timestamps=times), 4, 1.0, 24.0, generator)  # type: ignore[arg-type]  # wrong on purpose
