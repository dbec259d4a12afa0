"""Accelerate on two ranks: each row once an epoch, or an error."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.frameworks.ranks import run_ranks
from tests.stream.tables import make_table

IMPORTS = """
import json, sys
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader
from sqlstream import StreamingDataLoader, StreamingDataset
"""
SETUP = (
    IMPORTS
    + """
src, cache, kind, num_workers, start = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5] or None
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=None if kind == "plain" else False),
                          gradient_accumulation_steps=3)
dataset = StreamingDataset(src, cache, shuffle_seed=4, index_cols_to_keep=[], show_progress=False)
options = {"multiprocessing_context": start} if num_workers else {}
"""
)
TRAIN = """
loader = StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers, **options)
model, optimizer = torch.nn.Linear(1, 1), None
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
assert isinstance(loader, StreamingDataLoader)
rows, ends, metrics, syncs, states = [], [], [], [], []
for epoch in range(2):
    rows.append([])
    for batch in loader:
        with accelerator.accumulate(model):
            syncs.append(accelerator.sync_gradients)
        rows[-1] += batch["__row__"].tolist()
        ends.append(accelerator.gradient_state.end_of_dataloader)
        metrics += accelerator.gather_for_metrics(batch["__row__"]).tolist()
        states.append(loader.state_dict()["sample_in_epoch"])
print(json.dumps({"rows": rows, "ends": ends, "length": len(loader), "metrics": metrics, "syncs": syncs, "states": states,
                  "in_dataloader": accelerator.gradient_state.in_dataloader}))
"""
SHARDED = """
loader = accelerator.prepare(DataLoader(dataset, batch_size=8, num_workers=num_workers, **options))
print(json.dumps({"rows": [row for batch in loader for row in batch["__row__"].tolist()]}))
"""


@pytest.mark.parametrize(("num_workers", "start"), [(0, ""), (2, "fork"), (1, "spawn")], ids=["none", "fork", "spawn"])
def test_a_prepared_loader_gives_each_row_once_and_knows_its_end(tmp_path: Path, num_workers: int, start: str) -> None:
    src = make_table(tmp_path, 100)
    answers = run_ranks(SETUP + TRAIN, str(src), str(tmp_path / "cache"), "ours", str(num_workers), start)
    for answer in answers:
        assert not isinstance(answer, str), answer
        assert answer["length"] == 7
        assert answer["ends"] == ([False] * 6 + [True]) * 2
        assert [answer["syncs"][6], answer["syncs"][13]] == [True, True], "an epoch's last gradients are not lost"
        assert answer["states"] == [16, 32, 48, 64, 80, 96, 0] * 2
        assert not answer["in_dataloader"]
        assert Counter(answer["metrics"]) == dict.fromkeys(range(100), 2)
    for epoch in range(2):
        assert sorted(answers[0]["rows"][epoch] + answers[1]["rows"][epoch]) == list(range(100))


@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize(("num_workers", "start"), [(0, ""), (1, "fork"), (1, "spawn")], ids=["none", "fork", "spawn"])
def test_a_plain_loader_that_accelerate_shards_again_is_refused(
    tmp_path: Path, kind: str, num_workers: int, start: str
) -> None:
    answers = run_ranks(SETUP + SHARDED, str(make_table(tmp_path, 100)), str(tmp_path / "cache"), kind, str(num_workers), start)
    assert "deals out to 2 ranks what this StreamingDataset has dealt out" in str(answers[0])
    assert any("ConfigError" in str(answer) for answer in answers)


def test_one_rank_needs_no_care(tmp_path: Path) -> None:
    src = str(make_table(tmp_path, 20))
    [answer] = run_ranks(SETUP + SHARDED, src, str(tmp_path / "cache"), "sharded", "0", "", num_ranks=1)
    assert not isinstance(answer, str), answer
    assert sorted(answer["rows"]) == list(range(20))


KEPT = """
from itertools import islice
from tests.stream.mixtures import WEIGHTS, seen, streams_of
from pathlib import Path
from sqlstream import MixedDataset
folder, num_workers = Path(sys.argv[1]), int(sys.argv[2])
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))

def loader():
    mixed = MixedDataset(streams_of(folder), weights=WEIGHTS, epoch_size=60)
    start = "fork" if num_workers else None
    return accelerator.prepare(StreamingDataLoader(mixed, 6, num_workers, seen, multiprocessing_context=start))

whole = list(islice(loader(), 10))
batches = iter(first := loader())
begun = list(islice(batches, 4))
accelerator._dataloaders = [first]
accelerator.save_state(folder / "saved")
accelerator._dataloaders = [second := loader()]
accelerator.load_state(folder / "saved")
print(json.dumps({"is_right": begun + list(second) == whole}))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_saved_state_has_that_of_the_loader(tmp_path: Path, num_workers: int) -> None:
    (answer,) = run_ranks(IMPORTS + KEPT, str(tmp_path), str(num_workers), num_ranks=1)
    assert isinstance(answer, dict), answer
    assert answer["is_right"]


LEFT = """
import gc, multiprocessing
accelerator = Accelerator(cpu=True)
dataset = StreamingDataset(sys.argv[1], sys.argv[2], index_cols_to_keep=[], show_progress=False)
loader = accelerator.prepare(StreamingDataLoader(dataset, batch_size=8, num_workers=1, multiprocessing_context="fork"))
gc.disable()
for batch in loader:
    break
workers = len(multiprocessing.active_children())
print(json.dumps({"in_dataloader": accelerator.gradient_state.in_dataloader, "workers": workers}))
"""


def test_a_loop_that_is_left_early_ends_its_workers_and_is_no_longer_the_active_one(tmp_path: Path) -> None:
    """A loader of a validation that is left, say: the training loader around it says when the optimizer steps."""
    (answer,) = run_ranks(IMPORTS + LEFT, str(make_table(tmp_path, 100)), str(tmp_path / "cache"), num_ranks=1)
    assert isinstance(answer, dict), answer
    assert (answer["in_dataloader"], answer["workers"]) == (False, 0)


SKIPPED = """
from accelerate import skip_first_batches
from sqlstream import Buckets
num_workers = int(sys.argv[3])
batches = Buckets("length(\\"index\\")", global_batch_size=4)
dataset = StreamingDataset(sys.argv[1], sys.argv[2], batches=batches, shuffle_seed=4, show_progress=False)
loader = StreamingDataLoader(dataset, num_workers=num_workers, multiprocessing_context="fork" if num_workers else None)
rows = [[batch["__row__"].tolist() for batch in loader] for epoch in range(2)]
loader.set_epoch(1)
rest = [batch["__row__"].tolist() for batch in skip_first_batches(loader, 3)]
print(json.dumps({"rest": rest, "expected": rows[1][3:], "batch_size": loader.batch_size}))
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_one_bucket_are_skipped_as_a_trainer_does(tmp_path: Path, num_workers: int) -> None:
    """A Hugging Face Trainer that goes on from a checkpoint makes a plain DataLoader of what the loader says of itself."""
    (answer,) = run_ranks(
        IMPORTS + SKIPPED, str(make_table(tmp_path, 200)), str(tmp_path / "cache"), str(num_workers), num_ranks=1
    )
    assert isinstance(answer, dict), answer
    assert answer["rest"] == answer["expected"]
    assert answer["batch_size"] == 4
