"""Backends called in a spawned process: obstore must not run in a process that other tests fork."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from sqlstream.config import StorageOptions
from sqlstream.storage.base.protocols import ObjectInfo, Storage, read_ranges

_made: dict[tuple[str, str], Storage] = {}


def _storage(backend: str, options: StorageOptions) -> Storage:
    from sqlstream.storage.backends.fsspec.storage import FsspecStorage
    from sqlstream.storage.backends.http import HttpStorage
    from sqlstream.storage.backends.obstore import ObstoreStorage

    kinds: dict[str, type[Any]] = {
        "obstore": ObstoreStorage,
        "fsspec": FsspecStorage,
        "urllib3": HttpStorage,
    }
    key = (backend, repr(sorted(options.storage_options.items(), key=str)))
    if key not in _made:
        _made[key] = kinds[backend](options)
    return _made[key]


def _call(backend: str, options: StorageOptions, operation: str, *args: object) -> Any:
    storage = _storage(backend, options)
    if operation == "get":
        stream = storage.get(str(args[0]))
        chunks = [bytes(chunk) for chunk in stream.chunks()]
        stream.close()
        return stream.info, chunks
    if operation == "list":
        return list(storage.list(str(args[0])))
    if operation == "get_ranges":
        return [bytes(part) for part in read_ranges(storage, *args)]  # type: ignore[arg-type]  # passed through
    return getattr(storage, operation)(*args)


class SpawnedStorage:
    """A backend in the pool's process."""

    def __init__(self, pool: ProcessPoolExecutor, backend: str, options: StorageOptions) -> None:
        self._pool, self._backend, self._options = pool, backend, options

    def _do(self, operation: str, *args: object) -> Any:
        return self._pool.submit(_call, self._backend, self._options, operation, *args).result(timeout=300)

    def head(self, url: str) -> ObjectInfo:
        return self._do("head", url)  # type: ignore[no-any-return]  # the pool loses the type

    def get(self, url: str) -> tuple[ObjectInfo, list[bytes]]:
        return self._do("get", url)  # type: ignore[no-any-return]  # the pool loses the type

    def get_range(self, url: str, start: int, stop: int) -> bytes:
        return self._do("get_range", url, start, stop).data  # type: ignore[no-any-return]  # the pool loses the type

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> list[bytes]:
        return self._do("get_ranges", url, ranges, size_bytes)  # type: ignore[no-any-return]  # the pool loses the type

    def objects_below(self, prefix: str) -> list[ObjectInfo]:
        return self._do("list", prefix)  # type: ignore[no-any-return]  # the pool loses the type

    def put(self, url: str, path: Path) -> None:
        self._do("put", url, path)
