"""Folders of a prefix are listed side by side, and come in the order of their names."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.config import StorageOptions
from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.backends.listing import Level, ListingBounds, spread
from sqlstream.storage.backends.obstore import ObstoreStorage
from sqlstream.storage.base.protocols import ObjectInfo
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import LocalS3
from tests.storage.raw import RawServer

NAMES = st.lists(st.text(alphabet="ab-./", min_size=1, max_size=6).map(lambda name: name.strip("/") or "a"), max_size=60)


class Tree:
    """Names below `s3://b/`, as a store lists them; counts what is asked."""

    def __init__(self, names: list[str]) -> None:
        self.urls = sorted({f"s3://b/{name}" for name in names})
        self.asked: list[str] = []
        self.threads: set[threading.Thread] = set()  # not their numbers: those of the ended are used again

    def listed(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        self.asked.append(prefix)
        for url in self.urls:
            self.threads.add(threading.current_thread())
            if url.startswith(prefix) and url > after:
                yield ObjectInfo(url=url, size_bytes=1, etag=None)

    def level_of(self, prefix: str) -> Level:
        below = [url.removeprefix(prefix).partition("/") for url in self.urls if url.startswith(prefix)]
        objects = [ObjectInfo(url=prefix + name, size_bytes=1, etag=None) for name, slash, _ in below if not slash]
        return Level(objects=tuple(objects), folders=tuple(sorted({f"{prefix}{name}/" for name, slash, _ in below if slash})))


SMALL = ListingBounds(page=3, max_pages_ahead=1)


@given(names=NAMES)
def test_every_object_comes_once_in_the_order_of_names(names: list[str]) -> None:
    tree = Tree([name.replace("//", "/") for name in names])
    assert [info.url for info in spread("s3://b/", tree.listed, tree.level_of, SMALL)] == tree.urls


@given(names=NAMES, data=st.data())
def test_a_listing_goes_on_behind_any_of_its_objects(names: list[str], data: st.DataObject) -> None:
    tree = Tree([name.replace("//", "/") for name in names])
    place = data.draw(st.integers(0, len(tree.urls)))
    after = tree.urls[place - 1] if place else ""
    given = [info.url for info in spread("s3://b/", tree.listed, tree.level_of, SMALL, after=after)]
    assert given == tree.urls[place:]


def test_folders_before_that_object_are_not_listed_again() -> None:
    tree = Tree([f"{folder}/{number}" for folder in "abcd" for number in range(10)])
    assert len(list(spread("s3://b/", tree.listed, tree.level_of, SMALL, after="s3://b/c/4"))) == 15
    assert sorted(tree.asked) == ["s3://b/", "s3://b/c/", "s3://b/d/"]


def test_a_small_or_flat_prefix_costs_one_listing_and_a_nested_one_a_listing_a_folder() -> None:
    for names in (["a/1", "b/2"], [str(i) for i in range(50)]):
        tree = Tree(names)
        assert len(list(spread("s3://b/", tree.listed, tree.level_of, SMALL))) == len(names)
        assert tree.asked == ["s3://b/"]
    tree = Tree([f"top/{folder}/{number}" for folder in "abc" for number in range(10)])
    assert len(list(spread("s3://b/", tree.listed, tree.level_of, SMALL))) == 30
    assert sorted(tree.asked[2:]) == ["s3://b/top/a/", "s3://b/top/b/", "s3://b/top/c/"]
    assert len(tree.threads) == 4, "each folder in a thread of its own, the rest in ours"


def test_a_listing_that_is_left_early_ends_its_threads() -> None:
    tree = Tree([f"{folder}/{number}" for folder in range(40) for number in range(40)])
    objects = spread("s3://b/", tree.listed, tree.level_of, SMALL)
    assert len(list(islice(objects, 5))) == 5
    assert sum(thread.name == "list" for thread in threading.enumerate()) > 0
    objects.close()  # type: ignore[attr-defined]  # a generator
    assert sum(thread.name == "list" for thread in threading.enumerate()) == 0
    assert len(tree.asked) == 1 + SMALL.folders_at_a_time, "no more folders than may be under way"


def test_what_a_folder_raises_comes_out_in_its_place() -> None:
    tree = Tree([f"{folder}/{number}" for folder in "abc" for number in range(10)])

    def failing(prefix: str, after: str) -> Iterator[ObjectInfo]:
        yield from tree.listed(prefix, after)
        if prefix.endswith("b/") and prefix != "s3://b/":
            raise TransientStorageError("broken off")

    objects = spread("s3://b/", failing, tree.level_of, SMALL)
    whole_pages = [info.url for info in islice(objects, 19)]
    with pytest.raises(TransientStorageError, match="broken off"):
        next(objects)
    assert whole_pages == tree.urls[:19]


NAMED = [f"p/{number:04}" for number in range(2500)]


def page(names: Sequence[str], token: str = "", *, is_cut: bool = False) -> bytes:
    """Return an answer to ListObjectsV2."""
    following = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    dated = "<LastModified>2024-01-01T00:00:00.000Z</LastModified><ETag>&quot;1&quot;</ETag><Size>1</Size>"
    objects = "".join(f"<Contents><Key>{name}</Key>{dated}</Contents>" for name in names)
    body = f"<ListBucketResult><IsTruncated>{str(is_cut).lower()}</IsTruncated>{following}{objects}</ListBucketResult>"
    return f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def names_of(server: RawServer, prefix: str = "s3://bucket/p/", most: int = 10_000) -> list[str]:
    endpoint = server.url.removesuffix("/bucket/x")
    storage = ObstoreStorage(StorageOptions(storage_options={"endpoint_url": endpoint, "region": "r", "anon": True}))
    return [info.url.removeprefix("s3://bucket/") for info in islice(storage.list(prefix), most)]


def test_a_listing_without_a_token_goes_on_behind_its_last_name() -> None:
    """So answers a server that knows only the first version of ListObjects, or a proxy that drops what it does not know."""

    def answer(request: str) -> bytes:
        after = re.search(r"start-after=p%2F(\d+)", request)
        start = int(after[1]) + 1 if after else 0
        return page(NAMED[start : start + 1000], is_cut=start + 1000 < len(NAMED))

    with RawServer(always=answer) as server:
        assert names_of(server) == NAMED
        assert len(server.requests) == 3


def test_a_directory_bucket_which_has_no_order_goes_on_behind_that_object() -> None:
    prefix, names = "s3://b--use1-az1--x-s3/p/", ["p/c", "p/a", "p/b"]
    with RawServer(always=lambda request: page([]) if "start-after" in request else page(names)) as server:
        options = {"endpoint_url": server.url.removesuffix("/bucket/x"), "region": "r", "anon": True}
        storage = ObstoreStorage(StorageOptions(storage_options=options))
        assert [info.url[-1] for info in storage.list(prefix, after=f"{prefix}c")] == ["a", "b"]
        with pytest.raises(StorageError, match="p/gone, behind which it goes on, is gone"):
            list(storage.list(prefix, after=f"{prefix}gone"))


def test_a_whole_page_is_the_last_one_if_nothing_follows() -> None:
    with RawServer(page(NAMED[:1000]), page([])) as server:
        assert names_of(server) == NAMED[:1000]


@pytest.mark.parametrize(("size", "token"), [(1000, ""), (1000, "again"), (700, "again"), (2500, "again")])
def test_a_server_that_gives_the_same_page_again_is_refused(size: int, token: str) -> None:
    with RawServer(always=page(NAMED[:size], token, is_cut=True)) as server, pytest.raises(StorageError, match="same page"):
        names_of(server)


def test_a_server_that_gives_the_same_page_again_is_not_asked_for_folders() -> None:
    """obstore gathers all pages of them before it answers."""
    nested = page([f"p/a/{number}" for number in range(1000)], "again", is_cut=True)
    with RawServer(always=lambda request: page([]) if "delimiter" in request else nested) as server:
        with pytest.raises(StorageError, match="same page"):
            names_of(server)
        assert len(server.requests) == 2


def test_objects_of_pages_that_overlap_come_once() -> None:
    with RawServer(page(NAMED[:1000], "x", is_cut=True), page(NAMED[990:1500])) as server:
        assert names_of(server) == NAMED[:1500]


def test_what_is_not_below_the_prefix_is_not_listed() -> None:
    """The mark of an empty folder, to obstore an object of the folder's own name; what a server adds that ignores prefixes."""
    with RawServer(page(["p/", "p/x", "p/x/", "q/y", "p"])) as server:
        assert names_of(server) == ["p/x"]


@pytest.mark.parametrize("name", ["p/a//b", "p/../d", "p/a&#10;b"])
def test_a_name_that_obstore_cannot_spell_is_an_error_with_its_cure_and_not_left_out(name: str) -> None:
    with RawServer(always=page(["p/a", name, "p/zz"])) as server, pytest.raises(StorageError, match="to 'fsspec'"):
        names_of(server)


def test_a_bucket_of_folders_is_listed_whole(s3: LocalS3) -> None:
    names = [f"{folder}/{number:04}.jpg" for folder in ("a", "b", "c-d", "e") for number in range(400)]
    urls = s3.put_many("listing/top/", names)
    fetcher = Fetcher(StorageOptions(storage_options=s3.storage_options))
    try:
        assert [info.url for info in fetcher.list("s3://listing/top/")] == sorted(urls)
    finally:
        fetcher.stop()
