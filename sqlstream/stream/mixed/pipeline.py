"""What every process of a mixture needs to make samples: the pipelines of its streams, each used when it is drawn first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from sqlstream.cache import Cache
from sqlstream.config import DEFAULT_RETAINED, SampleOptions
from sqlstream.stream.engine.engine import Engine
from sqlstream.stream.engine.slots import Recipe
from sqlstream.stream.engines import Engines
from sqlstream.stream.pipeline import Pipeline
from sqlstream.stream.run.order_options import TORCH_PREFETCH_FACTOR, BatchOptions
from sqlstream.stream.transport.handover import Handover
from sqlstream.transforms.stream_name import NameStream


@dataclass(kw_only=True)
class MixedPipeline:
    """The pipelines of all streams, and the engines that a process has made of them."""

    names: Sequence[str]
    pipelines: Sequence[Pipeline]
    options: SampleOptions
    """The window of all streams together."""
    batch_size: int | None
    """Samples of a rank's batch, as far as the dataset was told."""
    names_streams: bool = True
    """Samples name their stream."""
    engines: Engines = field(init=False, compare=False)
    _caches: list[Cache] = field(init=False, compare=False)
    """The cache that serves each stream: those with one directory and the same settings have one."""

    def __post_init__(self) -> None:
        """Make no engine yet."""
        together: list[Cache] = []
        self._caches = []
        for pipeline in self.pipelines:
            same = next((cache for cache in together if cache.serves(pipeline.cache)), None)
            if same is None:
                together.append(same := pipeline.cache)
            self._caches.append(same)
        gives_paths = any(pipeline.engines.handover is not None for pipeline in self.pipelines)
        self.engines = Engines(caches=together, handover=Handover.new() if gives_paths else None)

    def make_engine(self, num_retained: int, note_given_up: Callable[[], None] | None) -> Engine:
        """Return an engine of all streams."""
        makers: list[Callable[[], Recipe]] = [
            partial(pipeline.recipe, cache=cache, last=NameStream(name) if self.names_streams else None)
            for name, pipeline, cache in zip(self.names, self.pipelines, self._caches, strict=True)
        ]
        return Engine(makers, self.engines.caches, self.options, num_retained=num_retained, note_given_up=note_given_up)

    def num_retained(self, batches: BatchOptions | None) -> int | None:
        """Return how many samples of a worker keep their paths valid; None: how many are under way is not known."""
        asked = [number for pipeline in self.pipelines if (number := pipeline.options.samples.retained_samples) is not None]
        if batches is not None:
            return max(batches.num_under_way, *asked, 1)
        if asked or self.batch_size is None:
            return max(asked, default=None)
        return max(DEFAULT_RETAINED, (TORCH_PREFETCH_FACTOR + 1) * self.batch_size)
