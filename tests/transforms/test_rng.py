"""The generator of a sample: a pure function of (seed, epoch, position, stage)."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sqlstream.transforms as package
from sqlstream.errors import TransformError
from sqlstream.transforms import Sample, apply, rng
from sqlstream.transforms.base import may_draw_globally
from sqlstream.transforms.fields import EnsureFieldsTransform, FieldsFilteringTransform
from sqlstream.transforms.rng import PRIVATE_FIELDS, RNG_KEY, begin, end, next_stage
from sqlstream.transforms.text import TokenizeTransform


def draw(sample: Sample) -> Sample:
    sample.setdefault("drawn", []).append(float(rng(sample).random()))
    return sample


def keyed(seed: int = 1, epoch: int = 2, position: int = 3, stage: int = 1) -> Sample:
    sample: Sample = {}
    begin(sample, (seed, epoch, position), stage)
    return sample


def test_the_package_gives_the_function_by_the_name_of_its_module() -> None:
    assert package.rng is rng


def test_equal_keys_draw_equal_numbers_and_any_other_key_draws_others() -> None:
    def first(**key: int) -> bytes:
        return rng(keyed(**key)).bytes(16)

    assert first() == first()
    variants = [
        first(seed=-1),
        first(seed=5),
        first(epoch=3),
        first(position=4),
        first(stage=0),
        first(stage=2),
        first(seed=2**63),
    ]
    assert len({first(), *variants}) == 1 + len(variants)


def test_neighbouring_positions_are_independent_and_uniform() -> None:
    values = np.array([rng(keyed(position=p)).random() for p in range(2000)])
    assert abs(values.mean() - 0.5) < 0.03
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.06
    assert np.histogram(values, 10, (0, 1))[0].min() > 150


def test_two_transforms_of_a_chain_share_one_stream() -> None:
    sample = apply([draw, draw], keyed())
    assert isinstance(sample, dict)
    assert sample["drawn"] == rng(keyed()).random(2).tolist()


def test_a_transform_that_returns_a_new_dict_keeps_the_generator() -> None:
    def rebuild(sample: Sample) -> Sample:
        return {"drawn": sample["drawn"]}

    chain: list[Any] = [draw, rebuild, EnsureFieldsTransform(["drawn"], drop_others=True)]
    sample = apply([*chain, FieldsFilteringTransform(fields_to_keep=["drawn"]), draw], keyed())
    assert isinstance(sample, dict)
    assert sample["drawn"] == rng(keyed()).random(2).tolist()


def test_pieces_of_a_sample_draw_different_numbers_the_same_in_every_run() -> None:
    def split(sample: Sample) -> Iterator[Sample]:
        for number in range(3):
            yield {"number": number}

    def run() -> list[float]:
        pieces = apply([split, draw], keyed())
        assert not isinstance(pieces, dict)
        return [piece["drawn"][0] for piece in pieces]

    assert run() == run()
    assert len(set(run())) == 3


def test_a_stage_does_not_depend_on_what_was_drawn_before_it() -> None:
    used, fresh = keyed(), keyed()
    rng(used).random(7)
    next_stage(used)
    next_stage(fresh)
    assert rng(used).random() == rng(fresh).random() != rng(keyed()).random()


def test_end_takes_the_private_fields_out() -> None:
    sample = draw(keyed())
    end(sample)
    assert not sample.keys() & {*PRIVATE_FIELDS}


def test_a_bare_dict_gets_its_own_generator_and_a_broken_key_an_error() -> None:
    assert rng({}).random() != rng({}).random()
    for broken in ("seed", (1, 2, "x"), 5):
        with pytest.raises(TransformError, match=RNG_KEY):
            rng({RNG_KEY: broken})


def test_a_sample_with_a_live_generator_can_be_pickled() -> None:
    sample = keyed()
    rng(sample).random()
    assert rng(pickle.loads(pickle.dumps(sample))).random() == rng(sample).random()


class _Derived(EnsureFieldsTransform):
    """A user's own, with a base of ours."""


def test_code_of_others_may_draw_from_the_global_generators_and_our_own_never_does() -> None:
    assert may_draw_globally(draw)
    assert may_draw_globally(_Derived(["a"]))
    assert may_draw_globally(TokenizeTransform("text", str.split))
    assert not may_draw_globally(EnsureFieldsTransform(["a"]))
    directory = Path(package.__file__).parent
    draws = re.compile(
        r"(?<![\w.])(random\.[a-z]+\(|np\.random\.(?!Generator|default_rng|SeedSequence|Philox|PCG64)|torch\.(rand|randn|randint|randperm)\w*\()"
    )
    found = [
        (path.name, line) for path in directory.glob("*.py") for line in path.read_text().splitlines() if draws.search(line)
    ]
    assert found == []
