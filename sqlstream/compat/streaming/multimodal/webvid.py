"""WebVid: videos within the samples, or beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from sqlstream.compat.streaming.base.dataset import StreamingDataset
from sqlstream.compat.streaming.base.documented import Documented, DocumentedDataset, shows_all_parameters
from sqlstream.errors import ConfigError
from sqlstream.storage.base.urls import is_remote


class StreamingInsideWebVid(StreamingDataset):
    """Videos in the column `content` of the samples."""


class StreamingOutsideGIWebVid(DocumentedDataset):
    """Videos in files of their own, which the column `content_path` names.

    Args:
        extra_local: Directory of the videos; without `extra_remote` samples have no `content`.
        extra_remote: Directory that they come from, on this machine: it is read where a file is not in `extra_local`.
        options: Parameters of `StreamingDataset`.

    Raises:
        ConfigError: `extra_remote` is a URL.
    """

    @shows_all_parameters
    def __init__(
        self, *, extra_local: str | None = None, extra_remote: str | None = None, **options: Unpack[Documented]
    ) -> None:
        if extra_remote is not None and is_remote(extra_remote):
            raise ConfigError(
                f"extra_remote={extra_remote!r} is a URL, whose files are not counted by a cache of shards: give "
                "sqlstream.StreamingDataset a table with a column of URLs, which it downloads, or copy the files to extra_local"
            )
        self.extra_local, self.extra_remote = extra_local, extra_remote
        super().__init__(**options)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return a sample with the bytes of its video as `content`."""
        found = super().get_item(sample_id, retry)
        if self.extra_local and self.extra_remote:
            path = Path(self.extra_local) / found["content_path"]
            found["content"] = (path if path.exists() else Path(self.extra_remote) / found["content_path"]).read_bytes()
        return found


class StreamingOutsideDTWebVid(StreamingOutsideGIWebVid):
    """The same: MosaicML's reads the videos in a thread of its own."""
