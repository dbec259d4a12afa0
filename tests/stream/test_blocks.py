"""`shuffle_block_size`: rows of a block stay near each other, and all that holds for a whole shuffle holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, StateError
from tests.stream.tables import Job, make_table, rows_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
NUM_ROWS = 48


def open_dataset(tmp_path: Path, **options: Any) -> StreamingDataset:
    options = {"shuffle_seed": 5, "show_progress": False} | options
    return StreamingDataset(make_table(tmp_path, NUM_ROWS), tmp_path / "cache", **options)


def test_blocks_come_together_in_an_order_of_their_own_each_epoch(tmp_path: Path) -> None:
    with open_dataset(tmp_path, shuffle_block_size=6, shuffle_window=2) as dataset:
        epochs = [[sample["__row__"] for sample in dataset] for _ in range(2)]
    for rows in epochs:
        assert sorted(rows) == list(range(NUM_ROWS))
        assert rows != sorted(rows)
        windows = [{row // 6 for row in rows[start : start + 12]} for start in range(0, NUM_ROWS, 12)]
        assert [len(blocks) for blocks in windows] == [2] * 4
    assert epochs[0] != epochs[1]


def test_global_batches_and_resumption_are_those_of_any_layout(tmp_path: Path) -> None:
    options = {"shuffle_block_size": 6, "shuffle_window": 3}
    jobs = [
        Job(make_table(tmp_path, NUM_ROWS), tmp_path / "cache", *layout, 8, dataset_options=options)
        for layout in ((1, 0), (2, 2), (4, 0))
    ]
    reference, states = [], [jobs[0].state()]
    for rows in jobs[0].steps(8):
        reference.append(rows)
        states.append(jobs[0].state())
    for job, stop in zip(jobs[1:], (0, 5), strict=True):
        job.load(states[stop])
        assert list(job.steps(8 - stop)) == reference[stop:]
    for job in jobs:
        job.close()


def test_another_block_size_is_another_order_and_refused_by_a_state(tmp_path: Path) -> None:
    loaders = [
        StreamingDataLoader(open_dataset(tmp_path, shuffle_block_size=size), batch_size=8, collate_fn=rows_of)
        for size in (6, 8)
    ]
    with pytest.raises(StateError, match=r"blocks='8 blocks .*, window 64', this dataset '6 blocks"):
        loaders[1].load_state_dict(loaders[0].state_dict())
    for loader in loaders:
        loader.dataset.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shuffle_block_size": 0}, "shuffle_block_size=0"),
        ({"shuffle_block_size": 4, "shuffle_window": 0}, "shuffle_window=0"),
        ({"shuffle_block_size": 4, "shuffle_seed": None}, "give shuffle_seed"),
        ({"shuffle_block_size": 4, "lazy_index_chunk_size": 100}, "chunks of a lazy index are its blocks"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_dataset(tmp_path, **options)
