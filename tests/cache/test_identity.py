"""Objects that differ in more than their URL never share a file of the cache."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.testing.servers import FaultyHttpServer


@pytest.fixture
def other() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


def read(directory: Path, url: str, **options: Any) -> bytes:
    with Cache(directory, limit=1 << 20, **options) as cache, cache.pinned(url) as path:
        return path.read_bytes()


def s3(endpoint: str, **options: str) -> dict[str, object]:
    return {"endpoint_url": endpoint, "anon": True, "region": "us-east-1", **options}


def test_one_url_at_two_endpoints_is_two_objects(server: FaultyHttpServer, other: FaultyHttpServer, directory: Path) -> None:
    url = "s3://data/a.bin"
    server.objects["/data/a.bin"], other.objects["/data/a.bin"] = b"production", b"staging"
    for _ in range(2):
        assert read(directory, url, storage_options=s3(server.url)) == b"production"
        assert read(directory, url, storage_options=s3(other.url)) == b"staging"
    assert len(server.requests("/data/a.bin")) == len(other.requests("/data/a.bin")) == 1


def test_another_access_key_finds_what_is_there(server: FaultyHttpServer, directory: Path) -> None:
    server.objects["/data/a.bin"] = b"once"
    for number in range(2):
        options = {"endpoint_url": server.url, "region": "us-east-1", "key": f"key{number}", "secret": f"secret{number}"}
        assert read(directory, "s3://data/a.bin", storage_options=options) == b"once"
    assert len(server.requests("/data/a.bin")) == 1


def test_names_with_a_hash_or_a_question_mark_are_objects_of_their_own(server: FaultyHttpServer, directory: Path) -> None:
    names = ["u@x/track#1.mp3", "u@x/track#2.mp3", "q?sp=1", "q?sp=2", "q"]
    for name in names:
        server.objects[f"/data/{name}"] = name.encode()
    with Cache(directory, limit=1 << 20, storage_options=s3(server.url)) as cache:
        paths = cache.acquire_many([f"s3://data/{name}" for name in names])
        assert [path.read_bytes().decode() for path in paths] == names


def test_a_dataset_reads_its_own_endpoint_by_rows_and_by_epochs(
    server: FaultyHttpServer, other: FaultyHttpServer, directory: Path, tmp_path: Path
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("index,file\n" + "".join(f"{i},s3://data/{i}.bin\n" for i in range(4)))
    for name, one in (("production", server), ("staging", other)):
        one.objects.update({f"/data/{i}.bin": f"{name} {i}".encode() for i in range(4)})
    for name, one in (("production", server), ("staging", other)):
        dataset = StreamingDataset(
            str(table), str(directory), columns_to_download=["file"], storage_options=s3(one.url), transforms=[_read]
        )
        with dataset.cache:
            assert [dataset[i]["file"].decode() for i in range(4)] == [f"{name} {i}" for i in range(4)]
            assert sorted(sample["file"].decode() for sample in dataset) == [f"{name} {i}" for i in range(4)]


def _read(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "file": Path(sample["file"]).read_bytes()}


def test_a_namespace_parts_principals_and_travels_with_the_cache(server: FaultyHttpServer, directory: Path) -> None:
    url = f"{server.url}/me"
    for name in ("alice", "bob"):
        server.objects["/me"] = name.encode()  # as a server answers by who asks
        headers = {"headers": {"Authorization": f"Bearer {name}"}}
        assert read(directory, url, storage_options=headers, cache_namespace=name) == name.encode()
    with Cache(directory, limit=1 << 20, cache_namespace="alice") as cache:
        again = pickle.loads(pickle.dumps(cache))
        with again, again.pinned(url) as path:
            assert path.read_bytes() == b"alice"
    assert len(server.requests("/me")) == 2


def test_a_dataset_hands_its_namespace_on(server: FaultyHttpServer, directory: Path, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"index,file\n1,{server.url}/me\n")
    for name in ("alice", "bob"):
        server.objects["/me"] = name.encode()
        dataset = StreamingDataset(
            str(table), str(directory), columns_to_download=["file"], cache_namespace=name, transforms=[_read]
        )
        with dataset.cache:
            assert dataset[0]["file"] == name.encode()


def names(*servers: FaultyHttpServer) -> None:
    for number, one in enumerate(servers):
        one.objects.update({f"/data/{name}": f"server {number}".encode() for name in "abc"})


def content(cache: Cache, name: str) -> bytes:
    with cache.pinned(f"s3://data/{name}") as path:
        return path.read_bytes()


def test_a_helper_that_is_started_again_has_the_environment_of_its_first(
    server: FaultyHttpServer, other: FaultyHttpServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(server, other)
    options = {"anon": True, "region": "us-east-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with Cache(directory, limit=1 << 20, storage_options=options) as first:
        assert content(first, "a") == b"server 0"
        first.rest()
        monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
        assert content(first, "b") == b"server 0"
        with Cache(directory, limit=1 << 20, storage_options=options) as second:
            assert content(second, "b") == b"server 1"
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        with Cache(directory, limit=1 << 20, storage_options=options) as third:
            assert [content(third, name) for name in "bc"] == [b"server 0"] * 2


def test_what_changes_before_the_first_use_changes_neither_server_nor_key(
    server: FaultyHttpServer, other: FaultyHttpServer, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names(server, other)
    options: dict[str, Any] = {"anon": True, "region": "us-east-1"}
    nested: dict[str, Any] = {**options, "client_kwargs": {"endpoint_url": server.url}}
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
    with Cache(directory, limit=1 << 20, storage_options=options) as by_environment:
        with Cache(directory, limit=1 << 20, storage_options=nested) as by_options:
            nested["client_kwargs"]["endpoint_url"] = other.url
            monkeypatch.setenv("AWS_ENDPOINT_URL", other.url)
            assert content(by_options, "a") == content(by_environment, "b") == b"server 0"
            again = pickle.loads(pickle.dumps(by_options))
            with again:
                assert content(again, "c") == b"server 0"
        with Cache(directory, limit=1 << 20, storage_options=options) as later:
            assert [content(later, name) for name in "ab"] == [b"server 1"] * 2
