"""Options of mixtures at their edges: what is right of them holds, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import MixedDataset, MultiStreamDataLoader, Stream, StreamingDataLoader, StreamOptions, World, weight_ramp
from sqlstream.errors import ConfigError, StateError
from sqlstream.transforms.base import Sample
from tests.stream.mixtures import streams_of
from tests.stream.tables import make_table, rows_of


@pytest.mark.parametrize("unit", ["sample", "batch"])
@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_each_stream_is_drawn_whole_on_any_number_of_canonical_nodes(num_nodes: int, unit: str, tmp_path: Path) -> None:
    """Rows that a stream has beyond an equal number for each node were left out."""
    sizes = {"five": 5, "nine": 9, "seventeen": 17}
    streams = streams_of(tmp_path, sizes, num_canonical_nodes=num_nodes)
    with MixedDataset(streams, [1, 2, 4], stop="all_exhausted", unit=unit, batch_size=6) as mixed:
        drawn = {(sample["__stream__"], sample["__row__"]) for sample in mixed}
    assert drawn == {(name, row) for name, size in sizes.items() for row in range(size)}


def test_a_dataset_whose_mixture_cannot_be_made_is_as_it_was(tmp_path: Path) -> None:
    """It could not be reweighted any more, as if it were a stream."""
    dataset = streams_of(tmp_path, {"seventeen": 17})["seventeen"].open(None, None)
    with pytest.raises(ConfigError, match="epoch_size=10 is no multiple of 3"):
        MixedDataset({"seventeen": dataset}, unit="batch", batch_size=3, epoch_size=10)
    with pytest.raises(ConfigError, match="batch_size=3 is not divisible"):
        MultiStreamDataLoader([dataset], [StreamOptions("seventeen", 1.0, 0, batch_size=3, batch_gpu=2)])
    dataset.reweight("score")
    dataset.close()


def twice(sample: Sample) -> Iterator[Sample]:
    yield from ({**sample, "half": half} for half in range(2))


def test_rows_of_a_stream_that_give_several_samples_name_it_in_each(tmp_path: Path) -> None:
    """A slice, or a list of rows, was a TypeError of the list of one row."""
    with MixedDataset(streams_of(tmp_path, {"five": 5}, transforms=[twice])) as mixed:
        for rows in (mixed["five", 1:3], mixed["five", [1, 2]], [mixed["five", 1], mixed[2]]):
            seen = [[(one["__stream__"], one["__row__"], one["half"]) for one in row] for row in rows]
            assert seen == [[("five", row, half) for half in range(2)] for row in (1, 2)]


def test_values_that_are_no_such_numbers_are_named(tmp_path: Path) -> None:
    """They were errors of Python's arithmetic, or named an option that was not given."""
    with pytest.raises(ConfigError, match=r"tokens='1e308 \* 10' of stream 'five' add up to inf"):
        MixedDataset(streams_of(tmp_path, {"five": 5}), [1], tokens="1e308 * 10")
    with pytest.raises(ConfigError, match=r"stop=2.5 is no whole number"):
        weight_ramp(0, 2.5, {"a": 1}, {"a": 2})  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ConfigError, match=r"^epoch_size=281474976710657 is out of range"):
        streams_of(tmp_path, {"five": 5}, epoch_size=(1 << 48) + 1)["five"].open(None, None)


def test_a_state_that_is_refused_changes_nothing_of_a_mixture(tmp_path: Path) -> None:
    """Lanes, and weights of rows of streams before the one that was wrong, were those of the state."""

    def loader_of(num_ranks: int, first: str | None, second: list[int] | None) -> StreamingDataLoader:
        weights: dict[str, Any] = {"five": first, "nine": second}
        tables = {"five": make_table(tmp_path, 5), "nine": make_table(tmp_path, 9)}
        streams = {name: Stream(tables[name], tmp_path / "cache", weights=weights[name], shuffle_seed=3) for name in tables}
        world = World(rank=0, world_size=num_ranks, local_world_size=num_ranks)
        mixed = MixedDataset(streams, [2, 1], unit="rank", epoch_size=24, schedule="random_order", shuffle_seed=1, world=world)
        return StreamingDataLoader(mixed, batch_size=8 // num_ranks, collate_fn=rows_of)

    state = loader_of(2, "1 + score", [*range(1, 10)]).state_dict()
    want = list(loader_of(1, None, None))
    loader = loader_of(1, None, None)
    with pytest.raises(StateError, match="were given as an array"):
        loader.load_state_dict(state)
    assert list(loader) == want


def test_a_state_that_is_refused_changes_nothing_of_a_loader_of_streams(tmp_path: Path) -> None:
    def loader_of(num_ranks: int, first: str | None, second: list[int] | None) -> MultiStreamDataLoader:
        own = [StreamOptions(name, 1, 0, batch_gpu=1) for name in ("five", "nine")]
        streams = streams_of(tmp_path, {"five": 5, "nine": 9})
        streams["five"].options["weights"], streams["nine"].options["weights"] = first, second
        datasets = [stream.open(None, None) for stream in streams.values()]
        world = World(rank=0, world_size=num_ranks, local_world_size=num_ranks)
        return MultiStreamDataLoader(datasets, own, epoch_size=9, collate_fn=counted, world=world)

    def counted(samples: list[Sample]) -> dict[str, Any]:
        return {"rows": rows_of(samples)}

    state = loader_of(2, "1 + score", [*range(1, 10)]).state_dict()
    want = [(batch.stream_name, batch["rows"]) for batch in loader_of(1, None, None)]
    loader = loader_of(1, None, None)
    with pytest.raises(StateError, match="were given as an array"):
        loader.load_state_dict(state)
    assert [(batch.stream_name, batch["rows"]) for batch in loader] == want
