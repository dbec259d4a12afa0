"""A stream of a mixture, as MosaicML Streaming's users write it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlstream.config.checks import check_at_least
from sqlstream.errors import ConfigError
from sqlstream.order import absolute_choose, relative_choose

SHARES = ("proportion", "repeat", "choose")
"""What says how often a stream comes, one of them at most."""


class Stream:
    """A dataset of a mixture: where its shards are, and how often it comes.

    Args:
        remote: Directory or URL of its shards; None: they are in `local`.
        local: Directory that holds its shards, or in which they are cached; None: that of the dataset.
        split: Subdirectory of both; None: that of the dataset.
        proportion: Its share of the samples; all streams have one, or none.
        repeat: How often each of its samples comes in an epoch.
        choose: How many of its samples come in an epoch.
        download_retry: Tries of a download after the first one; None: those of the dataset.
        download_timeout: Seconds of silence of a download; None: those of the dataset.
        validate_hash: Accepted: hashes that the index has are always compared.
        keep_zip: Accepted: only decompressed shards are kept.

    Raises:
        ConfigError: Two of proportion, repeat and choose are given, or a number is negative.
    """

    def __init__(
        self,
        *,
        remote: str | None = None,
        local: str | None = None,
        split: str | None = None,
        proportion: float | None = None,
        repeat: float | None = None,
        choose: int | None = None,
        download_retry: int | None = None,
        download_timeout: float | None = None,
        validate_hash: str | None = None,
        keep_zip: bool | None = None,
    ) -> None:
        self.remote = remote
        self.local = local
        self.split = split or ""
        self.proportion = proportion
        self.repeat = repeat
        self.choose = choose
        self.download_retry = download_retry
        self.download_timeout = download_timeout
        self.validate_hash = validate_hash
        self.keep_zip = keep_zip
        self._asked: dict[str, Any] | None = None
        if len(self.share) > 1:
            raise ConfigError(f"{' and '.join(self.share)} are given: at most one of proportion, repeat and choose may be")
        for name, value in self.share.items():
            check_at_least(name, value, 0 if name == "choose" else 0.0)
        if download_retry is not None:
            check_at_least("download_retry", download_retry, 0)
        if download_timeout is not None:
            check_at_least("download_timeout", download_timeout, 0.0)
        if download_timeout == 0:
            raise ConfigError("download_timeout=0 is no time: give more than 0 seconds")

    @property
    def share(self) -> dict[str, Any]:
        """What the user says of how often it comes, by name."""
        if self._asked is not None:
            return self._asked
        return {name: value for name in SHARES if (value := getattr(self, name)) is not None}

    def note(self, *, proportion: float, repeat: float, choose: int) -> None:
        """Note what its share comes to; what the user says of it stays."""
        self._asked = self.share
        self.proportion, self.repeat, self.choose = proportion, repeat, choose

    def __repr__(self) -> str:
        given = {"remote": self.remote, "local": self.local, "split": self.split or None} | self.share
        return f"Stream({', '.join(f'{name}={value!r}' for name, value in given.items() if value is not None)})"


def check_shares(streams: Sequence[Stream], epoch_size: int | None) -> None:
    """Check what the streams of a dataset say of how often they come.

    Args:
        streams: All of them.
        epoch_size: Samples of an epoch, as given.

    Raises:
        ConfigError: Only some have a proportion, or the numbers of samples of the streams and of the epoch are both given.
    """
    relative = [stream.proportion is not None for stream in streams]
    if any(relative) and not all(relative):
        without = next(stream for stream, has_one in zip(streams, relative, strict=True) if not has_one)
        raise ConfigError(f"{without!r} has no proportion, but other streams have one: give it to all of them, or to none")
    if epoch_size is not None and any(stream.share.keys() & {"repeat", "choose"} for stream in streams):
        raise ConfigError(f"epoch_size={epoch_size} and repeat= or choose= of streams say the same: leave one of them out")


def with_defaults(stream: Stream, default: Mapping[str, Any]) -> Stream:
    """Return a stream with what the dataset says for those that say nothing; the user's own stays as it is.

    Raises:
        ConfigError: It is none.
    """
    if not isinstance(stream, Stream):
        raise ConfigError(f"streams has {stream!r}, which is no stream: give Stream(remote=…, local=…)")
    given = {"remote": stream.remote, "local": stream.local} | stream.share
    for name, value in default.items():
        own = getattr(stream, name)
        given[name] = value if own is None or own == "" else own
    return Stream(**given)


def note_shares(streams: Sequence[Stream], samples: Sequence[int], epoch_size: int | None) -> None:
    """Have the streams of a dataset say how many of its samples each has, as MosaicML's do once they are opened.

    Args:
        streams: All of them.
        samples: Samples of each, once.
        epoch_size: Samples of an epoch, as given.
    """
    asked = [stream.share for stream in streams]
    relative = [one["proportion"] for one in asked if "proportion" in one] or (list(samples) if epoch_size else [])
    total = epoch_size or sum(samples)
    if relative:
        chosen = list(relative_choose(relative, total))
    else:
        chosen = [
            one.get("choose", absolute_choose(one.get("repeat", 1), size)) for one, size in zip(asked, samples, strict=True)
        ]
    shares = relative or chosen
    for stream, share, number, size in zip(streams, shares, chosen, samples, strict=True):
        stream.note(proportion=share / sum(shares), repeat=number / size, choose=number)
