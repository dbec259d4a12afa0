"""The names of `ppwebdataset` and `ppwids`, the Paddle forms of WebDataset and wids, over those of `sqlstream`.

Datasets are those of `paddle.io`, so that its DataLoader takes them. Ranks are those of `paddle.distributed`, workers those of
`paddle.io.get_worker_info()`: each of them is one of ranks × workers to the engine, which deals samples to them all. Stages,
handlers, decoders and samplers are those of `sqlstream.compat.webdataset` and `.wids`.

Raises:
    MissingDependencyError: Paddle is not installed.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from sqlstream import StreamingDataset
from sqlstream.compat import webdataset as wds
from sqlstream.compat import wids
from sqlstream.compat.webdataset.stages.all_samples import STACKS
from sqlstream.compat.wids import ChunkedSampler as _ChunkedSampler
from sqlstream.compat.wids import ShardListSampler as _ShardListSampler
from sqlstream.errors import MissingDependencyError
from sqlstream.stream.run.shared.memory import as_shared
from sqlstream.world import World

try:
    import paddle
    import paddle.distributed
    import paddle.io
except ImportError as error:
    raise MissingDependencyError(
        "sqlstream.compat.paddle needs Paddle: pip install paddlepaddle; with PyTorch use sqlstream.compat.webdataset"
    ) from error


STACKS[paddle.Tensor] = paddle.stack


_REFUSED = {
    "paddle_autdio": "decode(torch_audio) gives the wave as a tensor of PyTorch, and its rate",
    "paddle_loads": wds.REFUSED["torch_loads"],
}


def __getattr__(name: str) -> Any:
    """Return a name that knows no framework: stages, handlers, decoders, lists of shards.

    Raises:
        AttributeError: There is none; says what to do where theirs has it.
    """
    if name in _REFUSED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {_REFUSED[name]}")
    return getattr(wds, name)


_MAX_WORKERS = 256
"""Workers whose epochs are counted; more is refused by no machine, and shares a counter."""


def _place() -> tuple[World, int]:
    """Return the place of this process among all ranks × workers, as Paddle knows it, and how many workers a rank has."""
    rank, num_ranks = paddle.distributed.get_rank(), paddle.distributed.get_world_size()
    info = paddle.io.get_worker_info()
    worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
    return World(rank=rank * num_workers + worker, world_size=num_ranks * num_workers), num_workers


class DataPipeline(paddle.io.IterableDataset):  # type: ignore[misc]  # Paddle has no types
    """Stages that samples go through, for `paddle.io.DataLoader`; see `sqlstream.compat.webdataset.DataPipeline`.

    Each iteration of a worker is its next epoch, counted over workers that are started anew.

    Args:
        args: The stages, or lists of them; or a pipeline of `sqlstream.compat.webdataset`.
    """

    def __init__(self, *args: Any) -> None:
        is_made = len(args) == 1 and isinstance(args[0], wds.DataPipeline)
        self._inner: wds.DataPipeline = args[0] if is_made else wds.DataPipeline(*args)
        self._epochs = torch.zeros(_MAX_WORKERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]  # [workers]

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._epochs = as_shared(self._epochs)  # [workers]

    @property
    def streaming(self) -> StreamingDataset | None:
        """The dataset that it became; None: all stages run as they are."""
        return self._inner.streaming

    def __iter__(self) -> Iterator[Any]:
        """Return the samples of the next epoch that are this rank's and this worker's."""
        world, num_workers = _place()
        inner = self._inner.for_world(world, num_workers)
        if inner.streaming is not None:
            counter = world.rank % num_workers % _MAX_WORKERS  # of this worker
            epoch = int(self._epochs[counter])
            self._epochs[counter] = epoch + 1
            inner.set_epoch(epoch)
        return iter(inner)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration of each worker epoch `epoch`."""
        self._epochs[:] = epoch

    def explain(self) -> str:
        """Return for each stage whether it is part of one dataset of ours, or runs as it is."""
        return self._inner.explain()

    def compose(self, *args: Any) -> Self:
        """Return a pipeline with more stages."""
        made = type(self).__new__(type(self))
        DataPipeline.__init__(made, self._inner.compose(*args))
        return made

    def with_epoch(self, nsamples: int = -1, nbatches: int = -1) -> Self:
        """Make an epoch of so many samples, or batches, of each worker."""
        self._inner.with_epoch(nsamples, nbatches)
        return self

    def repeat(self, nepochs: int = -1, nbatches: int = -1) -> Self:
        """Make one iteration of so many epochs, or without end, and of so many batches at most."""
        self._inner.repeat(nepochs, nbatches)
        return self

    def with_length(self, n: int, silent: bool = False) -> Self:
        """Set what `len()` returns; the number of samples stays."""
        self._inner.with_length(n, silent)
        return self

    def __len__(self) -> int:
        """Return what `with_length` has set."""
        return len(self._inner)

    def close(self) -> None:
        """Close what it has opened."""
        self._inner.close()


