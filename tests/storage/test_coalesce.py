from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.storage.base.coalesce import plan_reads

DATA = bytes(range(256)) * 4
RANGES = st.lists(
    st.tuples(st.integers(0, 1000), st.integers(0, 24)).map(lambda pair: (pair[0], pair[0] + pair[1])), max_size=40
)


@given(RANGES, st.integers(0, 200), st.integers(1, 500))
def test_merged_ranges_read_what_single_ranges_read(ranges: list[tuple[int, int]], gap: int, most: int) -> None:
    plan = plan_reads(ranges, max_gap_bytes=gap, max_request_bytes=most)
    parts = plan.cut([DATA[start:stop] for start, stop in plan.requests])
    assert [bytes(part) for part in parts] == [DATA[start:stop] for start, stop in ranges]


@given(RANGES, st.integers(0, 200), st.integers(1, 500))
def test_requests_are_disjoint_in_order_and_no_farther_apart_than_they_must(
    ranges: list[tuple[int, int]], gap: int, most: int
) -> None:
    plan = plan_reads(ranges, max_gap_bytes=gap, max_request_bytes=most)
    largest = max((stop - start for start, stop in ranges), default=0)
    for start, stop in plan.requests:
        assert start < stop
        assert stop - start <= max(most, 40 * largest)
    for (start, stop), (next_start, next_stop) in zip(plan.requests, plan.requests[1:], strict=False):
        assert stop <= next_start
        assert next_start - stop > gap or next_stop - start > most
    wanted = {i for start, stop in ranges for i in range(start, stop)}
    read = {i for start, stop in plan.requests for i in range(start, stop)}
    assert wanted <= read


def test_the_pieces_are_views_into_the_answers() -> None:
    answer = bytearray(DATA)
    (part,) = plan_reads([(0, 10)]).cut([memoryview(answer)])
    answer[0] = 77
    assert part[0] == 77


def test_near_ranges_become_one_request_and_far_ones_do_not() -> None:
    assert plan_reads([(0, 10), (20, 30)], max_gap_bytes=10).requests == ((0, 30),)
    assert plan_reads([(0, 10), (20, 30)], max_gap_bytes=9).requests == ((0, 10), (20, 30))
    assert plan_reads([(0, 10), (10, 20)], max_request_bytes=15).requests == ((0, 10), (10, 20))
    assert plan_reads([]).requests == ()
    assert [bytes(part) for part in plan_reads([(5, 5)]).cut([])] == [b""]


@pytest.mark.parametrize("wrong", [(5, 4), (-1, 4)])
def test_ranges_that_are_none_are_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="half open"):
        plan_reads([wrong])
