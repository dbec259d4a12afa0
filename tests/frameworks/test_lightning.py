"""Lightning: a checkpoint in the middle of a run goes on with the step that follows, also where a loader has no length."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

lightning = pytest.importorskip("lightning")

import torch  # noqa: E402 - behind the look for Lightning

from sqlstream import (  # noqa: E402
    Buckets,
    MixedDataset,
    MultiStreamDataLoader,
    StreamingDataLoader,
    StreamingDataset,
    StreamOptions,
)
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


def multi_loader(folder: Path, num_workers: int, epoch_size: int | None = None) -> MultiStreamDataLoader:
    options: dict[str, Any] = {"columns_to_download": [], "show_progress": False}
    datasets = [StreamingDataset(make_table(folder, num), folder / "cache", shuffle_seed=num, **options) for num in (50, 17)]
    streams = [
        StreamOptions(name="web", ratio=0.6, mixing_group_id=0, batch_gpu=2, num_accum_rounds=2),
        StreamOptions(name="code", ratio=0.4, mixing_group_id=1, batch_gpu=4),
    ]
    return MultiStreamDataLoader(datasets, streams, num_workers=num_workers, collate_fn=rows_of, epoch_size=epoch_size)


def test_the_workers_of_streams_end_with_the_training(tmp_path: Path) -> None:
    """A forked worker has Lightning's handler of SIGTERM, so a program that ends would wait for one that is left."""
    loader = multi_loader(tmp_path, 2)
    assert fitted(tmp_path, loader)
    assert not multiprocessing.active_children()
    assert (next(iter(loader)).step or 0) > 0, "other workers go on"
    loader.close()


def trainer_of(saving: Any, **options: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[saving], enable_progress_bar=False,
        enable_model_summary=False, **options,
    )  # fmt: skip


def fitted(folder: Path, loader: Any, start: Path | None = None) -> list[Any]:
    """What the steps of a training were given; each of them leaves a checkpoint."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = trainer_of(saving, max_steps=STEPS)
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


def fitted_epochs(folder: Path, loader: Any, start: Path | None = None, **length: int) -> tuple[list[Any], Any]:
    """What the steps of a training by epochs were given, and its trainer; each epoch leaves a checkpoint."""
    saving = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = trainer_of(saving, **(length or {"max_epochs": 3}))
    model = Model()
    trainer.fit(model, loader, ckpt_path=start)
    return [batch["rows"] for batch in model.seen], trainer


def table_of(folder: Path, num_rows: int = 50, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        make_table(folder, num_rows), folder / "cache", columns_to_download=[], show_progress=False, **options
    )


def loader_of(dataset: StreamingDataset, num_workers: int = 0, **options: Any) -> StreamingDataLoader:
    start = "fork" if num_workers else None
    return StreamingDataLoader(dataset, 8, num_workers, rows_of, multiprocessing_context=start, **options)


def plain_loader(folder: Path, num_workers: int) -> StreamingDataLoader:
    return loader_of(table_of(folder), num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "mixed", "multi"])
def test_a_checkpoint_of_the_end_of_an_epoch_goes_on_with_the_next_one(tmp_path: Path, kind: str, num_workers: int) -> None:
    """Lightning hands no state over there."""

    def loader(num_workers: int) -> StreamingDataLoader | MultiStreamDataLoader:
        if kind == "multi":
            return multi_loader(tmp_path, num_workers, epoch_size=5)
        return (
            plain_loader(tmp_path, num_workers) if kind == "plain" else mixed_loader(tmp_path, num_workers, **ENDS["a length"])
        )

    whole, _ = fitted_epochs(tmp_path, loader(0))
    assert len(whole) % 3 == 0
    for epoch in range(2):
        rest, _ = fitted_epochs(tmp_path / "rest", loader(num_workers), tmp_path / f"epoch={epoch}.ckpt")
        assert rest == whole[(epoch + 1) * len(whole) // 3 :]


def test_a_checkpoint_behind_the_last_step_goes_on_with_the_epoch_under_way(tmp_path: Path) -> None:
    """Lightning has counted that epoch, so it ends one earlier, but no sample comes again."""
    whole, _ = fitted_epochs(tmp_path, plain_loader(tmp_path, 0))
    taken, trainer = fitted_epochs(tmp_path / "some", plain_loader(tmp_path, 0), max_steps=9)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    rest, _ = fitted_epochs(tmp_path / "rest", plain_loader(tmp_path, 0), tmp_path / "last.ckpt")
    assert taken == whole[:9]
    assert rest == whole[9:14]


class Phases(Model):
    """A model that may be validated, and asks for its loader.

    Args:
        make: Returns what is trained with.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__()
        self.train_dataloader = make

    def validation_step(self, batch: Any, number: int) -> None:
        pass


