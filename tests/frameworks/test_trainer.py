"""A Hugging Face Trainer with the loader of docs/frameworks.md: a stopped run goes on with the batches of a whole one."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.frameworks.ranks import run_ranks
from tests.processes import ROOT
from tests.stream.tables import make_table

pytest.importorskip("transformers")
_EXAMPLE = re.findall(
    r"^```python transformers\n(.*?)^dataset = ", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL | re.MULTILINE
)[0]
TRAIN = (
    _EXAMPLE
    + """
import json, sys
src, folder, num_workers, stop, state = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5] or None
rows = []

class Noting(Model):
    def forward(self, score):
        rows.append(score.tolist())
        return super().forward(score)

class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **others):
        control.should_training_stop = control.should_training_stop or state.global_step == stop

def collate(samples):
    return {"score": torch.tensor([sample["__row__"] for sample in samples])}

dataset = StreamingDataset(src, folder + "/cache", shuffle_seed=4, index_cols_to_keep=[], show_progress=False)
options = TrainingArguments(folder + "/saved", per_device_train_batch_size=4, num_train_epochs=3,
                            dataloader_num_workers=num_workers, save_strategy="steps",
                            save_steps=stop, use_cpu=True, report_to=[], disable_tqdm=True,
                            logging_strategy="no", learning_rate=0.0)
trainer = StreamingTrainer(Noting(), options, train_dataset=dataset, data_collator=collate, callbacks=[SayEpoch(), Stop()])
trainer.train(resume_from_checkpoint=state)
print(json.dumps({"rows": rows}))
"""
)


@pytest.mark.parametrize(("num_ranks", "stop"), [(1, 17), (2, 10)])
def test_a_trainer_goes_on_from_a_checkpoint_in_the_middle_of_an_epoch(num_ranks: int, stop: int, tmp_path: Path) -> None:
    src = str(make_table(tmp_path, 52))

    def batches(folder: str, stop: int, state: str = "") -> list[list[int]]:
        answers: list[Any] = run_ranks(TRAIN, src, str(tmp_path / folder), "2", str(stop), state, num_ranks=num_ranks)
        for answer in answers:
            assert not isinstance(answer, str), answer
            assert "plain DataLoader" not in answer["stderr"], "what skips batches is made of a StreamingDataLoader"
        return [sorted(chain.from_iterable(parts)) for parts in zip(*(answer["rows"] for answer in answers), strict=True)]

    whole = batches("whole", 1000)
    assert {row for batch in whole[: len(whole) // 3] for row in batch} == set(range(52))
    assert batches("parts", stop) == whole[:stop]
    assert batches("parts", 1000, str(tmp_path / f"parts/saved/checkpoint-{stop}")) == whole[stop:]
