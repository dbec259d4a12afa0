"""What a contender is asked to do, and what it answers with."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of one contender; goes to its process as JSON."""

    contender: str
    workload: str
    """The function of the contender."""
    measure: str
    """The function of `measures` that counts."""
    data: str
    """The directory of the data, the same for all."""
    work: str
    """A directory of this run alone: caches go there."""
    num_samples: int
    """Photos in the data."""
    num_rows: int = 0
    """Rows of the table, for what is about the index alone."""
    num_workers: int = 0
    num_threads: int = 0
    """Downloads at a time, where the contender can be told; 0: as it thinks best."""
    batch_size: int = 64
    num_warmup_batches: int = 0
    """Batches that are not counted; 0: an epoch's."""
    seconds: float = 3.0
    """How long is measured at least."""
    scheme: str = "s3"
    endpoint: str = ""
    """Of the server that has the photos, as `http://host:port`."""
    limit_bytes: int | None = None
    """Of the local copy, where the contender knows a limit."""
    seed: int = 7
    sds: str = ""
    """A checkout of sds."""
    as_users: bool = False
    """The transforms and collate functions of `users`, in place of what a library brings."""

    def to_json(self) -> str:
        """Return it as a line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Job:
        """Return what `to_json` wrote."""
        return cls(**json.loads(line))

    @property
    def has_persistent_workers(self) -> bool:
        """Whether workers outlive an epoch; where a whole epoch is counted, the start of its workers is part of it."""
        return self.num_workers > 0 and not self.measure.endswith("_epoch")

    @property
    def data_path(self) -> Path:
        """Where the data are."""
        return Path(self.data)

    @property
    def photos(self) -> Path:
        """The directory of loose photos."""
        return self.data_path / "bench" / "photos"

    @property
    def shuffled_shard(self) -> int:
        """Samples of a shard where all of a hundred shards are shuffled."""
        return self.num_samples // 100

    def shuffled_folder(self, kind: str) -> str:
        """Return the folder of a hundred shards: cases differ in their samples."""
        return f"{kind}-shuffled-{self.shuffled_shard}"

    @property
    def work_path(self) -> Path:
        """Where this run may write."""
        return Path(self.work)

    def url(self, name: str) -> str:
        """Return where the server has a file of the data."""
        return f"s3://bench/{name}" if self.scheme == "s3" else f"{self.endpoint}/bench/{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Batches of a contender; each new iteration is an epoch."""

    batches: Iterable[Any]
    payload: Callable[[Any], Sequence[Sized]]
    """From a batch to its samples' payloads, as the trainer gets them: bytes, or the rows of a tensor."""
    rows: Callable[[Any], Sequence[int]] | None = None
    """From a batch to its samples' numbers, where the contender tells them."""
    num_samples: int = 0
    """Of an epoch, where it is not all photos; 0: all."""

    @property
    def loader(self) -> Any:
        """The batches as a loader that has a state, by the methods that all libraries call alike."""
        return self.batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Random access of a contender."""

    get: Callable[[int], Sized]
    """From a sample's number to its bytes."""


def names(num_samples: int) -> list[str]:
    """Return the names of the photos."""
    return [f"{number:06}.jpg" for number in range(num_samples)]