def taken(make: Callable[[], Any], saving: Any, start: Path | None = None, **options: Any) -> list[Any]:
    """What the steps of three epochs were given."""
    validation = options.pop("validation", None)
    model = Phases(make)
    trainer_of(saving, **{"max_epochs": 3} | options).fit(model, val_dataloaders=validation, ckpt_path=start)
    return model.seen


def saving_steps(folder: Path) -> Any:
    return lightning.pytorch.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1, save_on_train_epoch_end=False
    )


def saving_epochs(folder: Path) -> Any:
    """Checkpoints of the end of epochs, or where there is a validation, of its end."""
    return lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1)


SAVING = pytest.mark.parametrize("saving", [saving_steps, saving_epochs], ids=["by steps", "by epochs"])


@SAVING
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("options", [{}, {"infinite_iteration": True}], ids=["epochs", "endless"])
def test_epochs_that_lightning_cuts_short_go_on_with_the_next_one(
    tmp_path: Path, saving: Any, num_workers: int, options: dict[str, Any]
) -> None:
    """`limit_train_batches` ends an epoch in which the loader has more."""

    def make() -> StreamingDataLoader:
        return loader_of(table_of(tmp_path, shuffle_seed=1, **options), num_workers)

    whole = taken(make, saving(tmp_path), limit_train_batches=5)
    assert [batch["rows"][0][1] for batch in whole] == [0] * 5 + [1] * 5 + [2] * 5
    for num_taken in (5, 10):
        start = tmp_path / f"step={num_taken}.ckpt"
        assert taken(make, saving(tmp_path / "rest"), start, limit_train_batches=5) == whole[num_taken:]


@SAVING
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_loaders_of_other_lengths_go_on_together(tmp_path: Path, saving: Any, mode: str) -> None:
    """An epoch of Lightning ends with one of them; the other one is within its own, begins again, or is over."""

    def make() -> Any:
        loaders = {name: loader_of(table_of(tmp_path, num, shuffle_seed=1)) for name, num in (("long", 50), ("short", 17))}
        return lightning.pytorch.utilities.CombinedLoader(loaders, mode)

    whole = taken(make, saving(tmp_path))
    length = len(whole) // 3
    for num_taken in (2, 3, 5, length, length + 1, 2 * length) if saving is saving_steps else (length, 2 * length):
        assert taken(make, saving(tmp_path / "rest"), tmp_path / f"step={num_taken}.ckpt") == whole[num_taken:]


@SAVING
@pytest.mark.parametrize(("mode", "num_rows"), [("min_size", 17), ("max_size", 17), ("max_size", 80)])
def test_streams_with_batches_of_their_own_go_on_beside_a_loader(tmp_path: Path, saving: Any, mode: str, num_rows: int) -> None:
    """They go on where an epoch of Lightning ends within theirs, and the next one is as long as what is left of it."""

    def make() -> Any:
        loaders = [multi_loader(tmp_path, 0, epoch_size=5), loader_of(table_of(tmp_path, num_rows, shuffle_seed=1))]
        return lightning.pytorch.utilities.CombinedLoader(loaders, mode)

    whole = taken(make, saving(tmp_path))
    checkpoints = list(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == (len(whole) if saving is saving_steps else 3)
    for start in checkpoints:
        assert taken(make, saving(tmp_path / "rest"), start) == whole[int(start.stem.removeprefix("step=")) :]


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_checkpoint_of_a_validation_at_the_end_of_an_epoch_goes_on_with_the_next_one(
    tmp_path: Path, *, is_persistent: bool
) -> None:
    """Lightning begins an iteration, has nothing to do in that epoch, and begins another."""

    def make() -> StreamingDataLoader:
        return loader_of(table_of(tmp_path, 48, shuffle_seed=1), 2, persistent_workers=is_persistent)

    def whole_or_rest(folder: Path, start: Path | None = None) -> list[Any]:
        validation = loader_of(table_of(tmp_path, 17))
        return taken(make, saving_epochs(folder), start, validation=validation, val_check_interval=0.5)

    whole = whole_or_rest(tmp_path)
    assert len(whole) == 18
    for num_taken in (3, 6, 12):
        rest = whole_or_rest(tmp_path / "rest", tmp_path / f"step={num_taken}.ckpt")
        assert rest == whole[num_taken:]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["loader", "new loader", "new dataset"])
def test_a_loader_that_is_asked_for_in_each_epoch_gives_all_epochs(tmp_path: Path, kind: str, num_workers: int) -> None:
    """Lightning iterates what it has reloaded twice, before the first batch; a new dataset knows of no epoch."""
    dataset = table_of(tmp_path, shuffle_seed=1)
    loader = loader_of(dataset, num_workers)

    def make() -> StreamingDataLoader:
        if kind == "loader":
            return loader
        return loader_of(dataset if kind == "new loader" else table_of(tmp_path, shuffle_seed=1), num_workers)

    whole = taken(lambda: plain_loader_of_seed(tmp_path), saving_epochs(tmp_path))
    assert taken(make, saving_epochs(tmp_path / "reloaded"), reload_dataloaders_every_n_epochs=1) == whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["new loader", "new dataset"])
