"""Packs of rows whose lengths the index does not have: made on the way, a window of rows at a time."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from sqlstream import MixedDataset, MultiStreamDataLoader, Packs, StreamingDataLoader, StreamingDataset, StreamOptions
from sqlstream.errors import ConfigError, StateError, TooManyFailuresError, TransformError, UnknownLengthError
from sqlstream.transforms.presets import PackTokens
from sqlstream.world import World
from tests.stream.pack_runs import (
    CAPACITY,
    LENGTHS,
    NUM_ROWS,
    Run,
    failing,
    hashes_of,
    rows_in,
    seen,
    tokenize,
    tokens_of,
    write_table,
)
from tests.stream.sources import Photos

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
WINDOW = 11
PACKS = Packs(None, CAPACITY, lookahead=WINDOW)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "rows.parquet")


@pytest.fixture
def opened(table: Path) -> Iterator[Any]:
    made: list[StreamingDataset] = []

    def make(**options: Any) -> StreamingDataset:
        given: dict[str, Any] = {"shuffle_seed": 5, "show_progress": False, "batches": PACKS, "transforms": [tokenize]}
        made.append(StreamingDataset(table, table.parent / "cache", **(given | options)))
        return made[-1]

    yield make
    for dataset in made:
        dataset.close()


def rows_of(packs: list[dict[str, Any]]) -> list[int]:
    return [row for pack in packs for row in pack["__rows__"]]


def values_of(packs: list[dict[str, Any]]) -> list[int]:
    """All tokens, without padding of -1."""
    return sorted(token for pack in packs for token in pack["input_ids"].tolist() if token >= 0)


def test_each_row_comes_once_an_epoch_packed_with_others_of_its_window(opened: Any) -> None:
    dataset, plain = opened(), opened(batches=None)
    for _ in range(2):
        alone = list(plain)
        packs = list(dataset)
        window_of = {sample["row"]: place // WINDOW for place, sample in enumerate(alone)}
        assert sorted(rows_of(packs)) == list(range(NUM_ROWS))
        for pack in packs:
            assert len({window_of[row] for row in pack["__rows__"]}) == 1
            assert len(pack["input_ids"]) == CAPACITY
        drawn = {row: value for pack in packs for row, value in zip(pack["__rows__"], pack["drawn"], strict=True)}
        assert drawn == {sample["row"]: sample["drawn"] for sample in alone}, "rows are made as they are without packs"
        assert len({pack["__epoch__"] for pack in packs}) == 1
    assert len(dataset) == NUM_ROWS, "rows"
    assert dataset[3]["row"] == 3


def test_larger_windows_make_fuller_packs_and_without_a_seed_rows_come_as_written(opened: Any) -> None:
    numbers = [len(list(opened(batches=Packs(None, CAPACITY, lookahead=size)))) for size in (1, 4, 16, NUM_ROWS)]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == NUM_ROWS
    assert numbers[-1] == len(list(opened(batches=Packs("n", CAPACITY)))), "a window of all rows is as full as a plan"
    written = list(opened(batches=Packs(None, CAPACITY, lookahead=4), shuffle_seed=None))
    assert [row // 4 for row in rows_of(written)] == sorted(row // 4 for row in range(NUM_ROWS))


def test_how_many_packs_come_is_not_known_before(opened: Any) -> None:
    dataset = opened()
    loader = StreamingDataLoader(dataset, batch_size=2)
    for ask in (lambda: len(loader), lambda: dataset.epoch_size, lambda: dataset.num_steps(2)):
        with pytest.raises(UnknownLengthError, match="how many packs an epoch has shows when its rows are made"):
            ask()
    with pytest.raises(StateError, match="num_samples=4: packs of rows that are measured on the way are not counted"):
        dataset.state_dict(num_samples=4)
    batches = list(loader)
    assert all(batch["input_ids"].shape == (2, CAPACITY) for batch in batches[:-1])
    assert dataset.epoch == 1


def packs_of(batches: list[list[Any]]) -> list[Any]:
    return [pack for batch in batches for pack in batch]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_after_any_batch_on_any_number_of_workers(num_workers: int, table: Path) -> None:
    """A batch may end anywhere in a window, whose other packs come next; none comes twice or is lost."""
    whole = Run(table, 1, num_workers, batches=PACKS)
    (loader,) = whole.loaders
    batches, states = [], [whole.state()]
    for batch in loader:
        batches.append(list(batch))
        states.append(whole.state())
    later = [list(batch) for batch in loader]
    others = [Run(table, 1, workers, batches=PACKS) for workers in ((0, 1) if num_workers else (0,))]
    for number, state in enumerate(states):
        assert len(json.dumps(state)) < 2000
        for other in others if number % 3 == 0 else others[:1]:
            other.load(state)
            rest = [list(batch) for batch in other.loaders[0]]
            expected = Counter(packs_of(batches[number:])) if number < len(batches) else Counter(packs_of(later))
            assert Counter(packs_of(rest)) == expected, f"after {number} batches"
            if not num_workers and number < len(batches):
                assert packs_of(rest) == packs_of(batches[number:]), "in one process in the same order"
    for run in (whole, *others):
        run.close()


def test_each_rank_goes_on_from_a_state_of_its_own(table: Path) -> None:
    run, other = Run(table, 2, batches=PACKS), Run(table, 2, batches=PACKS)
    taken: list[list[Any]] = [[], []]
    states: list[list[Any]] = []
    running = [iter(loader) for loader in run.loaders]
    for _ in range(3):
        for rank, batches in enumerate(running):
            taken[rank].append(next(batches))
        states.append([json.loads(json.dumps(loader.state_dict())) for loader in run.loaders])
    rests = [list(batches) for batches in running]
    rows = [
        row for own, rest in zip(taken, rests, strict=True) for batch in own + rest for pack in batch for row in rows_in(pack)
    ]
    assert Counter(rows).keys() == set(range(NUM_ROWS))
    assert Counter(rows).total() <= NUM_ROWS + WINDOW, "a last step with one window of two ranks has it twice"
    for number, of_ranks in enumerate(states, start=1):
        for rank, state in enumerate(of_ranks):
            loader = other.loaders[rank]
            loader.load_state_dict(state)
            assert packs_of([list(batch) for batch in loader]) == packs_of(taken[rank][number:] + rests[rank])
    other.loaders[0].load_state_dict(states[0][1])
    with pytest.raises(StateError, match="the state is that of rank 1 of 2, this is rank 0 of 2"):
        iter(other.loaders[0])
    alone = Run(table, batches=PACKS)
    with pytest.raises(StateError, match="global_batch_size=2"):
        alone.load(states[0][0])
    for made in (run, other, alone):
        made.close()


def test_an_endless_iteration_has_whole_batches_for_ever(opened: Any) -> None:
    dataset = opened(infinite_iteration=True)
    loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=seen, multiprocessing_context="fork")
    batches = iter(loader)
    epochs = Counter(pack[0] for _ in range(14) for pack in next(batches))
    assert epochs.total() == 56
    assert len(epochs) > 2
    state = json.loads(json.dumps(loader.state_dict()))
    expected = Counter(pack for _ in range(4) for pack in next(batches))
    del batches
    loader.load_state_dict(state)
    again = iter(loader)
    assert Counter(pack for _ in range(4) for pack in next(again)) == expected


def test_long_rows_are_errors_left_out_cut_or_come_in_parts(opened: Any, caplog: pytest.LogCaptureFixture) -> None:
    pack_fn = PackTokens(pad_token_id=-1)
    with pytest.raises(ConfigError, match=r"row \d+ has length \d+, and a pack 8: give Packs on_long='drop'"):
        list(opened(batches=Packs(None, 8)))
    expected = {
        "drop": [token for row, length in enumerate(LENGTHS) if length <= 8 for token in tokens_of(row, length)],
        "truncate": [token for row, length in enumerate(LENGTHS) for token in tokens_of(row, min(length, 8))],
        "split": [token for row, length in enumerate(LENGTHS) for token in tokens_of(row, length)],
    }
    for on_long, tokens in expected.items():
        packs = list(opened(batches=Packs(None, 8, on_long=on_long, pack_fn=pack_fn, lookahead=WINDOW)))
        assert values_of(packs) == tokens
    assert caplog.text.count("packs of 8 leave out rows that are longer") == 1
    assert max(len(pack["__rows__"]) for pack in opened(batches=Packs(None, CAPACITY, max_rows=2))) == 2


def test_a_function_says_how_long_a_row_is(opened: Any) -> None:
    def together(pack: dict[str, Any]) -> dict[str, Any]:
        assert sum(stop - start for start, stop in (part["__span__"] for part in pack["parts"])) <= pack["capacity"]
        return {"rows": pack["__rows__"]}

    packs = list(opened(batches=Packs(lambda sample: sample["n"], CAPACITY, pack_fn=together)))
    assert sorted(row for pack in packs for row in pack["rows"]) == list(range(NUM_ROWS))
    wrong: list[tuple[Any, str]] = [
        (lambda sample: sample["n"] - LENGTHS[0], r"row \d+ has length -?\d+: leave empty rows out"),
        (lambda sample: sample["missing"], r"row \d+ has no length: .* raised KeyError: 'missing'"),
        (lambda sample: 2.5, r"row \d+ has no length: .* raised TypeError"),
        (lambda sample: 1, r"row \d+ has \d+ values in 'input_ids', and its length"),
    ]
    for measure, problem in wrong:
        with pytest.raises(TooManyFailuresError, match=problem):
            list(opened(batches=Packs(measure, CAPACITY)))
    with pytest.raises(TooManyFailuresError, match="has no sequence in field 'input_ids'"):
        list(opened(transforms=[]))


def test_rows_may_give_several_samples_or_none_and_failed_ones_are_replaced_skipped_or_raised(opened: Any) -> None:
    def halves(sample: dict[str, Any]) -> list[dict[str, Any]]:
        if sample["row"] % 3 == 0:
            return []
        tokens = np.array(tokens_of(sample["row"], sample["n"]))  # [n]
        return [{**sample, "input_ids": half} for half in np.array_split(tokens, 2) if len(half)]

    pack_fn = PackTokens(pad_token_id=-1)
    packs = list(opened(batches=Packs(None, CAPACITY, pack_fn=pack_fn), transforms=[halves]))
    assert values_of(packs) == [t for row, length in enumerate(LENGTHS) if row % 3 for t in tokens_of(row, length)]
    with pytest.raises(TransformError, match="broken row 3"):
        list(opened(transforms=[failing(3)], on_error="raise"))
    skipped = list(opened(transforms=[failing(3, 30)], on_error="skip", max_failure_ratio=1.0))
    assert sorted(rows_of(skipped)) == [row for row in range(NUM_ROWS) if row not in (3, 30)]
    replaced = list(opened(transforms=[failing(3, 30)], max_failure_ratio=1.0))
    assert len(rows_of(replaced)) == NUM_ROWS
    assert not {3, 30} & set(rows_of(replaced))


def test_a_pack_function_that_fails_stops_the_run_or_its_pack_is_left_out(opened: Any) -> None:
    def fail(pack: dict[str, Any]) -> dict[str, Any]:
        if 7 in pack["__rows__"]:
            raise ValueError("no pack")
        return {"rows": pack["__rows__"]}

    packs = Packs(lambda sample: sample["n"], CAPACITY, pack_fn=fail, lookahead=WINDOW)
    with pytest.raises(TransformError, match=r"transform fail failed on sample 'pack of rows .*no pack"):
        list(opened(batches=packs))
    rest = [row for pack in opened(batches=packs, on_error="skip", max_failure_ratio=1.0) for row in pack["rows"]]
    assert 7 not in rest
    assert len(rest) == len(set(rest)) > NUM_ROWS - 10


def test_lazy_indexes_filters_weights_blocks_epoch_sizes_and_nodes_go_with_windows(table: Path, opened: Any) -> None:
    wanted = [row for row, length in enumerate(LENGTHS) if length > 5]
    lazy = opened(lazy_index_chunk_size=7, where="n > 5")
    for _ in range(2):
        assert sorted(rows_of(list(lazy))) == wanted
    whole = opened(lazy_index_chunk_size=7)
    loader = StreamingDataLoader(whole, batch_size=3, num_workers=2, collate_fn=seen, multiprocessing_context="fork")
    assert sum(len(batch) for batch in loader) == len(list(opened(lazy_index_chunk_size=7)))
    weighted = list(opened(weights="CASE WHEN row < 20 THEN 0 WHEN row < 40 THEN 1 ELSE 2 END"))
    assert Counter(Counter(rows_of(weighted)).values()) == {1: 20, 2: 20}
    sized = opened(epoch_size=100)
    assert {Counter(rows_of(list(sized))).total() for _ in range(2)} == {100}
    blocks = list(opened(shuffle_block_size=5, shuffle_window=2))
    assert sorted(rows_of(blocks)) == list(range(NUM_ROWS))
    rows: list[set[int]] = [set(), set()]
    for epoch in range(3):
        for node in range(2):
            world = World(rank=node, world_size=2, local_rank=0, local_world_size=1, node=node, num_nodes=2)
            dataset = opened(world=world, num_canonical_nodes=2)
            dataset.set_epoch(epoch)
            rows[node] |= set(rows_of(list(StreamingDataLoader(dataset, batch_size=None))))
    assert not rows[0] & rows[1], "a node has the same rows in every epoch"
    assert rows[0] | rows[1] == set(range(NUM_ROWS))


def test_weights_change_with_the_next_epoch_and_rows_with_refresh(table: Path, opened: Any) -> None:
    dataset = opened()
    list(dataset)
    dataset.reweight("row < 30")
    assert set(rows_of(list(dataset))) == set(range(30))
    with pytest.raises(ConfigError, match="at_step=1 cannot be had with batches="):
        dataset.reweight("n", at_step=1)
    fresh = opened(refresh="epoch")
    assert sorted(rows_of(list(fresh))) == list(range(NUM_ROWS))
    pq.write_table(pq.read_table(table).slice(0, 25), table)
    assert sorted(rows_of(list(fresh))) == list(range(25))


def test_remote_files_of_a_window_are_there_until_its_packs_are_made(photos: Photos, tmp_path: Path) -> None:
    packs = Packs(lambda sample: 1, 4, pack_fn=hashes_of, lookahead=12)
    options: dict[str, Any] = {"columns_to_download": ["image"], "batches": packs, "max_size": 24, "show_progress": False}
    with StreamingDataset(photos.src, tmp_path / "c", cache_limit=600_000, shuffle_seed=2, **options) as dataset:
        rows = 0
        for pack in dataset:
            rows += len(pack["paths"])
            assert pack["right"]
            assert all(Path(path).exists() for path in pack["paths"]), "valid until the next pack is asked for"
        assert rows == 24


def test_a_state_of_other_packs_is_refused(opened: Any) -> None:
    dataset = opened()
    next(iter(dataset))
    state = json.loads(json.dumps(dataset.state_dict()))
    for batches in (
        Packs(None, CAPACITY + 1, lookahead=WINDOW),
        Packs(None, CAPACITY, lookahead=WINDOW + 1),
        Packs(None, CAPACITY, max_rows=3, lookahead=WINDOW),
        Packs("n", CAPACITY),
        None,
    ):
        with pytest.raises(StateError, match="blocks="):
            opened(batches=batches).load_state_dict(state)


def test_packs_that_are_not_counted_are_no_stream(opened: Any) -> None:
    with pytest.raises(ConfigError, match="has packs of rows without a length in SQL, which a mixture cannot have"):
        MixedDataset({"one": opened()}, epoch_size=8)
    with pytest.raises(ConfigError, match="has packs of rows without a length in SQL, which a stream"):
        MultiStreamDataLoader([opened()], StreamOptions.init_group([{"name": "a", "ratio": 1, "batch_gpu": 1}]))
    with pytest.raises(ConfigError, match="unaligned_worker_index=True cannot be had"):
        opened(unaligned_worker_index=True)
