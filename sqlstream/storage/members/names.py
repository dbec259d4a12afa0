"""Names of archives, and of members of samples: keys and extensions, as WebDataset has them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from sqlstream.errors import DamagedShardError
from sqlstream.storage.base import urls

_TAR = re.compile(r"\.(tar(\.(gz|bz2|xz|zst|zstd))?|tgz|tbz2?|txz)$", re.IGNORECASE)
_META = re.compile(r"__[^/]*__($|/)")
"""Members that are no part of samples."""
_TAKEN = ("__key__", "__url__", "__local_path__")
"""What WebDataset itself puts into a sample."""


class Named(Protocol):
    """A member of an archive."""

    @property
    def name(self) -> str:
        """As in the archive."""
        ...


Member = TypeVar("Member", bound=Named)


def tar_extension(url: str) -> str:
    """Return the extension of a TAR archive, in lower case; empty: by its name it is none.

    Example:
        >>> tar_extension("s3://bucket/s-000.tar"), tar_extension("https://host/S.TAR.GZ?sig=x"), tar_extension("s.zip")
        ('.tar', '.tar.gz', '')
    """
    found = _TAR.search(urls.named(url))
    return "" if found is None else found[0].lower()


def split_name(name: str) -> tuple[str, str] | None:
    r"""Return the key and the extension of a member, in lower case; None: it is no part of a sample.

    As WebDataset's `^((?:.*/|)[^.]+)[.]([^/]*)$`, which takes quadratic time for some names.

    Example:
        >>> split_name("train/cat.1/0001.seg.PNG"), split_name("a/.b.jpg"), split_name("README"), split_name("__meta__/x.json")
        (('train/cat.1/0001', 'seg.png'), ('a/', 'b.jpg'), None, None)
    """
    slash = name.rfind("/")
    dot = name.find(".", slash + 1)
    if dot <= 0 or _META.match(name):
        return None
    key = name[:dot]
    if dot == slash + 1 and "." in key[key.rfind("/", 0, slash) + 1 :]:  # a/.b.jpg has the key a/, and a.b/.c.jpg none
        return None
    if "\n" in key and "." in key[key.rfind("/", 0, key.find("\n")) + 1 :]:
        return None
    return key, name[dot + 1 :].lower()


def is_hidden(name: str) -> bool:
    """Return whether a member of a ZIP is one that programs add, and readers pass over."""
    return name.startswith("__MACOSX/") or name.startswith(".", name.rfind("/") + 1)


def group(members: Iterable[Member], shard: str = "") -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield the samples of one shard: a key, and its members by extension.

    Members of one key that follow each other are a sample; what is no part of a sample does not end one. A key that comes
    again later is another sample. If `members` raises, the sample that it was at may go on behind the damage: it is yielded
    only if the error knows what follows (`follows` in its context: the name of the member that is cut; empty: the end).

    Args:
        members: Of one shard, in its order.
        shard: The URL of the shard for messages, without credentials.

    Raises:
        DamagedShardError: A sample has an extension twice; the samples before it have been yielded.
    """
    key, sample = None, dict[str, Member]()
    try:
        for member in members:
            split = split_name(member.name)
            if split is None:
                continue
            if split[0] != key:
                if key is not None:
                    yield key, sample
                key, sample = split[0], {}
            if split[1] in sample or split[1] in _TAKEN:
                raise twice(shard, member.name, None if split[1] in _TAKEN else sample[split[1]].name)
            sample[split[1]] = member
    except DamagedShardError as error:
        if key is not None and ends_before(key, error):
            yield key, sample
        raise
    if key is not None:
        yield key, sample


def twice(shard: str, name: str, first: str | None) -> DamagedShardError:
    """Return the error of a shard in which a sample has an extension twice.

    Args:
        shard: Its URL for messages, without credentials.
        name: The second member.
        first: The first one; None: it is a field that WebDataset puts into samples.
    """
    beside = "WebDataset's own field" if first is None else repr(first)
    return DamagedShardError(
        f"{shard or 'a shard'} has {name!r} beside {beside}, and a sample has one part of each extension: rename or remove one "
        "of them"
    )


def ends_before(key: str, damage: DamagedShardError) -> bool:
    """Return whether a sample is known to end before the damage."""
    follows = damage.context.get("follows")
    if not isinstance(follows, str):
        return False
    split = split_name(follows)
    return not follows or (split is not None and split[0] != key)
