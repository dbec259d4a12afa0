"""`TarWriter` and `ShardWriter`: archives of samples, written by `sqlstream.write`."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from sqlstream.errors import ConfigError, EncodeError
from sqlstream.storage.base.urls import is_remote, local_path, without_file
from sqlstream.write.formats.parts import KEY, PartEncoder
from sqlstream.write.formats.tar_stream import TarStream

_PARTS = PartEncoder(allow_pickle=True)
_PACKED: Mapping[str, Callable[..., Any]] = {"gz": gzip.GzipFile, "bz2": bz2.BZ2File, "xz": lzma.LZMAFile}


def numpy_dumps(data: np.ndarray[Any, Any]) -> bytes:
    """Return an array as the bytes of an npy file."""
    file = io.BytesIO()
    np.lib.format.write_array(file, data, allow_pickle=False)
    return file.getvalue()


def torch_dumps(data: Any) -> bytes:
    """Return what `torch.save` writes."""
    file = io.BytesIO()
    torch.save(data, file)
    return file.getvalue()


class TarWriter:
    """Writes samples to an archive: `__key__`, and values by extension, which are encoded by it.

    Args:
        fileobj: A local path, or a file that is open for writing. A path has its name once the archive is whole.
        user: Owner of the members.
        group: Group of the members.
        mode: Rights of the members.
        compress: `"gz"` or True, `"bz2"`, `"xz"`, or False; None: as the path ends.
        encoder: True: by extension; a function from sample to sample; a dict of functions by extension; False: all are bytes.
        keep_meta: Write fields that begin with `_`, too.
        mtime: Time of the members, in seconds since 1970; None: 0, so that equal samples give equal bytes (theirs: now).
        format: Ignored: headers are USTAR, with a pax header where a name or a size needs one.
    """

    own_encoders: Mapping[str, Callable[[Any], bytes]] = {"pth": torch_dumps}
    """By extension, what is not as all writers of this package have it."""

    def __init__(
        self,
        fileobj: Any,
        user: str = "bigdata",
        group: str = "bigdata",
        mode: int = 0o0444,
        compress: bool | str | None = None,
        encoder: Any = True,
        keep_meta: bool = False,
        mtime: float | None = None,
        format: Any = None,  # noqa: A002, ARG002 - theirs
    ) -> None:
        text = os.fspath(fileobj) if isinstance(fileobj, str | os.PathLike) else None
        if text is not None and (is_remote(text) or text.startswith(("pipe:", "-"))):
            raise ConfigError(
                f"TarWriter({text!r}) writes to local paths and open files: a store is written to by "
                "sqlstream.write.TarWriter, with retries and the index last"
            )
        kind = _packing(compress, str(fileobj))
        self._path = None if text is None else Path(local_path(without_file(text)))
        self._owned: list[Any] = []
        if self._path is None:
            file = fileobj
        else:
            file = open(self._part_path, "wb")  # noqa: SIM115 - close or discard closes it
            self._owned.append(file)
        if kind is not None:
            timeless = {"mtime": 0} if kind == "gz" else {}
            file = _PACKED[kind](None, "wb", fileobj=file, **timeless) if kind == "gz" else _PACKED[kind](file, "wb")
            self._owned.insert(0, file)
        self._stream = TarStream(file, mode=mode, mtime=int(mtime or 0), user=user, group=group)
        self._encoder, self._keep_meta = encoder, keep_meta

    @property
    def _part_path(self) -> Path:
        assert self._path is not None
        return self._path.with_name(f"{self._path.name}.part")

    def write(self, obj: Mapping[str, Any]) -> int:
        """Write a sample; return the bytes of its parts.

        Raises:
            EncodeError: It has no key, or a value that is not encoded to bytes.
        """
        encoded = _PARTS.encode(self._with_own_encoder(obj))
        files = list(encoded.files)
        if self._keep_meta:
            files += [(name, _kept(name, value)) for name, value in obj.items() if name[:1] == "_" and name != KEY]
        for extension, data in files:
            self._stream.add(f"{encoded.key}.{extension}", data)
        return sum(len(data) for _, data in files)

    def _with_own_encoder(self, sample: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._encoder is None or self._encoder is False:
            for name, value in sample.items():
                if name[:1] != "_" and not isinstance(value, bytes | bytearray | memoryview):
                    raise EncodeError(
                        f"{name!r} is of the type {type(value).__name__}, and encoder={self._encoder} takes bytes alone",
                        column=name,
                    )
            return sample
        if callable(self._encoder):
            made: Mapping[str, Any] = self._encoder(sample)
            return made
        own: Mapping[str, Any] = self._encoder if isinstance(self._encoder, Mapping) else {}
        encoders = {**self.own_encoders, **own}
        found: dict[str, Any] = {}
        for name, value in sample.items():
            encode = encoders.get(name.rpartition(".")[2].lower()) if not isinstance(value, bytes | str) else None
            found[name] = value if encode is None or name[:1] == "_" else encode(value)
        return found

    @staticmethod
    def tarmode(fileobj: Any, compress: bool | str | None = None) -> str:
        """Return the mode of `tarfile` that an archive of this name is read with."""
        return f"w|{_packing(compress, fileobj if isinstance(fileobj, str) else '') or ''}"

    def close(self) -> None:
        """Write the end of the archive; a path gets its name."""
        self._stream.close()
        self._close_files()
        if self._path is not None:
            self._part_path.replace(self._path)

    def _close_files(self) -> None:
        for file in self._owned:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc_val: object, exc_tb: object) -> None:
        if exc_type is None:
            self.close()
            return
        self._close_files()  # an archive that ends early would look whole
        if self._path is not None:
            self._part_path.unlink(missing_ok=True)


def _kept(name: str, value: Any) -> bytes:
    """Return what is written of a field of metadata.

    Raises:
        EncodeError: It is neither text nor bytes.
    """
    if not isinstance(value, str | bytes | bytearray | memoryview):
        raise EncodeError(
            f"{name!r} is of the type {type(value).__name__}, and keep_meta=True takes text and bytes", column=name
        )
    return value.encode() if isinstance(value, str) else bytes(value)


def _packing(compress: bool | str | None, name: str) -> str | None:
    """Return how an archive is compressed as a whole; None: it is not.

    Raises:
        ConfigError: In a way that is not known.
    """
    if compress is False:
        return None
    if compress is True:
        return "gz"
    if isinstance(compress, str) and compress:
        if compress not in _PACKED:
            raise ConfigError(f"compress={compress!r} is unknown: give one of {', '.join(map(repr, _PACKED))}, True or False")
        return compress
    return next((kind for kind in _PACKED if name.endswith(kind)), None)


class ShardWriter:
    """Writes samples to archives, a new one when one is full.

    Args:
        pattern: Names of archives, with one number: `out/s-%06d.tar`.
        maxcount: Most samples of an archive.
        maxsize: Bytes of parts from which on an archive is full.
        post: Called with the name of each archive, once it is whole.
        start_shard: Number of the first one.
        verbose: Print the names.
        opener: Returns an open file for a name.
        kw: Arguments of `TarWriter`.
    """

    tar_writer: type[TarWriter] = TarWriter
    """What writes an archive."""

    def __init__(
        self,
        pattern: str,
        maxcount: int = 100000,
        maxsize: float = 3e9,
        post: Callable[[str], Any] | None = None,
        start_shard: int = 0,
        verbose: int = 1,
        opener: Callable[[str], Any] | None = None,
        **kw: Any,
    ) -> None:
        try:
            pattern % start_shard
        except (TypeError, ValueError) as error:
            raise ConfigError(f"pattern={pattern!r} has no place for one number ({error}): give 'out/s-%06d.tar'") from error
        self.pattern, self.maxcount, self.maxsize = pattern, maxcount, maxsize
        self.post, self.verbose, self.opener, self.kw = post, verbose, opener, kw
        self.shard, self.total, self.count, self.size = start_shard, 0, 0, 0
        self.fname = ""
        self.tarstream: TarWriter | None = None
        self._exit = contextlib.ExitStack()
        self.next_stream()

    def next_stream(self) -> None:
        """Finish this archive, and begin another one."""
        self.finish()
        self.fname = self.pattern % self.shard
        if self.verbose:
            sys.stdout.write(f"# writing {self.fname} {self.count} {self.size / 1e9:.1f} GB {self.total}\n")
        self.shard += 1
        file = self.fname
        if self.opener is not None:
            file = self.opener(self.fname)
            self._exit.callback(file.close)
        self.tarstream = self.tar_writer(file, **self.kw)
        self.count = self.size = 0

    def write(self, obj: Mapping[str, Any]) -> None:
        """Write a sample."""
        if self.tarstream is None or self.count >= self.maxcount or self.size >= self.maxsize:
            self.next_stream()
        assert self.tarstream is not None
        self.size += self.tarstream.write(obj)
        self.count += 1
        self.total += 1

    def finish(self) -> None:
        """Finish this archive."""
        if self.tarstream is None:
            return
        self.tarstream.close()
        self.tarstream = None
        self._exit.close()
        if self.post is not None:
            self.post(self.fname)

    def close(self) -> None:
        """Finish the last archive."""
        self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        with self._exit:
            if exception[0] is None or self.tarstream is None:
                self.close()
            else:
                self.tarstream.__exit__(*exception)
                self.tarstream = None
