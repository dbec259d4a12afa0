"""Lightning: a checkpoint in the middle of a run goes on with the step that follows, also where a loader has no length."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402 - behind the look for Lightning

from sqlstream import MixedDataset, MultiStreamDataLoader, StreamingDataLoader, StreamingDataset, StreamOptions  # noqa: E402
from tests.stream.mixtures import EPOCH_SIZE, WEIGHTS, streams_of  # noqa: E402
from tests.stream.tables import make_table  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning has advice on workers, loggers and lengths
]
STEPS = 12
ENDS: dict[str, dict[str, Any]] = {
    "a length": {"epoch_size": EPOCH_SIZE},
    "no end": {"stop": "never"},
    "endless": {"infinite_iteration": True, "epoch_size": EPOCH_SIZE},
}


class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]  # it has no types here
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)  # one weight, [1, 1]
        self.seen: list[Any] = []

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        self.seen.append(batch)
        loss: torch.Tensor = self.layer(torch.ones(1, 1)).mean()  # []
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows_of(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """A collate function, whose values Lightning leaves as they are."""
    return {"rows": [(sample.get("__stream__"), sample["__epoch__"], sample["__row__"]) for sample in samples]}


def mixed_loader(folder: Path, num_workers: int, **options: Any) -> StreamingDataLoader:
    mixed = MixedDataset(streams_of(folder), weights=WEIGHTS, **options)
    start = "fork" if num_workers else None
    return StreamingDataLoader(mixed, 12, num_workers, rows_of, multiprocessing_context=start)


def multi_loader(folder: Path, num_workers: int) -> MultiStreamDataLoader:
    options: dict[str, Any] = {"columns_to_download": [], "show_progress": False}
    datasets = [StreamingDataset(make_table(folder, num), folder / "cache", shuffle_seed=num, **options) for num in (50, 17)]
    streams = [
        StreamOptions(name="web", ratio=0.6, mixing_group_id=0, batch_gpu=2, num_accum_rounds=2),
        StreamOptions(name="code", ratio=0.4, mixing_group_id=1, batch_gpu=4),
    ]
    return MultiStreamDataLoader(datasets, streams, num_workers=num_workers, collate_fn=rows_of)


def test_the_workers_of_streams_end_with_the_training(tmp_path: Path) -> None:
    """A forked worker has Lightning's handler of SIGTERM, so a program that ends would wait for one that is left."""
    loader = multi_loader(tmp_path, 2)
    assert fitted(tmp_path, loader)
    assert not multiprocessing.active_children()
    assert (next(iter(loader)).step or 0) > 0, "other workers go on"
    loader.close()


def fitted(folder: Path, loader: Any, start: Path | None = None) -> list[Any]:
    """What the steps of a training were given; each of them leaves a checkpoint."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, max_steps=STEPS, callbacks=[saving], enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    model = Model()
    trainer.fit(model, loader, ckpt_path=start)
    return [batch["rows"] for batch in model.seen]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("end", ENDS)
def test_a_mixture_goes_on_from_a_checkpoint(tmp_path: Path, end: str, num_workers: int) -> None:
    whole = fitted(tmp_path, mixed_loader(tmp_path, 0, **ENDS[end]))
    for num_taken in (1, 5, 7):
        rest = fitted(tmp_path / "rest", mixed_loader(tmp_path, num_workers, **ENDS[end]), tmp_path / f"step={num_taken}.ckpt")
        assert rest == whole[num_taken:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_streams_with_batches_of_their_own_go_on_from_a_checkpoint(tmp_path: Path, num_workers: int) -> None:
    whole = fitted(tmp_path, multi_loader(tmp_path, 0))
    for num_taken in (1, 5, 7):
        assert (
            fitted(tmp_path / "rest", multi_loader(tmp_path, num_workers), tmp_path / f"step={num_taken}.ckpt")
            == whole[num_taken:]
        )
