"""Packs in the stream: what a sample is, each row once an epoch, resumption at every step into other layouts, failures."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sqlstream import Packs, StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError, TooManyFailuresError, TransformError
from sqlstream.transforms import rng
from sqlstream.transforms.presets import PackTokens
from sqlstream.world import World
from tests.stream.pack_runs import (
    CAPACITY,
    GLOBAL_BATCH,
    LENGTHS,
    NUM_ROWS,
    PACKS,
    Run,
    Step,
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


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "rows.parquet")


@pytest.fixture
def runs(table: Path) -> Iterator[Any]:
    made: list[Run] = []

    def make(num_ranks: int = 1, num_workers: int = 0, **options: Any) -> Run:
        made.append(Run(table, num_ranks, num_workers, **options))
        return made[-1]

    yield make
    for run in made:
        run.close()


def parts_of(pack: dict[str, Any]) -> list[tuple[int, int]]:
    return list(pairwise(pack["cu_seqlens"].tolist()))


def test_a_pack_is_one_sequence_that_says_where_its_rows_are(runs: Any) -> None:
    (dataset,) = runs().datasets
    packs = list(dataset)
    assert len(packs) == dataset.epoch_size == -(-sum(LENGTHS) // CAPACITY)
    assert sorted(row for pack in packs for row in pack["__rows__"]) == list(range(NUM_ROWS))
    for pack in packs:
        lengths = [LENGTHS[row] for row in pack["__rows__"]]
        rest = CAPACITY - sum(lengths)
        whole = [*lengths, rest] if rest else lengths
        expected = [token for row, length in zip(pack["__rows__"], lengths, strict=True) for token in tokens_of(row, length)]
        assert pack["input_ids"].tolist() == expected + [0] * rest
        assert pack["position_ids"].tolist() == [place for length in whole for place in range(length)]
        assert pack["document_ids"].tolist() == [number for number, length in enumerate(whole) for _ in range(length)]
        assert pack["seq_lengths"].tolist() == whole == [stop - start for start, stop in parts_of(pack)]
        assert pack["max_seqlen"] == max(whole)
        hidden = {start for start, _ in parts_of(pack)} | set(range(sum(lengths), CAPACITY))
        labels = [-100 if place in hidden else token for place, token in enumerate(pack["input_ids"].tolist())]
        assert pack["labels"].tolist() == labels
        kinds = {name: pack[name].dtype for name in ("input_ids", "labels", "position_ids", "document_ids", "cu_seqlens")}
        assert [*kinds.values()] == [torch.int64] * 3 + [torch.int32] * 2
        assert pack["row"] == pack["__rows__"], "values that are no sequences are lists"


def test_rows_are_made_alike_alone_and_in_packs_and_have_other_neighbours_in_each_epoch(runs: Any) -> None:
    (dataset,) = runs().datasets
    alone = {row: dataset[row]["drawn"] for row in range(NUM_ROWS)}
    assert len(dataset) == NUM_ROWS, "rows, not packs"
    drawn, neighbours = [], []
    for _ in range(2):
        packs = list(dataset)
        drawn.append({row: value for pack in packs for row, value in zip(pack["__rows__"], pack["drawn"], strict=True)})
        neighbours.append({frozenset(pack["__rows__"]) for pack in packs})
    assert drawn[0] == alone
    assert not set(drawn[0].values()) & set(drawn[1].values())
    assert len(neighbours[0] & neighbours[1]) < len(neighbours[0]) / 3


def test_packs_count_for_the_loader(runs: Any) -> None:
    (loader,) = runs().loaders
    num_packs = loader.dataset.epoch_size
    assert len(loader) == len(list(loader)) == -(-num_packs // GLOBAL_BATCH)
    alone = StreamingDataLoader(loader.dataset)
    batch = next(iter(alone))
    assert batch["input_ids"].shape == batch["position_ids"].shape == (1, CAPACITY)
    assert len(alone) == num_packs


def test_batches_of_packs_are_collated_by_default(runs: Any, table: Path) -> None:
    (dataset,) = runs().datasets
    packs = [dict(pack) for pack in dataset]
    dataset.set_epoch(0)
    batch = next(iter(StreamingDataLoader(dataset, batch_size=3)))
    assert torch.equal(batch["input_ids"], torch.stack([pack["input_ids"] for pack in packs[:3]]))
    flat = batch["position_ids"].flatten()  # [n]
    starts = batch["cu_seqlens"][:-1].long()  # [p]
    assert flat[starts].eq(0).all()
    assert batch["cu_seqlens"][-1] == flat.numel() == 3 * CAPACITY
    assert batch["seq_lengths"].tolist() == batch["cu_seqlens"].diff().tolist()
    assert batch["__rows__"] == [pack["__rows__"] for pack in packs[:3]]
    unpadded = runs(batches=Packs("n", CAPACITY, pack_fn=PackTokens(is_padded=False)))
    batch = next(iter(StreamingDataLoader(unpadded.datasets[0], batch_size=20)))
    assert batch["input_ids"].shape == (1, sum(LENGTHS))
    assert batch["cu_seqlens"][-1] == sum(LENGTHS)


@pytest.mark.parametrize("layout", [(2, 0), (4, 0), (2, 2), (1, 3)], ids=str)
def test_global_batches_are_the_same_on_every_layout(layout: tuple[int, int], runs: Any) -> None:
    one, other = runs(), runs(*layout)
    for _ in range(8):
        assert other.step() == one.step()


def test_a_run_resumed_at_every_step_on_every_layout_goes_on_as_if_it_had_not_stopped(runs: Any) -> None:
    """An epoch has 5 steps, the last of which is short."""
    whole = runs(2)
    states, steps = [whole.state()], []
    for _ in range(13):
        steps.append(whole.step())
        states.append(whole.state())
    others = [runs(num_ranks) for num_ranks in (1, 2, 4)]
    for number, state in enumerate(states[:11]):
        assert len(json.dumps(state)) < 2000
        for run in others:
            run.load(state)
            assert [run.step(), run.step()] == steps[number : number + 2], f"after {number} steps on {len(run.loaders)} ranks"
    with_workers = runs(2, 2)
    for number in (1, 6):
        with_workers.load(states[number])
        assert [with_workers.step() for _ in range(3)] == steps[number : number + 3]


@pytest.mark.parametrize("num_breaks", [5, pytest.param(450, marks=pytest.mark.slow)])
def test_a_run_that_is_broken_off_at_random_steps_takes_what_the_plan_says(num_breaks: int, runs: Any) -> None:
    seed = 20
    print("seed", seed)
    draw = random.Random(seed)
    others = {num_ranks: runs(num_ranks) for num_ranks in (1, 2, 4)}
    plan, state, number = runs(), None, 0
    for _ in range(num_breaks):
        run = others[draw.choice((1, 2, 4))]
        if state is not None:
            run.load(state)
        for _ in range(draw.randint(1, 4)):
            assert run.step() == plan.step(), f"step {number} on {len(run.loaders)} ranks"
            number += 1
        state = run.state()
        run.step()  # is lost, and comes again


def test_an_endless_iteration_goes_on_over_epochs(runs: Any) -> None:
    endless = runs(1, 2, infinite_iteration=True)
    rows = Counter(row for _ in range(9) for pack in endless.step() for row in pack[1 : pack.index(0) if 0 in pack else None])
    assert rows, "packs came"
    assert len({frozenset(endless.step()) for _ in range(6)}) == 6


@pytest.mark.parametrize("prefetch", [1, 3, 256])
def test_packs_are_the_same_however_few_rows_are_planned_ahead(prefetch: int, runs: Any) -> None:
    assert seen(list(runs(prefetch=prefetch).datasets[0])) == seen(list(runs().datasets[0]))


def test_long_rows_are_left_out_cut_or_come_in_parts(runs: Any) -> None:
    with pytest.raises(ConfigError, match=r"rows are longer than a pack of 8: row \d+ has 19.*on_long="):
        runs(batches=Packs("n", 8))
    expected = {
        "drop": [token for row, length in enumerate(LENGTHS) if length <= 8 for token in tokens_of(row, length)],
        "truncate": [token for row, length in enumerate(LENGTHS) for token in tokens_of(row, min(length, 8))],
        "split": [token for row, length in enumerate(LENGTHS) for token in tokens_of(row, length)],
    }
    for on_long, tokens in expected.items():
        packs = list(runs(batches=Packs("n", 8, on_long=on_long, pack_fn=PackTokens(pad_token_id=-1))).datasets[0])
        assert all(len(pack["input_ids"]) == 8 for pack in packs)
        assert sorted(token for pack in packs for token in pack["input_ids"].tolist() if token >= 0) == tokens
    drawn = {(row, value) for pack in packs for row, value in zip(pack["__rows__"], pack["drawn"], strict=True)}
    assert len(drawn) == NUM_ROWS, "all parts of a row are made with the same random numbers"


def test_a_pack_has_no_more_rows_than_it_may(runs: Any) -> None:
    packs = list(runs(batches=Packs("n", CAPACITY, max_rows=2)).datasets[0])
    assert max(len(pack["__rows__"]) for pack in packs) == 2
    assert sum(len(pack["__rows__"]) for pack in packs) == NUM_ROWS


def test_ones_own_function_makes_the_sample_with_random_numbers_of_its_own(runs: Any) -> None:
    def together(pack: dict[str, Any]) -> dict[str, Any]:
        spans = [part["__span__"] for part in pack["parts"]]
        return {"rows": pack["__rows__"], "spans": spans, "drawn": int(rng(pack).integers(1 << 40))}

    packs = Packs("n", CAPACITY, pack_fn=together)
    one, other = ([dict(pack) for pack in runs(batches=packs).datasets[0]] for _ in range(2))
    assert one == other
    assert len({pack["drawn"] for pack in one}) == len(one)
    assert all(pack["spans"] == [(0, LENGTHS[row]) for row in pack["rows"]] for pack in one)


def test_a_failed_row_is_replaced_by_one_of_its_length_or_shorter(runs: Any) -> None:
    bad = [row for row in range(NUM_ROWS) if LENGTHS[row] == 12]
    good = list(runs().datasets[0])
    packs = list(runs(transforms=[failing(*bad)], max_failure_ratio=1.0).datasets[0])
    assert [len(pack["__rows__"]) for pack in packs] == [len(pack["__rows__"]) for pack in good]
    for pack, before in zip(packs, good, strict=True):
        for row, instead in zip(before["__rows__"], pack["__rows__"], strict=True):
            assert row == instead or (row in bad and instead not in bad and LENGTHS[instead] <= LENGTHS[row])
    assert not {row for pack in packs for row in pack["__rows__"]} & set(bad)


@pytest.mark.parametrize(
    "options",
    [{"weights": "n"}, {"num_canonical_nodes": 3}, {"epoch_size": 30}, {"batches": Packs("n", 8, on_long="split")}],
    ids=["weights", "nodes", "epoch_size", "split"],
)
def test_a_failed_row_is_replaced_within_its_length_whatever_decides_the_order(options: dict[str, Any], runs: Any) -> None:
    bad = [row for row in range(NUM_ROWS) if LENGTHS[row] in (5, 12, 19)]
    good = list(runs(**options).datasets[0])
    packs = list(runs(transforms=[failing(*bad)], max_failure_ratio=1.0, **options).datasets[0])
    assert len(packs) == len(good)
    for pack, before in zip(packs, good, strict=True):
        capacity = len(pack["input_ids"])
        for row, instead in zip(before["__rows__"], pack["__rows__"], strict=True):
            assert row == instead or (row in bad and instead not in bad and min(LENGTHS[instead], capacity) <= LENGTHS[row])
    again = runs(transforms=[failing(*bad)], max_failure_ratio=1.0, **options).datasets[0]
    assert seen(list(again)) == seen(packs), "the same ones stand in each time"


def test_a_failed_row_is_skipped_or_raised(runs: Any) -> None:
    packs = list(runs(transforms=[failing(3, 30)], max_failure_ratio=1.0, on_error="skip").datasets[0])
    assert sorted(row for pack in packs for row in pack["__rows__"]) == [row for row in range(NUM_ROWS) if row not in (3, 30)]
    with pytest.raises(TransformError, match="broken row 3"):
        list(runs(transforms=[failing(3)], on_error="raise").datasets[0])


def test_a_row_that_is_longer_than_its_length_is_a_failure_that_names_it(runs: Any) -> None:
    with pytest.raises(TooManyFailuresError, match=r"row \d+ has \d+ values in 'input_ids', and its length in the index is"):
        list(runs(batches=Packs("max(1, n - 1)", CAPACITY)).datasets[0])
    with pytest.raises(TooManyFailuresError, match=r"has no sequence in field 'input_ids' \(fields: n, row\)"):
        list(runs(transforms=[]).datasets[0])
    shorter = runs(batches=Packs("(n + 3) / 4 * 4", CAPACITY))
    packs = list(shorter.datasets[0])
    assert sorted(row for pack in packs for row in pack["__rows__"]) == list(range(NUM_ROWS)), "lengths may be rounded up"


def test_several_samples_of_a_row_and_a_function_that_fails_are_errors(runs: Any) -> None:
    with pytest.raises(TooManyFailuresError, match="gives 2 samples, and a pack takes one of each row"):
        list(runs(transforms=[lambda sample: [dict(sample), dict(sample)]]).datasets[0])

    def fail(pack: dict[str, Any]) -> dict[str, Any]:
        raise ValueError("no pack")

    with pytest.raises(TransformError, match=r"transform fail failed on sample 'pack of rows 19, 11, .*no pack"):
        list(runs(batches=Packs("n", CAPACITY, pack_fn=fail)).datasets[0])
    skipped = runs(batches=Packs("n", CAPACITY, pack_fn=fail), on_error="skip", max_failure_ratio=1.0)
    assert list(skipped.datasets[0]) == []


def test_files_of_rows_are_there_while_their_pack_is_made(runs: Any, table: Path, tmp_path: Path) -> None:
    for row, length in enumerate(LENGTHS):
        np.save(tmp_path / f"{row}.npy", np.array(tokens_of(row, length)))
    path = tmp_path / "files.parquet"
    pq.write_table(pa.table({"n": LENGTHS, "file": [f"{row}.npy" for row in range(NUM_ROWS)]}), path)

    def read(pack: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": np.concatenate([np.load(part["file"]) for part in pack["parts"]])}

    packs = Packs("n", CAPACITY, pack_fn=read)
    with StreamingDataset(path, tmp_path / "own", columns_to_download=["file"], batches=packs, show_progress=False) as dataset:
        tokens = sorted(token for pack in dataset for token in pack["tokens"].tolist())
    assert tokens == [token for row, length in enumerate(LENGTHS) for token in tokens_of(row, length)]


def test_remote_files_of_a_pack_are_pinned_until_it_is_made_and_while_their_paths_are_valid(
    photos: Photos, tmp_path: Path
) -> None:
    """The cache has room for one pack of four photos, and some: packs whose paths are kept and the next one do not fit."""
    packs = Packs("1", 4, pack_fn=hashes_of)
    options: dict[str, Any] = {"columns_to_download": ["image"], "batches": packs, "max_size": 24, "show_progress": False}
    with StreamingDataset(photos.src, tmp_path / "c", cache_limit=200_000, shuffle_seed=2, **options) as dataset:
        rows = 0
        for pack in dataset:
            rows += len(pack["paths"])
            assert pack["right"]
            assert len(pack["paths"]) == 4
            assert all(Path(path).exists() for path in pack["paths"]), "valid until the next pack is asked for"
        assert rows == 24


def test_filters_replication_and_parts_of_a_dataset_go_with_packs(table: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"batches": PACKS, "transforms": [tokenize], "show_progress": False, "shuffle_seed": 1}
    with StreamingDataset(table, tmp_path / "c", where="n > 5", max_size=20, **options) as dataset:
        rows = [row for row, length in enumerate(LENGTHS) if length > 5][:20]
        assert sorted(row for pack in dataset for row in pack["row"]) == rows
        with dataset.select("n > 10") as part:
            assert sorted(row for pack in part for row in pack["row"]) == [row for row in rows if LENGTHS[row] > 10]
    alike = []
    for rank in range(4):
        world = World(rank=rank, world_size=4, local_rank=rank, local_world_size=4)
        with StreamingDataset(table, tmp_path / "c", world=world, replication=2, batch_size=2, **options) as dataset:
            alike.append(seen(list(dataset)))
    assert alike[0] == alike[1] != alike[2] == alike[3]


def test_a_state_of_other_packs_is_refused(runs: Any) -> None:
    run = runs()
    run.step()
    state = run.state()
    assert json.dumps(state), "plain"
    for batches in (Packs("n", CAPACITY + 1), Packs("n + 0", CAPACITY), Packs("n", CAPACITY, max_rows=3), None):
        with pytest.raises(StateError, match="blocks="):
            runs(batches=batches).load(state)
    runs(batches=Packs("n", CAPACITY, pack_fn=PackTokens(pad_token_id=5))).load(state)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"epoch_size": 0}, "epoch_size=0"),
    ({"epoch_size": 9, "num_canonical_nodes": 2}, "epoch_size=9 is no multiple of num_canonical_nodes=2: give 8 or 10"),
    ({"weights": "n", "num_canonical_nodes": 2}, "num_canonical_nodes=2 with weights= and Packs cannot be had"),
    ({"unaligned_worker_index": True}, "unaligned_worker_index=True cannot be had"),
    ({"lazy_index_chunk_size": 4}, "lazy index"),
    ({"batches": Packs("n - 1", CAPACITY)}, r"row \d+ has 0: a length is a whole number of 1 or more"),
]


@pytest.mark.parametrize(("options", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_what_does_not_go_with_packs_is_refused(options: dict[str, Any], problem: str, runs: Any) -> None:
    with pytest.raises(ConfigError, match=problem):
        runs(**options)


def test_nodes_keep_their_rows_and_any_number_of_them_takes_the_same_steps(table: Path) -> None:
    def opened(num_nodes: int, node: int) -> StreamingDataset:
        world = World(rank=node, world_size=num_nodes, node=node, num_nodes=num_nodes)
        given: dict[str, Any] = {"shuffle_seed": 5, "show_progress": False, "batches": PACKS, "transforms": [tokenize]}
        return StreamingDataset(table, table.parent / "cache", world=world, num_canonical_nodes=4, **given)

    steps: dict[int, list[Step]] = {}
    states: list[dict[str, Any]] = []
    for num_nodes in (1, 2, 4):
        parts = []
        for node in range(num_nodes):
            with opened(num_nodes, node) as dataset:
                loader = StreamingDataLoader(dataset, batch_size=GLOBAL_BATCH // num_nodes, collate_fn=seen)
                batches = []
                for _ in range(2):
                    for batch in loader:
                        batches.append(batch)
                        states += [json.loads(json.dumps(loader.state_dict()))] if num_nodes == 2 and not node else []
                parts.append(batches)
        rows = [{row for batch in part for pack in batch for row in rows_in(pack)} for part in parts]
        assert sum(map(len, rows)) == len(set().union(*rows)) == NUM_ROWS, "each node has rows of its own"
        steps[num_nodes] = [frozenset(chain.from_iterable(batches)) for batches in zip(*parts, strict=True)]
    assert steps[1] == steps[2] == steps[4]
    for number in range(0, len(states) - 1, 3):
        taken = []
        for node in range(4):
            with opened(4, node) as dataset:
                loader = StreamingDataLoader(dataset, batch_size=1, collate_fn=seen)
                loader.load_state_dict(states[number])
                taken += next(iter(loader))
        assert frozenset(taken) == steps[1][number + 1], f"after {number + 1} steps"


def test_an_epoch_of_so_many_packs_goes_on_where_the_one_before_has_ended(runs: Any) -> None:
    one_round = seen(list(runs().datasets[0]))
    for weights in (None, "n"):
        sized = runs(epoch_size=12, weights=weights)
        (dataset,) = sized.datasets
        assert dataset.epoch_size == 12
        assert len(sized.loaders[0]) == 3
        states, steps = [sized.state()], []
        for _ in range(9):
            steps.append(sized.step())
            states.append(sized.state())
        if weights is None:
            assert frozenset(one_round) < frozenset(pack for step in steps for pack in step), "each row once a round"
        other, with_workers = runs(2, epoch_size=12, weights=weights), runs(1, 2, epoch_size=12, weights=weights)
        for number, state in enumerate(states[:8]):
            other.load(state)
            assert other.step() == steps[number]
        with_workers.load(states[4])
        assert [with_workers.step() for _ in range(3)] == steps[4:7]
        with pytest.raises(StateError, match="epoch_size=12"):
            runs(epoch_size=13, weights=weights).load(states[1])
        with pytest.raises(ConfigError, match=r"reweight\(\) with Packs and epoch_size=12 cannot be had"):
            dataset.reweight("n")
    with pytest.raises(ConfigError, match=r"reweight\(\) with Packs and num_canonical_nodes=2 cannot be had"):
        runs(num_canonical_nodes=2).datasets[0].reweight("n")


def test_rows_of_another_version_are_packed_from_the_next_epoch_on(runs: Any, table: Path) -> None:
    (dataset,) = runs(refresh="epoch").datasets
    loader = StreamingDataLoader(dataset, batch_size=2, collate_fn=seen)
    assert len(list(loader)) == len(loader)
    pq.write_table(pa.table({"n": LENGTHS[:20], "row": list(range(20))}), table)
    batches = list(loader)
    assert sum(len(batch) for batch in batches) == dataset.epoch_size == len({pack for batch in batches for pack in batch})
    assert dataset.epoch_size < 10
    pq.write_table(pa.table({"n": [*LENGTHS[:20], 999], "row": list(range(21))}), table)
    assert len(list(loader)) == len(batches), "a row that no pack has room for: the rows stay as they are"
    with pytest.raises(ConfigError, match="1 rows are longer than a pack of 32: row 20 has 999"):
        runs()


def times(packs: list[dict[str, Any]]) -> Counter[int]:
    return Counter(row for pack in packs for row in pack["__rows__"])


def test_rows_come_as_often_as_they_weigh(runs: Any) -> None:
    (dataset,) = runs(weights="CASE WHEN row < 20 THEN 0 WHEN row < 40 THEN 1 ELSE 2 END").datasets
    for _ in range(3):
        num_packs = dataset.epoch_size
        packs = list(dataset)
        assert len(packs) == num_packs, "epochs may differ by some packs"
        seen_rows = times(packs)
        assert seen_rows.total() == NUM_ROWS, "as many rows as without weights"
        assert {seen_rows[row] for row in range(20)} == {0}
        assert {seen_rows[row] for row in range(20, 40)} == {1}
        assert {seen_rows[row] for row in range(40, NUM_ROWS)} == {2}
        lengths = [sum(LENGTHS[row] for row in pack["__rows__"]) for pack in packs]
        assert max(lengths) <= CAPACITY
        assert sum(lengths) / len(packs) / CAPACITY > 0.9
        drawn = [value for pack in packs for value in pack["drawn"]]
        assert len(set(drawn)) == NUM_ROWS, "a row that comes twice is made with other random numbers each time"


def test_weighted_packs_go_on_in_any_epoch_on_any_layout(runs: Any) -> None:
    weights = {"weights": "n / 3.0"}
    whole, states, steps = runs(**weights), [], []
    for _ in range(13):
        steps.append(whole.step())
        states.append(whole.state())
    other, with_workers = runs(2, **weights), runs(2, 2, **weights)
    for number in (0, 4, 5, 8, 11):
        other.load(states[number])
        assert other.step() == steps[number + 1]
    with_workers.load(states[6])
    assert [with_workers.step() for _ in range(3)] == steps[7:10]


def test_weights_change_with_the_next_epoch_and_are_in_the_state(runs: Any) -> None:
    run = runs()
    (dataset,) = run.datasets
    before = list(dataset)
    dataset.reweight("row < 30")
    after = list(dataset)
    assert set(times(after)) == set(range(30))
    assert set(times(before).values()) == {1}
    with pytest.raises(ConfigError, match="at_step=2 cannot be had with batches="):
        dataset.reweight("n", at_step=2)
    state = json.loads(json.dumps(dataset.state_dict()))
    (other,) = runs().datasets
    other.load_state_dict(state)
    assert seen(list(other)) == seen(list(dataset))
    with pytest.raises(ConfigError, match="weights 'n - 9': row"):
        runs(weights="n - 9")


def test_each_copy_of_a_long_row_comes_in_all_its_parts(runs: Any) -> None:
    packs = Packs("n", 8, on_long="split", pack_fn=PackTokens(pad_token_id=-1))
    found = list(runs(weights="n", batches=packs).datasets[0])
    copies = {(row, drawn) for pack in found for row, drawn in zip(pack["__rows__"], pack["drawn"], strict=True)}
    tokens = Counter(token for pack in found for token in pack["input_ids"].tolist() if token >= 0)
    assert len(copies) == NUM_ROWS
    assert tokens == Counter(token for row, _ in copies for token in tokens_of(row, LENGTHS[row]))
