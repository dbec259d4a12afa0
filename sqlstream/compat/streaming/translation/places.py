"""Where the shards of a stream are read, where its cache lies, and how its storage is reached."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlstream.environment import environment
from sqlstream.errors import ConfigError, ObjectNotFoundError, SourceError
from sqlstream.storage.base import urls
from sqlstream.storage.members.mds.shards import MdsShard, ShardFile, parse_index

INDEX = "index.json"
CACHE = ".sqlstream"
"""Directory of our cache below `local`: shards that lie in `local` are not ours."""
_AZURE = ("azure://", "azure-dl://")
_REQUESTER_PAYS = "MOSAICML_STREAMING_AWS_REQUESTER_PAYS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a stream is read."""

    src: str
    """Directory of `index.json`: a path, or a URL with a slash at its end."""
    dst: Path | None
    """Directory of the cache; None: the user's own."""
    storage_options: dict[str, Any] = field(default_factory=dict)
    """Settings of the storage."""


def place_of(remote: str | None, local: str | None, split: str | None) -> Place:
    """Return where a stream is read: in `local` if it holds the index and all shards, else at `remote`.

    Args:
        remote: Directory or URL of the shards.
        local: Directory of the shards, or of the cache.
        split: Subdirectory of both.

    Raises:
        ConfigError: Neither is given.
        ObjectNotFoundError: There is no index in `local`, and none in a `remote` of this machine.
    """
    dst = None if local is None else Path(local) / CACHE
    if remote is None:
        if local is None:
            raise ConfigError("neither remote nor local is given: give the directory or URL of the shards")
        if not (Path(local) / (split or "") / INDEX).is_file():
            raise ObjectNotFoundError(
                f"no remote is given, and {Path(local) / (split or '') / INDEX} is not there: give remote=, or as local= the "
                "directory that holds the index and its shards"
            )
        return Place(src=str(Path(local) / (split or "")), dst=dst)
    if local is not None and _holds_shards(Path(local) / (split or "")):
        return Place(src=str(Path(local) / (split or "")), dst=dst)
    if not urls.is_remote(remote):
        directory = urls.local_path(remote) / (split or "")
        if not (directory / INDEX).is_file():
            raise ObjectNotFoundError(
                f"{directory / INDEX} is not there: give as remote= the directory of an index and its shards"
            )
        return Place(src=str(directory), dst=dst)
    return Place(src=_url(remote, split), dst=dst, storage_options=_options(remote))


def _holds_shards(directory: Path) -> bool:
    """Return whether a directory has an index and every file that it names, whole."""
    try:
        index = parse_index((directory / INDEX).read_bytes(), str(directory / INDEX))
    except (OSError, SourceError):
        return False
    return all(_is_whole(directory, file) for shard in index for file in _stored(shard))


def _stored(shard: MdsShard) -> list[ShardFile]:
    """Return the files of a shard, as they are stored."""
    files = [shard.zip or shard.raw, shard.zip_meta or shard.meta]
    return [file for file in files if file is not None]


def _is_whole(directory: Path, file: ShardFile) -> bool:
    try:
        return (directory / file.basename).stat().st_size == file.bytes
    except OSError:
        return False


def _url(remote: str, split: str | None) -> str:
    for scheme in _AZURE:
        if remote.startswith(scheme):
            remote = "az://" + remote.removeprefix(scheme)
    directory = f"{remote.rstrip('/')}/"
    return f"{directory}{split.strip('/')}/" if split else directory


def _options(remote: str) -> dict[str, Any]:
    """Return what the variables of MosaicML Streaming say of a storage; those of the clouds are read there."""
    if remote.startswith(_AZURE):
        found = environment("AZURE_ACCOUNT_NAME", "AZURE_ACCOUNT_ACCESS_KEY")
        names = {"AZURE_ACCOUNT_NAME": "account_name", "AZURE_ACCOUNT_ACCESS_KEY": "account_key"}
        return {names[name]: value for name, value in found.items()}
    buckets = environment(_REQUESTER_PAYS).get(_REQUESTER_PAYS, "").split(",")
    if remote.startswith("s3://") and remote.removeprefix("s3://").partition("/")[0] in buckets:
        return {"requester_pays": True}
    return {}
