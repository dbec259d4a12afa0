"""Shards and pipelines for tests of the drop-in of WebDataset."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import sqlstream.compat.webdataset as wds
from tests.goldens import FIXTURES, as_json
from tests.stream.shards import tar_of

GOLDEN = str(FIXTURES / "wds/shard-{000000..000002}.tar")
NUM_SHARDS, NUM_SAMPLES = 4, 8
NUM_ROWS = NUM_SHARDS * NUM_SAMPLES
KEYS = [f"{number:03}" for number in range(NUM_ROWS)]


def numbered(folder: Path, num_shards: int = NUM_SHARDS) -> str:
    """Shards of samples with their number as class, and what names them."""
    folder.mkdir(exist_ok=True)
    for shard in range(num_shards):
        made = [(KEYS[number], {"cls": b"%d" % number}) for number in range(shard * NUM_SAMPLES, (shard + 1) * NUM_SAMPLES)]
        path = folder / f"s-{shard}.tar"
        if not path.exists():  # one that is written again is another one
            path.write_bytes(tar_of(made))
    return f"{folder}/s-{{0..{num_shards - 1}}}.tar"


def opened(urls: Any, tmp_path: Path, **options: Any) -> wds.WebDataset:
    given: dict[str, Any] = {"shardshuffle": False, "cache_dir": str(tmp_path / "cache")}
    return wds.WebDataset(urls, **(given | options))


def classes(folder: Path, tmp_path: Path, **options: Any) -> wds.WebDataset:
    """Numbers of samples."""
    return opened(numbered(folder), tmp_path, **options).decode().map(number_of)


def number_of(sample: dict[str, Any]) -> int:
    return int(sample["cls"])


def comparable(samples: Iterable[Any]) -> list[Any]:
    """Samples as the goldens have them, without places."""
    return [as_json(_placeless(sample)) for sample in samples]


def _placeless(sample: Any) -> Any:
    return {k: v for k, v in sample.items() if k not in ("__url__", "__local_path__")} if isinstance(sample, dict) else sample


def load_tensors(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=False)


UNPICKLE = (wds.handle_extension("pkl pickle pyd", pickle.loads), wds.handle_extension("pth", load_tensors))
"""Decoders of what is refused unless a decoder of the user reads it."""
