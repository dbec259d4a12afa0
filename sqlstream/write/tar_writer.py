"""`TarWriter`: tars, and what lies beside them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection

from sqlstream.config import list_of
from sqlstream.errors import ConfigError, SourceError
from sqlstream.storage.fetcher import Fetcher
from sqlstream.write.base.options import Out, WriteOptions
from sqlstream.write.base.place import OutputPlace, place_of
from sqlstream.write.base.writer import SampleWriter
from sqlstream.write.energon import ENERGON_FILES, FOLDER, part_folder, write_energon
from sqlstream.write.formats.limits import ShardLimits, checked_pattern
from sqlstream.write.formats.parts import PartEncoder, SampleFiles
from sqlstream.write.formats.tar import TarFormat
from sqlstream.write.formats.wids import WIDS_NAME

EXTRAS = ("md5", "energon")
"""What is made on request."""


class TarWriter(SampleWriter[SampleFiles]):
    """Writes samples as tars, which WebDataset, wids, Megatron-Energon and `tarfile` read.

    A sample is a dict: `__key__`, a text without a dot in its last part, and values by extension: bytes, text, or what the
    extension has an encoder for (`json`, `cls`, `npy`, `jpg`, …). Fields whose names begin with `_` are left out.

    Args:
        out: A directory, a URL, or (directory, URL).
        pattern: Names of shards, with one number.
        size_limit: Most bytes of a shard, such as `"512mb"`; None: no limit.
        max_samples: Most samples of a shard; None: no limit.
        name: Of the dataset, for the index of wids.
        extras: `"md5"`: the MD5 of each shard in the index of wids, which costs as much as the rest of writing; `"energon"`: a
            `.nv-meta` beside the tars when they are whole, for Megatron-Energon, which needs keys that differ over all of them.
        allow_pickle: Encode values of `pkl`, `pickle` and `pyd`, which can run any code where they are read.
        options: How it is stored: `exist_ok`, `resume`, `keep_local`, `part`, …

    Raises:
        ConfigError: An argument is wrong.
        OutputExistsError: Something is there.

    Example:
        >>> import tempfile
        >>> with TarWriter(tempfile.mkdtemp()) as writer:
        ...     writer.write({"__key__": "0001", "txt": "a cat", "json": {"score": 0.5}})
    """

    def __init__(
        self,
        out: Out,
        *,
        pattern: str = "shard-%06d.tar",
        size_limit: int | str | None = "1gb",
        max_samples: int | None = 100_000,
        name: str = "",
        extras: Collection[str] = (),
        allow_pickle: bool = False,
        options: WriteOptions | None = None,
    ) -> None:
        if isinstance(extras, str) or not {*list_of("extras", extras, "give a tuple")} <= {*EXTRAS}:
            raise ConfigError(f"extras={extras!r}: give some of {', '.join(map(repr, EXTRAS))}, as a tuple")
        tar_format = TarFormat(
            checked_pattern(pattern, ".tar"),
            ShardLimits(size_limit, max_samples),
            PartEncoder(allow_pickle=allow_pickle),
            has_offsets=True,
            has_md5="md5" in extras,
            name=name,
        )
        self._options, self._place = options or WriteOptions(), place_of(out)
        self._has_energon = "energon" in extras
        if self._has_energon:
            _check_energon(self._place, self._options)
        self._refusal: SourceError | None = None
        super().__init__(tar_format, out, self._options)

    def finish(self) -> None:
        """Store what is left, then the index, then `.nv-meta`. A second time it does nothing.

        Raises:
            StorageError: A shard or the index could not be stored: there is no index, and the writing can be resumed.
            SourceError: A key comes twice, which Energon refuses: the tars and their index are whole.
        """
        super().finish()
        if self._refusal is not None:
            refusal, self._refusal = self._refusal, None
            raise refusal

    def _store_beside(self) -> None:
        """Store `.nv-meta`, before the journal says that all is there: else a resumed writing would leave it out."""
        local = self._place.local
        if not self._has_energon or local is None:
            return
        shards = json.loads((local / WIDS_NAME).read_bytes())["shardlist"]
        with contextlib.ExitStack() as exit_:
            made = exit_.enter_context(part_folder(local))
            try:
                write_energon([(shard["url"], local / shard["url"]) for shard in shards], made)
            except SourceError as error:  # no resumed writing would mend it
                self._refusal = error
                return
            folder = local / FOLDER
            folder.mkdir(exist_ok=True)
            for name in ENERGON_FILES:
                (made / name).replace(folder / name)
            if self._place.remote is not None:
                remote = self._options.remote or exit_.enter_context(contextlib.closing(Fetcher(self._options.storage)))
                for name in ENERGON_FILES:
                    remote.upload(folder / name, f"{self._place.remote}{FOLDER}/{name}")


def _check_energon(place: OutputPlace, options: WriteOptions) -> None:
    """Raise unless the tars of all parts will be on this machine.

    Raises:
        ConfigError: They will not.
    """
    later = "leave it out, and run `sqlstream shards index --energon` on the tars afterwards"
    if options.part is not None:
        raise ConfigError(f"extras=('energon',) writes .nv-meta of all tars, and this is part {options.part} of them: {later}")
    if place.local is None or (place.remote is not None and not options.keep_local):
        raise ConfigError(
            f"extras=('energon',) reads the tars once more: give (directory, URL) and keep_local=True, or {later}"
        )
