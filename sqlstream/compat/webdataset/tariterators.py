"""From shards to samples: the stage that the engine takes the place of."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from sqlstream import StreamingDataset
from sqlstream.compat.webdataset.handlers import (
    Handler,
    ignore_and_continue,
    ignore_and_stop,
    is_known,
    reraise_exception,
    warn_and_continue,
    warn_and_stop,
)
from sqlstream.compat.webdataset.stages.base import EachSample, Outcome, PipelineStage
from sqlstream.compat.webdataset.tar_files import (
    base_plus_ext,
    group_by_keys,
    opened,
    tar_file_expander,
    tar_file_iterator,
    url_opener,
    valid_sample,
)
from sqlstream.index.sources.base.derived import SOURCE_COLUMN
from sqlstream.index.sources.places.wildcard import has_wildcard
from sqlstream.storage.base.urls import is_remote, local_path, without_file
from sqlstream.stream.run.shared.memory import shared_bytes
from sqlstream.transforms.rng import PRIVATE_FIELDS

_ADDED = ("__shard__", "__sample_key__", "__row__", "__epoch__", *PRIVATE_FIELDS)
"""Fields of rows that theirs has not, and no member may be."""
_IS_SPECIAL = re.compile(r"[{}$\\]")


class FromRow(EachSample):
    """Makes a sample of WebDataset of a row: its key, its URL, and the parts that it has.

    Args:
        select_files: Says for the name of a member whether it is wanted.
        rename_files: Returns another name of a member.
        handler: What becomes of a member that one of them fails on.
    """

    name = "tarfile_to_samples"

    def __init__(
        self,
        select_files: Callable[[str], Any] | None = None,
        rename_files: Callable[[str], str] | None = None,
        handler: Handler = reraise_exception,
    ) -> None:
        super().__init__()
        self.select_files, self.rename_files, self._of_members = select_files, rename_files, handler
        self.calls_given_code = select_files is not None or rename_files is not None
        self._looks = shared_bytes(2) if self.calls_given_code else None  # [2]
        """No member of a sample was wanted; a member of one was. Workers of a loader, which make its samples, write there."""
        self._noted = set[bool]()
        """What this process has written there, which takes 2 us."""

    @property
    def keeps_nothing(self) -> bool:
        """No member of the samples that this process and its workers have made was wanted, and there were some."""
        return self._looks is not None and self._looks.tolist() == [1, 0]

    @property
    def given(self) -> tuple[Callable[..., Any], ...]:
        """Its functions."""
        handler = None if is_known(self._of_members) else self._of_members
        return tuple(some for some in (self.select_files, self.rename_files, handler) if some is not None)

    def take(self, sample: Any) -> Any:
        """Return the sample, or drop it where no part of it is wanted."""
        sample = sample.copy()
        for name in _ADDED:
            sample.pop(name, None)
        if isinstance(sample.get(SOURCE_COLUMN), str):  # of several sources; a member of that name is bytes
            del sample[SOURCE_COLUMN]
        if None in sample.values():  # values are bytes: parts that the sample does not have
            sample = {name: value for name, value in sample.items() if value is not None}
        if not is_remote(sample["__url__"]):
            sample["__local_path__"] = sample["__url__"]
        return self._selected(sample) if self.calls_given_code else sample

    def _selected(self, sample: dict[str, Any]) -> Any:
        made: dict[str, Any] = {name: sample.pop(name) for name in ("__key__", "__url__", "__local_path__") if name in sample}
        parts = self._named(made, sample)
        if parts is None:
            return Outcome.STOPPED
        if self._looks is not None and bool(parts) not in self._noted:
            self._noted.add(bool(parts))
            self._looks[int(bool(parts))] = 1
        return {**made, **parts} if parts else Outcome.DROPPED

    def _named(self, made: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any] | None:
        """Return the parts whose members are wanted, under their other names; a new key is put into the sample.

        None: the handler ends the iteration.
        """
        found: dict[str, Any] = {}
        keys = set[str]()
        for extension, value in parts.items():
            name = f"{made['__key__']}.{extension}"
            try:
                name = name if self.rename_files is None else self.rename_files(name)
                is_wanted = self.select_files is None or self.select_files(name)
            except Exception as error:
                if self._of_members(error):
                    continue
                return None
            if not is_wanted:
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
        self.options: dict[str, Any] = {}
        """Parameters of a dataset of a shard, where it runs as it is."""
        self.from_row = FromRow(select_files, rename_files, handler)

    @property
    def goes_on(self) -> bool:
        """Samples and shards that cannot be read are left out."""
        return self.handler not in (reraise_exception, ignore_and_stop, warn_and_stop)

    @property
    def is_known(self) -> bool:
        """The handler is one of ours."""
        return is_known(self.handler)

    def run(self, src: Iterable[dict[str, Any]]) -> Iterator[Any]:
        """Yield the samples of shards, one shard after the other; all of them in any process."""
        files = tar_file_expander(
            map(_placed, opened(map(_absolute, src), self.handler, **self.options)),
            self.handler,
            self.from_row.select_files,
            self.from_row.rename_files,
        )
        return group_by_keys(files, handler=self.handler)


def _absolute(shard: dict[str, Any]) -> dict[str, Any]:
    """Return a shard with its path from the root on; a URL stays."""
    url = without_file(shard["url"])
    return {**shard, "url": url if is_remote(url) else str(local_path(url).absolute())}


def _placed(shard: dict[str, Any]) -> dict[str, Any]:
    """Return a shard with its path, if it is one of this machine."""
    return shard if is_remote(shard["url"]) else {**shard, "local_path": shard["url"]}


def until_stopped(named: Sequence[str], handler: Handler) -> Sequence[str]:
    """Return shards up to the first one of this machine that is not there and that their handler ends with; all, if none is.

    Args:
        named: Their URLs.
        handler: Of the user, called with the error of each such shard; what goes on or raises always is not called.
    """
    if handler in (reraise_exception, ignore_and_continue, warn_and_continue):
        return named
    for number, url in enumerate(named):
        path = without_file(url)
        if not is_remote(path) and not has_wildcard(path):
            try:
                os.stat(local_path(path))
            except OSError as error:
                if not handler(error):
                    return named[:number] or named
    return named


def open_shards(urls: list[str], reader: TarfileToSamples, **options: Any) -> StreamingDataset:
    """Return a dataset of shards, each of which is read as it is needed.

    Args:
        urls: Their URLs. As one text they are one source: rows of several have a column with the source's name.
        reader: What becomes of those that cannot be read.
        options: Parameters of the dataset.
    """
    given: dict[str, Any] = {
        "lazy_index_chunk_size": 1,
        "show_progress": False,
        "on_error": "skip" if reader.goes_on else "raise",
        "max_failure_ratio": 1.0 if reader.goes_on else 0.1,
        "source_options": {
            "new_parts": "take",
            "damaged_shards": "until_damage" if reader.goes_on else "raise",
            "missing_shards": "skip_unreadable" if reader.goes_on else "raise",
        },
    }
    urls = [without_file(url) for url in urls]
    src = urls if any("::" in url or _IS_SPECIAL.search(url) for url in urls) else "::".join(urls)
    return StreamingDataset(src, options.pop("dst", None), **(given | options))


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


__all__ = [
    "base_plus_ext",
    "group_by_keys",
    "tar_file_expander",
    "tar_file_iterator",
    "tarfile_samples",
    "tarfile_to_samples",
    "url_opener",
    "valid_sample",
]