class FluidInterface(wds.FluidInterface):
    """Stages as methods: each returns a pipeline with one more."""


class WebDataset(DataPipeline, FluidInterface):
    """Samples of TAR shards; see `sqlstream.compat.webdataset.WebDataset`, whose arguments it takes."""

    def __init__(self, urls: Any, *args: Any, **kw: Any) -> None:
        super().__init__(wds.WebDataset(urls, *args, **kw))


class WebLoader(wds.FluidWrapper):
    """A `paddle.io.DataLoader` with the fluid interface.

    Args:
        args: Those of `paddle.io.DataLoader`.
        kw: Those of `paddle.io.DataLoader`.
    """

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(paddle.io.DataLoader(*args, **kw))


def paddle_dumps(data: Any) -> bytes:
    """Return what `paddle.save` writes."""
    file = io.BytesIO()
    paddle.save(data, file)
    return file.getvalue()


class TarWriter(wds.TarWriter):
    """Writes samples to an archive; see `sqlstream.compat.webdataset.TarWriter`, whose arguments it takes."""

    own_encoders = {"pth": paddle_dumps}  # noqa: RUF012 - read alone


class ShardWriter(wds.ShardWriter):
    """Writes samples to archives; see `sqlstream.compat.webdataset.ShardWriter`, whose arguments it takes."""

    tar_writer = TarWriter


class ShardListDataset(paddle.io.Dataset):  # type: ignore[misc]  # Paddle has no types
    """The samples of TAR shards by number; see `sqlstream.compat.wids.ShardListDataset`, whose arguments it takes."""

    def __init__(self, shards: Any, **kw: Any) -> None:
        self._inner = wids.ShardListDataset(shards, **kw)
        self.lengths: Sequence[int] = self._inner.lengths
        self.shards: Sequence[Mapping[str, Any]] = self._inner.shards

    def add_transform(self, transform: wids.Transformation) -> Self:
        """Add a function from sample to sample behind the others."""
        self._inner.add_transform(transform)
        return self

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._inner)

    def __getitem__(self, index: int) -> Any:
        """Return a sample by its number."""
        return self._inner[index]

    def close(self) -> None:
        """Close index and cache."""
        self._inner.close()


class ShardListSampler(paddle.io.Sampler):  # type: ignore[misc]  # Paddle has no types
    """The numbers of `sqlstream.compat.wids.ShardListSampler`."""

    def __init__(self, dataset: Any, **kw: Any) -> None:
        self._inner = _ShardListSampler(dataset, **kw)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        return iter(self._inner)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._inner)


ShardedSampler = ShardListSampler


class ChunkedSampler(paddle.io.Sampler):  # type: ignore[misc]  # Paddle has no types
    """The numbers of `sqlstream.compat.wids.ChunkedSampler`."""

    def __init__(self, dataset: Any, **kw: Any) -> None:
        self._inner = _ChunkedSampler(dataset, **kw)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch `epoch`."""
        self._inner.set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """Yield the numbers of an epoch."""
        return iter(self._inner)

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._inner)


def DistributedChunkedSampler(  # noqa: N802 - theirs
    dataset: Any, *, num_replicas: int | None = None, rank: int | None = None, **kw: Any
) -> ChunkedSampler:
    """Return a sampler of this rank's part of the numbers; ranks are those of `paddle.distributed`."""
    ranks = paddle.distributed.get_world_size() if num_replicas is None else num_replicas
    own = paddle.distributed.get_rank() if rank is None else rank
    made = ChunkedSampler.__new__(ChunkedSampler)
    made._inner = wids.DistributedChunkedSampler(dataset, num_replicas=ranks, rank=own, **kw)
    return made
