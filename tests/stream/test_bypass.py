"""A dataset whose cache breaks goes on, with `on_cache_error="bypass"`."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import CacheError
from tests.cache.kit import break_ledger
from tests.stream.sources import Photos


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private files go; for workers, too."""
    directory = tmp_path / "private"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def opened(photos: Photos, directory: Path, on_cache_error: str = "bypass") -> StreamingDataset:
    return StreamingDataset(
        photos.src,
        directory,
        columns_to_download=["image"],
        cache_limit="10mb",
        shuffle_seed=3,
        on_cache_error=on_cache_error,
        show_progress=False,
    )


def rows_read(photos: Photos, samples: list[dict[str, object]]) -> list[int]:
    return [int(str(sample["index"]).removeprefix("photo-")) for sample in samples]


def is_right(photos: Photos, sample: dict[str, object]) -> bool:
    number = int(str(sample["index"]).removeprefix("photo-"))
    return Path(str(sample["image"])).read_bytes() == photos.data(number)


def test_a_ledger_that_breaks_in_the_middle_of_an_epoch_costs_no_sample(photos: Photos, tmp_path: Path, private: Path) -> None:
    with opened(photos, tmp_path / "cache") as dataset:
        seen = []
        for number, sample in enumerate(dataset):
            assert is_right(photos, sample)
            seen.append(str(sample["index"]))
            if number == 20:
                break_ledger(dataset.cache)
        assert sorted(seen) == sorted(f"photo-{i}" for i in range(photos.num))
        assert is_right(photos, dataset[5])
        assert any(private.rglob("*.jpg"))  # of `dataset[5]`, whose path stays valid
    assert not any(private.rglob("*.jpg"))


def test_workers_read_past_a_cache_that_is_broken_from_the_start(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path / "cache") as dataset:
        break_ledger(dataset.cache)
        loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list)
        samples = [sample for batch in loader for sample in batch if is_right(photos, sample)]
        assert len(samples) == photos.num


def test_without_bypass_the_run_ends_with_the_clear_error(photos: Photos, tmp_path: Path) -> None:
    with opened(photos, tmp_path / "cache", "raise") as dataset:
        break_ledger(dataset.cache)
        with pytest.raises(CacheError, match=r"ledger\.sqlite"):
            list(dataset)


class ReadImage:
    def __call__(self, sample: dict[str, object]) -> dict[str, object]:
        sample["read"] = Path(str(sample.pop("image"))).read_bytes()
        return sample


@pytest.mark.parametrize("on_cache_error", ["raise", "bypass"])
def test_files_that_another_program_removes_before_their_samples_are_made_cost_no_sample(
    on_cache_error: str, photos: Photos, tmp_path: Path
) -> None:
    """Of the window ahead; `on_error="raise"` shows that none of them has failed."""
    directory = tmp_path / "cache"
    with StreamingDataset(
        photos.src,
        directory,
        columns_to_download=["image"],
        transforms=[ReadImage()],
        cache_limit="10mb",
        on_cache_error=on_cache_error,
        on_error="raise",
        show_progress=False,
    ) as dataset:
        for _ in range(2):  # the first epoch fetches all, the second holds files for reading alone
            seen = {}
            for number, sample in enumerate(dataset):
                seen[sample["index"]] = sample["read"]
                if number % 8 == 4:
                    for path in (directory / "data").glob("*/*"):
                        path.unlink(missing_ok=True)
            assert seen == {f"photo-{number}": photos.data(number) for number in range(photos.num)}


def test_files_that_another_program_removes_before_rows_are_asked_for_by_number_cost_none_of_them(
    photos: Photos, tmp_path: Path
) -> None:
    directory, is_removing = tmp_path / "cache", False

    def read_image(sample: dict[str, object]) -> dict[str, object]:
        nonlocal is_removing
        for path in (directory / "data").glob("*/*") if is_removing else ():
            path.unlink()
        is_removing = False
        sample["read"] = Path(str(sample.pop("image"))).read_bytes()
        return sample

    with StreamingDataset(
        photos.src, directory, columns_to_download=["image"], transforms=[read_image], show_progress=False
    ) as dataset:
        for rows in ([3], [4, 5, 6]):
            is_removing = True
            assert [sample["read"] for sample in dataset[rows]] == [photos.data(row) for row in rows]
        is_removing = True
        assert dataset[7]["read"] == photos.data(7)
