"""What a dataset takes for a row's number and for a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError
from sqlstream.stream.maps import EpochBatches
from tests.stream.tables import make_table


def test_a_row_is_asked_for_by_a_whole_number_of_any_kind(tmp_path: Path) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False) as dataset:
        number: Any
        for number in (True, np.int64(1), np.uint8(1), np.array(1), torch.tensor(1), -7):
            assert dataset[number]["__row__"] == 1
        wrong: Any
        for wrong in (1.5, 1.0, np.float64(1), torch.tensor(1.0), "1", None, slice(0, 3), [1, 2], (1,)):
            with pytest.raises(TypeError, match=r"dataset\[.*a row is a whole number"):
                dataset[wrong]


@pytest.mark.parametrize("seed", [1.5, "42", True, [1]], ids=str)
def test_a_seed_that_is_no_number_is_named(tmp_path: Path, seed: Any) -> None:
    with pytest.raises(ConfigError, match=r"shuffle_seed=.* is no whole number"):
        StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", shuffle_seed=seed)


@pytest.mark.parametrize("wrong", [1.5, "2", None, [1]], ids=str)
def test_a_count_that_is_no_whole_number_is_named(tmp_path: Path, wrong: Any) -> None:
    with StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False) as dataset:
        with pytest.raises(ConfigError, match=r"epoch=.* is no whole number"):
            dataset.set_epoch(wrong)
        with pytest.raises(ConfigError, match=r"sample_in_epoch=.* is no whole number"):
            dataset.set_progress(0, wrong)
        with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
            dataset.num_steps(wrong)
        with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
            EpochBatches(dataset, wrong)
        if wrong is not None:
            with pytest.raises(ConfigError, match=r"batch_size=.* is no whole number"):
                StreamingDataLoader(dataset, batch_size=wrong)
            with pytest.raises(ConfigError, match=r"epoch_size=.* is no whole number"):
                StreamingDataset(make_table(tmp_path, 8), tmp_path / "cache", show_progress=False, epoch_size=wrong)
        dataset.set_epoch(np.int64(3))  # type: ignore[arg-type]  # as numbers come out of numpy
        assert dataset.epoch == 3
