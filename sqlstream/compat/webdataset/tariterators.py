"""From shards to samples: the stage that the engine takes the place of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from sqlstream import StreamingDataset
from sqlstream.compat.webdataset.handlers import (
    Handler,
    ignore_and_continue,
    ignore_and_stop,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from sqlstream.compat.webdataset.stages import EachSample, Outcome, PipelineStage
from sqlstream.storage.base.urls import is_remote
from sqlstream.world import World

_NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")


def base_plus_ext(path: str) -> tuple[str, str] | tuple[None, None]:
    """Return the key and the extension that the name of a member has; None where it has none."""
    match = _NAME.match(path)
    return (None, None) if match is None else (match[1], match[2])


class FromRow(EachSample):
    """Makes a sample of WebDataset of a row: its key, its URL, and the parts that it has.

    Args:
        select_files: Says for the name of a member whether it is wanted.
        rename_files: Returns another name of a member.
    """

    name = "tarfile_to_samples"

    def __init__(
        self,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
    ) -> None:
        super().__init__()
        self.select_files, self.rename_files = select_files, rename_files
        self.calls_given_code = select_files is not None or rename_files is not None

    def take(self, sample: Any) -> Any:
        """Return the sample, or drop it where no part of it is wanted."""
        url = sample["__url__"]
        made = {"__key__": sample["__key__"], "__url__": url}
        if not is_remote(url):
            made["__local_path__"] = url
        parts = {name: value for name, value in sample.items() if value is not None and name[:2] != "__"}
        if self.calls_given_code:
            parts = self._named(made, parts)
        if not parts:
            return Outcome.DROPPED
        made.update(parts)
        return made

    def _named(self, made: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        """Return the parts whose members are wanted, under their other names; a new key is put into the sample."""
        found: dict[str, Any] = {}
        keys = set[str]()
        for extension, value in parts.items():
            name = f"{made['__key__']}.{extension}"
            if self.rename_files is not None:
                name = self.rename_files(name)
            if self.select_files is not None and not self.select_files(name):
                continue
            key, renamed = base_plus_ext(name)
            if key is None or renamed is None:
                continue
            keys.add(key)
            found[renamed.lower()] = value
        if len(keys) > 1:
            raise ValueError(
                f"rename_files gives members of the sample {made['__key__']!r} the keys {', '.join(sorted(keys))}: which "
                "members make a sample is in the index; rename extensions, or the key of all of its members"
            )
        if keys:
            made["__key__"] = keys.pop()
        return found


class TarfileToSamples(PipelineStage):
    """Reads shards; in a pipeline the engine does.

    Args:
        handler: What becomes of shards and samples that cannot be read.
        select_files: Says for the name of a member whether it is wanted.
        rename_files: Returns another name of a member.
    """

    name = "tarfile_to_samples"

    def __init__(
        self,
        handler: Handler = reraise_exception,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
    ) -> None:
        self.handler = handler
        self.from_row = FromRow(select_files, rename_files)

    @property
    def goes_on(self) -> bool:
        """Samples and shards that cannot be read are left out."""
        return self.handler not in (reraise_exception, ignore_and_stop, warn_and_stop)

    @property
    def is_known(self) -> bool:
        """The handler is one of ours."""
        return self.handler in (reraise_exception, ignore_and_continue, warn_and_continue, ignore_and_stop, warn_and_stop)

    def run(self, src: Iterable[dict[str, Any]]) -> Iterator[Any]:
        """Yield the samples of shards, one shard after the other."""
        for shard in src:
            with open_shards([shard["url"]], self, world=World(rank=0, world_size=1)) as dataset:
                yield from self.from_row.run(dataset)


def open_shards(urls: list[str], reader: TarfileToSamples, **options: Any) -> StreamingDataset:
    """Return a dataset of shards, each of which is read as it is needed.

    Args:
        urls: Their URLs.
        reader: What becomes of those that cannot be read.
        options: Parameters of the dataset.
    """
    given: dict[str, Any] = {
        "lazy_index_chunk_size": 1,
        "show_progress": False,
        "on_error": "skip" if reader.goes_on else "raise",
        "max_failure_ratio": 1.0 if reader.goes_on else 0.1,
        "source_options": {"new_parts": "take", "damaged_shards": "until_damage" if reader.goes_on else "raise"},
    }
    return StreamingDataset(urls, options.pop("dst", None), **(given | options))


def tarfile_to_samples(
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> TarfileToSamples:
    """Return the stage that reads shards."""
    return TarfileToSamples(handler, select_files, rename_files)


def tarfile_samples(
    src: Iterable[dict[str, Any]],
    handler: Handler = reraise_exception,
    select_files: Callable[[str], Any] | None = None,
    rename_files: Callable[[str], str] | None = None,
) -> Iterator[Any]:
    """Yield the samples of shards."""
    return TarfileToSamples(handler, select_files, rename_files).run(src)
