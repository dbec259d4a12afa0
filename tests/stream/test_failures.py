"""How many samples may fail, and who hears of it."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import StorageError, TooManyFailuresError, TransformError
from tests.stream.tables import make_table


def failing_on(rows: set[int]) -> Any:
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] in rows:
            raise ValueError(f"row {sample['__row__']} is bad")
        return {"row": sample["__row__"]}

    return transform


def open_rows(folder: Path, num: int, failing: set[int], **options: Any) -> StreamingDataset:
    return StreamingDataset(
        make_table(folder, num), folder / "cache", transforms=[failing_on(failing)], show_progress=False, **options
    )


def test_more_than_three_failures_and_more_than_their_share_stop_a_run_of_few_samples(tmp_path: Path) -> None:
    with (
        open_rows(tmp_path, 26, {2, 5, 9, 20}) as dataset,
        pytest.raises(TooManyFailuresError, match=r"4 of 21 samples.*row 2: .*row 5: .*row 9: .*sqlstream cache failures"),
    ):
        list(dataset)


def test_few_failures_that_are_too_large_a_share_are_an_error_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    with open_rows(tmp_path, 8, {2, 5}) as dataset:
        samples = iter(dataset)
        assert len([next(samples) for _ in range(8)]) == 8
        with pytest.raises(TooManyFailuresError, match="2 of 8 samples"):
            next(samples)


@pytest.mark.parametrize(
    ("num", "ratio", "is_stopped"), [(8, 0.1, False), (8, 0.0, True)], ids=["one-in-eight", "none-may-fail"]
)
def test_a_single_failure_stops_only_who_allows_none(tmp_path: Path, num: int, ratio: float, is_stopped: bool) -> None:
    with (
        open_rows(tmp_path, num, {2}, max_failure_ratio=ratio) as dataset,
        pytest.raises(TooManyFailuresError) if is_stopped else contextlib.nullcontext(),
    ):
        assert len(list(dataset)) == num


def test_an_epoch_with_failures_says_so_once_at_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_rows(tmp_path, 40, {2, 9}, infinite_iteration=True) as dataset:
        samples = iter(dataset)
        for _ in range(82):
            next(samples)
        lines = [message for message in caplog.messages if "samples of" in message]
        assert len(lines) == 2
        assert all(f"2 of 40 samples of {dataset.name} failed and were replaced" in line for line in lines)
        assert f"sqlstream cache failures {tmp_path / 'cache'}" in lines[0]


def test_a_sample_without_a_replacement_that_works_names_the_first_failures(tmp_path: Path) -> None:
    with (
        open_rows(tmp_path, 40, set(range(1, 40)), max_failure_ratio=1.0) as dataset,
        pytest.raises(TooManyFailuresError, match=r"none could stand in for position 1 of epoch 0.*row 1: "),
    ):
        list(dataset)


def test_a_row_whose_path_the_disk_refuses_fails_alone(tmp_path: Path) -> None:
    """A caption in a column of paths, for instance: no file has so long a name."""
    (tmp_path / "t.csv").write_text(f"file\n{'a caption ' * 30}\nt.csv\n")
    with StreamingDataset(
        f"{tmp_path}/t.csv", tmp_path / "cache", columns_to_download=["file"], on_error="skip", show_progress=False
    ) as dataset:
        with pytest.raises(StorageError, match=r"a caption a .* cannot be read \(File name too long\): check the path in the"):
            dataset[0]
        assert [sample["__row__"] for sample in dataset] == [1]


def test_a_source_whose_name_is_too_long_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"the source .*x\.csv cannot be read .*File name too long"):
        StreamingDataset(f"{tmp_path}/{'x' * 300}.csv", tmp_path / "cache")


class _NoText(ValueError):
    """One of a library whose text cannot be made: a field of it was lost on the way."""

    def __str__(self) -> str:
        raise AttributeError("args")

    __repr__ = __str__


class _OddText(ValueError):
    """One that names a file whose name is no UTF-8."""

    def __str__(self) -> str:
        return "caf\udce9.jpg"


@pytest.mark.parametrize(("kind", "text"), [(_NoText, "its text cannot be made"), (_OddText, r"caf\udce9.jpg")])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_whose_text_is_odd_fails_its_sample_alone(
    kind: type[ValueError], text: str, num_workers: int, tmp_path: Path
) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 3:
            raise kind
        return {"row": sample["__row__"]}

    options: dict[str, Any] = {"transforms": [fail], "show_progress": False, "shuffle_seed": -1}
    with StreamingDataset(
        make_table(tmp_path, 9), tmp_path / "cache", on_error="skip", max_failure_ratio=1.0, **options
    ) as some:
        loader = StreamingDataLoader(some, batch_size=4, num_workers=num_workers)
        assert sorted(row for batch in loader for row in batch["row"].tolist()) == [0, 1, 2, 4, 5, 6, 7, 8]
        (failure,) = some.cache.failures()
        assert failure.error.endswith(f"{kind.__name__}: {text}")
    with (
        StreamingDataset(make_table(tmp_path, 9), tmp_path / "cache", on_error="raise", **options) as some,
        pytest.raises(TransformError, match=f"transform fail failed on sample .*{kind.__name__}: "),
    ):
        list(StreamingDataLoader(some, batch_size=4, num_workers=num_workers))