def test_a_checkpoint_of_the_last_step_goes_on_with_a_loader_that_is_asked_for_again(
    tmp_path: Path, kind: str, num_workers: int
) -> None:
    """Lightning loads the state into one loader, and takes the batches of the next one."""

    def run(folder: Path, start: Path | None = None) -> list[Any]:
        dataset = table_of(tmp_path, shuffle_seed=1)

        def make() -> StreamingDataLoader:
            return loader_of(dataset if kind == "new loader" else table_of(tmp_path, shuffle_seed=1), num_workers)

        return taken(make, saving_steps(folder), start, reload_dataloaders_every_n_epochs=1)

    whole = run(tmp_path)
    for num_taken in (6, 7, 8, 14):
        assert run(tmp_path / "rest", tmp_path / f"step={num_taken}.ckpt") == whole[num_taken:]


def plain_loader_of_seed(folder: Path) -> StreamingDataLoader:
    return loader_of(table_of(folder, shuffle_seed=1))


@pytest.mark.parametrize("is_persistent", [False, True])
def test_a_second_training_takes_the_epoch_behind_the_first(tmp_path: Path, *, is_persistent: bool) -> None:
    whole = taken(lambda: plain_loader_of_seed(tmp_path), saving_epochs(tmp_path))
    loader = loader_of(table_of(tmp_path, shuffle_seed=1), 2, persistent_workers=is_persistent)
    model, trainer = Phases(lambda: loader), trainer_of(saving_epochs(tmp_path / "parts"), max_epochs=1)
    for max_epochs in (1, 3):
        trainer.fit_loop.max_epochs = max_epochs
        trainer.fit(model)
    assert model.seen == whole


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", ["plain", "mixed"])
def test_a_prediction_is_of_each_row(tmp_path: Path, kind: str, num_workers: int) -> None:
    """Lightning makes the loader anew, to know which rows are in a batch."""

    class Predicting(Model):
        def predict_step(self, batch: Any) -> Any:
            return batch["rows"]

        def test_step(self, batch: Any, number: int) -> None:
            self.seen.append(batch["rows"])

    def make() -> StreamingDataLoader:
        return plain_loader(tmp_path, num_workers) if kind == "plain" else mixed_loader(tmp_path, num_workers, epoch_size=60)

    model, trainer = Predicting(), trainer_of(saving_epochs(tmp_path))
    expected = [batch["rows"] for batch in make()]
    assert trainer.predict(model, make()) == expected
    trainer.test(model, make(), verbose=False)
    assert model.seen == expected
    model.predict_dataloader = make
    assert trainer.predict(model) == expected, "Lightning keeps the arguments of a loader that is made in a hook"


@SAVING
@pytest.mark.parametrize("is_alone", [True, False])
def test_streams_with_batches_of_their_own_give_all_their_epochs(tmp_path: Path, saving: Any, *, is_alone: bool) -> None:
    """Lightning counts batches up to the length of an epoch, and never asks whether one follows."""

    def make() -> Any:
        loader = multi_loader(tmp_path, 0, epoch_size=5)
        return loader if is_alone else [loader, loader_of(table_of(tmp_path, 17, shuffle_seed=1))]

    whole = taken(make, saving(tmp_path))
    expected = [batch["rows"] for batch in islice(multi_loader(tmp_path, 0), 24)]
    assert [(batch if is_alone else batch[0])["rows"] for batch in whole] == expected
    for num_taken in (3, 8, 12, 16) if saving is saving_steps else (8, 16):
        start = tmp_path / f"step={num_taken}.ckpt"
        assert taken(make, saving(tmp_path / "rest"), start) == whole[num_taken:]


@SAVING
def test_epochs_of_different_lengths_come_whole(tmp_path: Path, saving: Any) -> None:
    """Lightning asks for the length of one epoch, and would end all of them there."""

    def make() -> StreamingDataLoader:
        batches = Buckets('length("index")', global_batch_size=4)  # of 10 and 40 rows: 12 or 13 batches an epoch
        return StreamingDataLoader(table_of(tmp_path, shuffle_seed=1, batches=batches), collate_fn=rows_of)

    loader = make()
    epochs = [[batch["rows"] for batch in loader] for _ in range(3)]
    assert len({len(epoch) for epoch in epochs}) == 2
    whole = taken(make, saving(tmp_path), validation=make())
    assert [batch["rows"] for batch in whole] == [rows for epoch in epochs for rows in epoch]
    ends = [len(epochs[0]), len(epochs[0]) + len(epochs[1])]
    for num_taken in (2, ends[0] - 1, *ends, ends[1] + 1) if saving is saving_steps else ends:
        assert taken(make, saving(tmp_path / "rest"), tmp_path / f"step={num_taken}.ckpt") == whole[num_taken:]
