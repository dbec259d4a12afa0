"""The cut of samples that are in order, some at a time: what the cut of all at once is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sqlstream.storage.members.entries import Span, are_in_order, cut, cut_in_order

SIZES = st.sampled_from([1, 100, 5000, 16_383, 16_384, 30_000, 300_000])
SAMPLES = st.lists(st.lists(SIZES, max_size=4), max_size=40)


def spans(samples: list[list[int]], gap: int) -> list[list[Span]]:
    """Parts of such sizes, one behind the other."""
    end, made = 512, list[list[Span]]()
    for sizes in samples:
        made.append([])
        for size in sizes:
            made[-1].append((end, end + size))
            end += size + gap
    return made


@given(samples=SAMPLES, gap=st.sampled_from([0, 512]), at_a_time=st.integers(1, 9))
def test_it_is_the_cut_of_all(samples: list[list[int]], gap: int, at_a_time: int) -> None:
    made = spans(samples, gap)
    assert are_in_order(made)
    assert list(cut_in_order(made, at_a_time)) == cut(made)


def test_samples_whose_ends_are_joined_with_the_next_ones_are_cut_few_times() -> None:
    made = spans([[100, 300_000, 100]] * 3000, 512)
    assert list(cut_in_order(made, 10)) == cut(made)
    assert not any(entries[0][0] == parts[0][0] for entries, parts in zip(cut(made)[1:], made[1:], strict=True))


def test_samples_that_lie_among_each_other_are_not_in_order() -> None:
    assert are_in_order([[], [(0, 5), (6, 9)], [], [(9, 12)]])
    assert not are_in_order([[(0, 5), (20, 25)], [(10, 15)]])
    assert not are_in_order([[(10, 15)], [(0, 5)]])
