"""The copied state of Python's generator is the state that `random` goes on from."""

from __future__ import annotations

import random

import pytest

from sqlstream.stream.chain.python_generator import PYTHON, PythonGenerator, has_known_layout


@pytest.fixture(params=[True, False], ids=["as memory", "by getstate"])
def generator(request: pytest.FixtureRequest) -> tuple[random.Random, PythonGenerator]:
    """A generator, and what copies its state: in both ways."""
    generator = random.Random(7)
    return generator, PythonGenerator(generator, as_memory=request.param)


def test_this_python_has_the_known_layout() -> None:
    assert has_known_layout()


@pytest.mark.parametrize("num_drawn", [0, 1, 623, 624, 625, 2000])
def test_draws_go_on_from_a_copied_state(generator: tuple[random.Random, PythonGenerator], num_drawn: int) -> None:
    drawn, copied = generator
    for _ in range(num_drawn):
        drawn.getrandbits(32)
    drawn.gauss()
    whole, state = drawn.getstate(), copied.state()
    expected = [drawn.gauss(), drawn.random(), drawn.gauss()]
    for _ in range(700):
        drawn.random()
    for _ in range(2):
        copied.restore(state)
        assert drawn.getstate() == whole
        assert [drawn.gauss(), drawn.random(), drawn.gauss()] == expected


@pytest.mark.parametrize("number", [0, 1, (1 << 64) - 1])
def test_a_seed_gives_what_random_gives(generator: tuple[random.Random, PythonGenerator], number: int) -> None:
    drawn, copied = generator
    drawn.gauss()
    copied.seed(number)
    assert drawn.getstate() == random.Random(number).getstate()


def test_the_functions_of_random_draw_from_the_global_one() -> None:
    before = random.getstate()
    PYTHON.seed(5)
    assert [random.random(), random.gauss()] == [(known := random.Random(5)).random(), known.gauss()]
    random.setstate(before)
