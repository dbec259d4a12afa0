"""Folders of a prefix are listed side by side, and come in the order of their names."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.config import StorageOptions
from sqlstream.errors import TransientStorageError
from sqlstream.storage.backends import listing
from sqlstream.storage.backends.listing import Level, spread
from sqlstream.storage.base.protocols import ObjectInfo
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import LocalS3

NAMES = st.lists(st.text(alphabet="ab-./", min_size=1, max_size=6).map(lambda name: name.strip("/") or "a"), max_size=60)


class Tree:
    """Names below `s3://b/`, as a store lists them; counts what is asked."""

    def __init__(self, names: list[str]) -> None:
        self.urls = sorted({f"s3://b/{name}" for name in names})
        self.asked: list[str] = []
        self.threads: set[threading.Thread] = set()  # not their numbers: those of the ended are used again

    def listed(self, prefix: str) -> Iterator[ObjectInfo]:
        self.asked.append(prefix)
        for url in self.urls:
            self.threads.add(threading.current_thread())
            if url.startswith(prefix):
                yield ObjectInfo(url=url, size_bytes=1, etag=None)

    def level_of(self, prefix: str) -> Level:
        below = [url.removeprefix(prefix).partition("/") for url in self.urls if url.startswith(prefix)]
        objects = [ObjectInfo(url=prefix + name, size_bytes=1, etag=None) for name, slash, _ in below if not slash]
        return Level(objects=tuple(objects), folders=tuple(sorted({f"{prefix}{name}/" for name, slash, _ in below if slash})))


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "PAGE", 3)
    monkeypatch.setattr(listing, "MAX_AHEAD", 1)


@pytest.mark.usefixtures("small_pages")
@given(names=NAMES)
def test_every_object_comes_once_in_the_order_of_names(names: list[str]) -> None:
    tree = Tree([name.replace("//", "/") for name in names])
    assert [info.url for info in spread("s3://b/", tree.listed, tree.level_of)] == tree.urls


@pytest.mark.usefixtures("small_pages")
def test_a_small_or_flat_prefix_costs_one_listing_and_a_nested_one_a_listing_a_folder() -> None:
    for names in (["a/1", "b/2"], [str(i) for i in range(50)]):
        tree = Tree(names)
        assert len(list(spread("s3://b/", tree.listed, tree.level_of))) == len(names)
        assert tree.asked == ["s3://b/"]
    tree = Tree([f"top/{folder}/{number}" for folder in "abc" for number in range(10)])
    assert len(list(spread("s3://b/", tree.listed, tree.level_of))) == 30
    assert sorted(tree.asked[2:]) == ["s3://b/top/a/", "s3://b/top/b/", "s3://b/top/c/"]
    assert len(tree.threads) == 4, "each folder in a thread of its own, the rest in ours"


@pytest.mark.usefixtures("small_pages")
def test_a_listing_that_is_left_early_ends_its_threads() -> None:
    tree = Tree([f"{folder}/{number}" for folder in range(40) for number in range(40)])
    objects = spread("s3://b/", tree.listed, tree.level_of)
    assert len(list(islice(objects, 5))) == 5
    assert sum(thread.name == "list" for thread in threading.enumerate()) > 0
    objects.close()  # type: ignore[attr-defined]  # a generator
    assert sum(thread.name == "list" for thread in threading.enumerate()) == 0
    assert len(tree.asked) == 1 + listing.FOLDERS_AT_A_TIME, "no more folders than may be under way"


@pytest.mark.usefixtures("small_pages")
def test_what_a_folder_raises_comes_out_in_its_place() -> None:
    tree = Tree([f"{folder}/{number}" for folder in "abc" for number in range(10)])

    def failing(prefix: str) -> Iterator[ObjectInfo]:
        yield from tree.listed(prefix)
        if prefix.endswith("b/") and prefix != "s3://b/":
            raise TransientStorageError("broken off")

    objects = spread("s3://b/", failing, tree.level_of)
    whole_pages = [info.url for info in islice(objects, 19)]
    with pytest.raises(TransientStorageError, match="broken off"):
        next(objects)
    assert whole_pages == tree.urls[:19]


def test_a_bucket_of_folders_is_listed_whole(s3: LocalS3) -> None:
    names = [f"{folder}/{number:04}.jpg" for folder in ("a", "b", "c-d", "e") for number in range(400)]
    urls = s3.put_many("listing/top/", names)
    fetcher = Fetcher(StorageOptions(storage_options=s3.storage_options))
    try:
        assert [info.url for info in fetcher.list("s3://listing/top/")] == sorted(urls)
    finally:
        fetcher.stop()
