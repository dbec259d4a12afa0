from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sqlstream.storage.base.concurrency import (
    LEAST_THREADS,
    MOST_THREADS,
    MOST_THREADS_OF_NODE,
    DownloadTiming,
    Observations,
    auto_threads,
)

SIZES, LATENCIES = st.floats(1, 1e12), st.floats(1e-6, 100)


@given(SIZES, LATENCIES, st.integers(1, 1000))
def test_the_number_is_in_its_bounds_and_the_node_is_not_overrun(size: float, latency: float, num_processes: int) -> None:
    threads = auto_threads(size_bytes=size, latency_seconds=latency, num_processes=num_processes)
    assert 1 <= threads <= MOST_THREADS
    assert threads == 1 or threads * num_processes <= MOST_THREADS_OF_NODE


@given(SIZES, LATENCIES, LATENCIES)
def test_more_latency_never_means_fewer_threads(size: float, one: float, other: float) -> None:
    few, many = (auto_threads(size_bytes=size, latency_seconds=latency) for latency in sorted((one, other)))
    assert few <= many


def test_small_far_objects_get_many_threads_and_near_or_huge_ones_few() -> None:
    assert auto_threads(size_bytes=100_000, latency_seconds=0.05) == MOST_THREADS
    assert auto_threads(size_bytes=10_000, latency_seconds=0.0005) == LEAST_THREADS
    assert auto_threads(size_bytes=1e9, latency_seconds=0.05) == LEAST_THREADS
    assert auto_threads(size_bytes=100_000, latency_seconds=0.05, num_processes=64) == 4


def test_a_client_in_the_interpreter_gets_no_more_threads_than_that_can_serve() -> None:
    seen = Observations()
    for _ in range(16):
        seen.add(DownloadTiming(latency_seconds=0.02, size_bytes=50_000, is_python=True))
    assert LEAST_THREADS < seen.threads(1) < auto_threads(size_bytes=50_000, latency_seconds=0.02) // 3


def test_the_lowest_latencies_count_not_those_that_our_own_load_made() -> None:
    calm, loaded = Observations(), Observations()
    for i in range(64):
        calm.add(DownloadTiming(latency_seconds=0.001, size_bytes=100_000))
        loaded.add(DownloadTiming(latency_seconds=0.001 if i % 8 == 0 else 0.5, size_bytes=100_000))
    assert calm.threads(1) == loaded.threads(1) < MOST_THREADS
    assert loaded.latency(0.95) == 0.5


def test_before_anything_was_seen_there_is_a_start_value_for_a_share_of_the_node() -> None:
    assert Observations().threads(1) == 16
    assert Observations().threads(64) == 4
