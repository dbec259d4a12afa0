"""Objects of a listed directory: their sizes are known, and an object that changed since is never taken for what was listed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.dirfs import DirFileSystem

from sqlstream import StreamingDataset
from sqlstream.cache.model.refs import charged_bytes
from sqlstream.errors import ObjectChangedError
from sqlstream.testing.servers import FaultyHttpServer
from tests.cache.session import Session

SIZE = 200_000
"""Above the guess at a size that is not known."""


def fill(server: FaultyHttpServer, version: int, size: int = SIZE) -> str:
    for at in range(4):
        server.objects[f"/bucket/photos/{at}.bin"] = server.objects[f"/bucket/photos/{at}.jpg"] = bytes([version]) * size
    return "s3://bucket/photos/"


def options_of(server: FaultyHttpServer) -> dict[str, Any]:
    return {"endpoint_url": server.url, "anon": True, "region": "us-east-1"}


def dataset_of(src: str, directory: Path, server: FaultyHttpServer, **options: Any) -> StreamingDataset:
    return StreamingDataset(
        src,
        directory,
        data_type="image",
        columns_to_download=["jpg"],
        storage_options=options_of(server),
        num_random_access_retries=0,
        show_progress=False,
        **options,
    )


class OtherVersions(DirFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Names other versions in answers than in listings, as `hf` does."""

    def info(self, path: str, **options: object) -> dict[str, object]:
        return {**super().info(path, **options), "ETag": f"of {path}"}


def content(sample: dict[str, Any]) -> bytes:
    return Path(sample["jpg"]).read_bytes()


def test_columns_are_those_of_a_listing_without_versions(server: FaultyHttpServer, tmp_path: Path) -> None:
    with dataset_of(fill(server, 1), tmp_path / "cache", server) as dataset:
        assert {name for name in dataset[0] if not name.startswith("__")} == {"index", "bin", "jpg", "image"}


def test_room_is_reserved_for_what_the_listing_says(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = fill(server, 1)
    with dataset_of(
        src, tmp_path / "cache", server, cache_limit=charged_bytes(SIZE)
    ) as dataset:  # a guess would not fit beside it
        reserved = []
        reserve = Session(dataset.cache).downloads.sizes.reservation_bytes
        Session(dataset.cache).downloads.sizes.reservation_bytes = (  # type: ignore[method-assign]  # looked at
            lambda ref, **options: reserved.append(reserve(ref, **options)) or reserved[-1]  # type: ignore[func-returns-value]
        )
        assert content(dataset[1]) == b"\x01" * SIZE
        assert set(reserved) == {charged_bytes(SIZE)}


@pytest.mark.parametrize("size", [SIZE, SIZE + 1], ids=["same size", "another size"])
def test_an_object_that_changed_since_it_was_listed_is_an_error(server: FaultyHttpServer, tmp_path: Path, size: int) -> None:
    src = fill(server, 1)
    with dataset_of(src, tmp_path / "cache", server) as dataset:
        assert content(dataset[0]) == b"\x01" * SIZE
        fill(server, 2, size)
        with pytest.raises(ObjectChangedError, match="changed since it was indexed"):
            dataset[1]
        assert content(dataset[0]) == b"\x01" * SIZE  # as it was listed


@pytest.mark.parametrize("size", [SIZE, SIZE + 1], ids=["same size", "another size"])
def test_a_new_listing_never_finds_the_old_object_in_the_cache(server: FaultyHttpServer, tmp_path: Path, size: int) -> None:
    src = fill(server, 1)
    with dataset_of(src, tmp_path / "cache", server) as dataset:
        assert [content(sample) for sample in dataset] == [b"\x01" * SIZE] * 4
    fill(server, 2, size)
    for _ in range(2):
        with dataset_of(src, tmp_path / "cache", server) as dataset:
            assert content(dataset[3]) == b"\x02" * size
            assert [content(sample) for sample in dataset] == [b"\x02" * size] * 4


@pytest.mark.parametrize("is_in_answers", [True, False])
def test_a_new_listing_of_a_file_system_drops_the_old_object_where_its_answers_name_the_same_version(
    tmp_path: Path, is_in_answers: bool
) -> None:
    folder = tmp_path / "root" / "photos"
    folder.mkdir(parents=True)
    kind = DirFileSystem if is_in_answers else OtherVersions
    file_system = kind(path=str(tmp_path / "root"), fs=fsspec.filesystem("file"))
    for version in (1, 2):
        for at in range(2):
            (folder / f"{at}.jpg").write_bytes(bytes([version]) * SIZE)
            os.utime(folder / f"{at}.jpg", (version + 0.5, version + 0.5))
        with StreamingDataset(
            "dir://photos/",
            tmp_path / "cache",
            data_type="image",
            columns_to_download=["jpg"],
            storage_options={"filesystem": file_system},
            allowed_roots=["dir://photos/"],
            show_progress=False,
        ) as dataset:
            found = [content(sample)[:1] for sample in dataset]
    assert found == [b"\x02" if is_in_answers else b"\x01"] * 2, "what lists and what answers must name one version"


def test_an_old_object_that_is_in_use_is_an_error_and_stays(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = fill(server, 1)
    with dataset_of(src, tmp_path / "cache", server) as old:
        held = old[0]
        fill(server, 2)
        with dataset_of(src, tmp_path / "cache", server) as new:
            with pytest.raises(ObjectChangedError, match="in another version than its listing names"):
                new[0]
            assert content(held) == b"\x01" * SIZE
            assert content(new[1]) == b"\x02" * SIZE


def test_what_a_transform_names_is_not_what_was_listed(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = fill(server, 1)
    with dataset_of(
        src, tmp_path / "cache", server, predownload_transforms=[lambda sample: {**sample, "jpg": "0.bin"}]
    ) as dataset:
        server.objects["/bucket/photos/0.bin"] = b"changed since"
        assert content(dataset[2]) == b"changed since"


def test_an_object_that_a_table_names_is_the_same_entry(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = fill(server, 1)
    table = tmp_path / "table.csv"
    table.write_text("index,jpg\n1,s3://bucket/photos/1.jpg\n")
    with dataset_of(src, tmp_path / "cache", server) as dataset:
        path = dataset[1]["jpg"]
    with StreamingDataset(table, tmp_path / "cache", columns_to_download=["jpg"], storage_options=options_of(server)) as named:
        assert named[0]["jpg"] == path
    assert len([request for request in server.requests("/bucket/photos/1.jpg") if request.method == "GET"]) == 1
