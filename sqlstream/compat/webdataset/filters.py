"""The stages of WebDataset by its names: `map`, `select`, `to_tuple`, `shuffle`, `batched`, ….

Each function returns a stage. A pipeline hands those that take one sample at a time to the engine; called with an iterator
they run as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from typing import Any

from sqlstream.compat.webdataset.autodecode import Decoder, ImageHandler
from sqlstream.compat.webdataset.handlers import Handler, reraise_exception
from sqlstream.compat.webdataset.stages.all_samples import (
    Batched,
    Cached,
    Curried,
    Info,
    LogKeys,
    Shuffle,
    Slice,
    Unbatched,
    Unlisted,
    combine_values,
    default_collation_fn,
    detshuffle,
)
from sqlstream.compat.webdataset.stages.each_sample import (
    Associate,
    DecodePatterns,
    ExtractKeys,
    Map,
    MapDict,
    MapTuple,
    RandomSample,
    Rename,
    RenameKeys,
    Select,
    ToTuple,
    getfirst,
    transform_with,
)


def pipelinefilter(f: Callable[..., Iterator[Any]]) -> Callable[..., Curried]:
    """Return a function that takes the arguments of `f` but the first one, its samples, and returns a stage."""
    return wraps(f)(partial(Curried, f))


def info(fmt: str | None = None, n: int = 3, every: int = -1, width: int = 50, stream: Any = None, name: str = "") -> Info:
    """Return a stage that prints some samples."""
    return Info(fmt, n, every, width, stream, name)


def shuffle(
    bufsize: int = 1000, initial: int = 100, rng: Any = None, seed: Any = None, handler: Handler | None = None
) -> Shuffle:
    """Return a stage that mixes samples."""
    return Shuffle(bufsize, initial, rng, seed, handler)


def _shuffle(
    data: Iterable[Any],
    bufsize: int = 1000,
    initial: int = 100,
    rng: Any = None,
    seed: Any = None,
    handler: Handler | None = None,
) -> Iterator[Any]:
    """Yield samples in another order; stages of timm's and OpenCLIP's import it."""
    return Shuffle(bufsize, initial, rng, seed, handler).run(data)


def select(predicate: Callable[[Any], Any]) -> Select:
    """Return a stage that drops samples."""
    return Select(predicate)


def log_keys(logfile: str | None = None) -> LogKeys:
    """Return a stage that writes keys to a file."""
    return LogKeys(logfile)


def decode(*args: Any, handler: Handler = reraise_exception, **kw: Any) -> Map:
    """Return a stage that decodes fields (`autodecode.Decoder`)."""
    return Map(Decoder([ImageHandler(some) if isinstance(some, str) else some for some in args], **kw), handler)


def map(f: Callable[[Any], Any], handler: Handler = reraise_exception) -> Map:  # noqa: A001 - theirs
    """Return a stage that calls a function for each sample."""
    return Map(f, handler)


def rename(handler: Handler = reraise_exception, keep: bool = True, **kw: Any) -> Rename:
    """Return a stage that renames fields."""
    return Rename(kw, keep, handler)


def associate(associator: Any, **kw: Any) -> Associate:  # noqa: ARG001 - theirs takes more, and ignores it
    """Return a stage that adds fields by key."""
    return Associate(associator)


def map_dict(handler: Handler = reraise_exception, **kw: Any) -> MapDict:
    """Return a stage that calls functions for fields."""
    return MapDict(kw, handler)


def to_tuple(
    *args: Any, handler: Handler = reraise_exception, missing_is_error: bool = True, none_is_error: bool | None = None
) -> ToTuple:
    """Return a stage that makes tuples of fields."""
    return ToTuple(args, handler, missing_is_error, none_is_error)


def map_tuple(*args: Any, handler: Handler = reraise_exception) -> MapTuple:
    """Return a stage that calls functions for the values of tuples."""
    return MapTuple(args, handler)


def batched(
    batchsize: int = 20,
    collation_fn: Any = default_collation_fn,
    partial: bool = True,
) -> Batched:
    """Return a stage that makes batches."""
    return Batched(batchsize, collation_fn, partial)


def unlisted() -> Unlisted:
    """Return a stage that makes samples of lists."""
    return Unlisted()


def unbatched() -> Unbatched:
    """Return a stage that makes samples of batches."""
    return Unbatched()


def rsample(p: float = 0.5) -> RandomSample:
    """Return a stage that keeps samples by chance."""
    return RandomSample(p)


def slice(*args: int | None) -> Slice:  # noqa: A001 - theirs
    """Return a stage that takes samples by place, as `itertools.islice`."""
    return Slice(*args)


def extract_keys(*patterns: Any, duplicate_is_error: bool = True, ignore_missing: bool = False) -> ExtractKeys:
    """Return a stage that makes tuples of the fields that match patterns."""
    return ExtractKeys(patterns, duplicate_is_error, ignore_missing)


def rename_keys(
    *args: Any, keep_unselected: bool = False, must_match: bool = True, duplicate_is_error: bool = True, **kw: Any
) -> RenameKeys:
    """Return a stage that renames the fields that match patterns."""
    patterns = [(pattern, new) for new, pattern in (*args, *kw.items())]
    return RenameKeys(patterns, keep_unselected, must_match, duplicate_is_error)


def decode_bin(stream: Any) -> Any:
    """Return the bytes of a stream."""
    return stream.read()


def decode_text(stream: Any) -> str:
    """Return the text of a stream."""
    return str(stream.read().decode("utf-8"))


default_decoders = (("*.bin", decode_bin), ("*.txt", decode_text))


def xdecode(*args: Any, must_decode: bool = True, defaults: Any = default_decoders, **kw: Any) -> DecodePatterns:
    """Return a stage that decodes the fields that match patterns; there is no default for pickles."""
    return DecodePatterns([*defaults, *args, *(("*." + name, decode) for name, decode in kw.items())], must_decode)


__all__ = [
    "Cached",
    "associate",
    "batched",
    "combine_values",
    "decode",
    "decode_bin",
    "decode_text",
    "default_collation_fn",
    "default_decoders",
    "detshuffle",
    "extract_keys",
    "getfirst",
    "info",
    "log_keys",
    "map",
    "map_dict",
    "map_tuple",
    "pipelinefilter",
    "rename",
    "rename_keys",
    "rsample",
    "select",
    "shuffle",
    "slice",
    "to_tuple",
    "transform_with",
    "unbatched",
    "unlisted",
    "xdecode",
]
