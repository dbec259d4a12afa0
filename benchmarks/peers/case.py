"""What a comparison is: a case that contenders run, and the bar that sqlstream should clear in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LOOSE_PEERS = ("litdata_raw", "sds")
TENSOR_PEERS = ("plain_torch", "litdata_raw", "mosaicml", "litdata_chunks", "webdataset", "huggingface")
SHORT_RUNS = 5
"""A hundredth of a second, and its pages may have left memory since the last round: the first run is often twice the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    group: str
    """What `ONLY` selects."""
    title: str
    workload: str
    """The contenders' function."""
    measure: str
    figure: str
    """Which of the measure's figures is compared."""
    unit: str
    contenders: tuple[str, ...]
    is_higher_better: bool = True
    latency_ms: int = 0
    needs_server: bool = False
    limit_share: float | None = None
    """Of the data's bytes."""
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of the job."""
    functions: dict[str, str] = field(default_factory=dict)
    """Another function for some contenders: shards have a name of their own."""
    prepares: str = "prepare"
    """The contenders' function that makes what the case needs; empty: the photos are enough."""
    num_samples: int = 0
    """Photos of the case; 0: as many as the others have."""
    limit_seconds: float | None = None
    """For one run; None: as for most (`driver.LIMIT_SECONDS`)."""
    runs_a_round: int = 1
    """Of each contender, one after the other; the median one counts. Several where the figure is some milliseconds."""

    @property
    def reads_photos(self) -> bool:
        """Whether the case is about photos, not about rows."""
        return self.prepares in ("", "prepare", "prepare_shuffled", "prepare_zip", "prepare_mixture")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """What sqlstream should reach in a case, as a ratio to others or as a figure."""

    case: str
    text: str
    against: tuple[str, ...] = ()
    """The best of these; empty: the figure itself."""
    limit: float
    is_at_least: bool = True
    figure: str = ""
    """Another figure than the case's."""
    contender: str = "sqlstream"
    over: str = ""
    """Divide by this figure of sqlstream itself in the same case, or by the case's in the case of that name."""
