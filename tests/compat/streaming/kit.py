"""Shards for tests of the drop-in of MosaicML Streaming, and datasets whose classes make items."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from sqlstream.compat.streaming import StreamingDataset
from sqlstream.testing.servers import FaultyHttpServer
from tests.goldens import FIXTURES, as_json, expected

MDS = FIXTURES / "mds"


def copied(name: str, directory: Path) -> Path:
    """A copy of golden shards, beside which a cache may lie."""
    return Path(shutil.copytree(MDS / name, directory / name))


def golden(name: str) -> Any:
    """Their samples, as MosaicML Streaming reads them, as JSON."""
    return expected(f"mds/{name}.expected.json")["samples"]


def keys(samples: Any) -> list[str]:
    """Samples as texts that can be compared and sorted."""
    return [json.dumps(as_json(sample), sort_keys=True) for sample in samples]


def served(server: FaultyHttpServer, name: str) -> str:
    """The URL of golden shards on a server."""
    files = [path for path in (MDS / name).rglob("*") if path.is_file()]
    server.objects |= {f"/{name}/{path.relative_to(MDS / name)}": path.read_bytes() for path in files}
    return f"{server.url}/{name}"


class Pairs(StreamingDataset):
    """Overrides `__getitem__`: a number of the sample, what `transform` makes of its text, and a random number."""

    def __init__(self, transform: Callable[[str], Any] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.transform = transform

    def __getitem__(self, at: Any) -> Any:
        sample = super().__getitem__(at)
        text = sample["str"]
        return at, text if self.transform is None else self.transform(text), int(np.random.randint(1 << 30))


class Sums(StreamingDataset):
    """Overrides `get_item`, and reads another sample for each: as mixes of pictures do."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        other = super().get_item((sample_id + 1) % self.size)
        return int(super().get_item(sample_id)["u8"]) + int(other["u8"])
