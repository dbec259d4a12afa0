"""The contract of a backend, one subclass for each backend and server."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, StorageError
from sqlstream.storage.base.etags import same_version
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.nginx import Nginx, find_nginx
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from tests.storage.azurite import ACCOUNT, KEY, Azurite
from tests.storage.spawned import SpawnedStorage

DATA = bytes(range(256)) * 12_000  # 3 MB: more than one chunk


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield pool


class Stopping(Fetcher):
    """Stops where `contextlib.closing` closes."""

    close = Fetcher.stop


@dataclass
class Site:
    """A backend, and a way to put objects where it reads."""

    storage: SpawnedStorage
    put: Callable[[str, bytes], str]
    root: str
    """URL of the directory that `put` fills, with its slash."""
    put_many: Callable[[str, list[str]], list[str]] = field(default=lambda prefix, names: [])
    """Puts empty objects below a directory."""


class StorageContract:
    """What every backend promises."""

    def test_get_streams_the_whole_object_with_its_size_and_etag(self, site: Site) -> None:
        url = site.put("a/whole.bin", DATA)
        info, chunks = site.storage.get(url)
        assert b"".join(chunks) == DATA
        assert (info.url, info.size_bytes) == (url, len(DATA))
        assert info.etag
        assert info.etag == site.storage.head(url).etag

    def test_get_of_an_empty_object_is_empty(self, site: Site) -> None:
        info, chunks = site.storage.get(site.put("a/empty.bin", b""))
        assert (info.size_bytes, b"".join(chunks)) == (0, b"")

    def test_head_gives_size_and_etag(self, site: Site) -> None:
        info = site.storage.head(site.put("a/head.bin", b"12345"))
        assert info.size_bytes == 5
        assert info.etag

    def test_get_range_gives_exactly_the_bytes_asked_for(self, site: Site) -> None:
        url = site.put("a/range.bin", DATA)
        assert site.storage.get_range(url, 1000, 2_000_000) == DATA[1000:2_000_000]
        assert site.storage.get_range(url, 5, 5) == b""

    def test_get_ranges_keeps_the_order_asked(self, site: Site) -> None:
        url = site.put("a/ranges.bin", DATA)
        assert site.storage.get_ranges(url, [(500, 510), (0, 3)]) == [DATA[500:510], DATA[:3]]

    def test_get_range_past_the_end_is_an_error_not_a_short_answer(self, site: Site) -> None:
        url = site.put("a/short.bin", b"12345")
        with pytest.raises(StorageError):
            site.storage.get_range(url, 2, 50)

    def test_a_missing_object_is_not_found(self, site: Site) -> None:
        for operation in (site.storage.head, site.storage.get):
            with pytest.raises(ObjectNotFoundError, match="nothing-here does not exist"):
                operation(site.root + "nothing-here")

    def test_odd_names_are_read_as_they_are_spelled(self, site: Site) -> None:
        for name in ("a b.bin", "ü-日本.bin", "plus+and&.bin", "dot.dot..bin", "~tilde=.bin"):
            url = site.put(f"odd/{name}", name.encode())
            assert b"".join(site.storage.get(url)[1]) == name.encode()


class ListingContract(StorageContract):
    """For backends whose server has a listing."""

    def test_list_yields_every_object_below_the_prefix_across_pages(self, site: Site) -> None:
        urls = [site.put(f"many/{i % 7}/{i:04}", b"x" * (i % 3)) for i in range(9)]
        urls += site.put_many("many/empty/", [f"{i:04}" for i in range(1050)])
        site.put("many-not/0001", b"")
        found = site.storage.objects_below(site.root + "many/")
        assert sorted(info.url for info in found) == sorted(urls)
        assert {info.size_bytes for info in found} == {0, 1, 2}
        assert all(info.etag for info in found)

    def test_list_names_versions_as_head_does(self, site: Site) -> None:
        url = site.put("versions/x", b"x")
        (found,) = site.storage.objects_below(f"{site.root}versions/")
        assert found.etag is not None
        assert same_version(found.etag, site.storage.head(url).etag)

    def test_list_of_nothing_is_empty(self, site: Site) -> None:
        assert site.storage.objects_below(site.root + "no/such/prefix/") == []

    def test_put_stores_a_file_and_replaces_what_was_there(self, site: Site, tmp_path: Path) -> None:
        file, url = tmp_path / "to be put", f"{site.root}put/new.bin"
        for data in (DATA, b"less", b""):
            file.write_bytes(data)
            site.storage.put(url, file)
            assert b"".join(site.storage.get(url)[1]) == data
        assert [info.url for info in site.storage.objects_below(f"{site.root}put/")] == [url]


def s3_site(pool: ProcessPoolExecutor, s3: LocalS3, backend: str) -> Site:
    options = StorageOptions(storage_options=s3.storage_options)
    bucket = f"contract-{backend}"
    return Site(
        SpawnedStorage(pool, backend, options),
        lambda name, data: s3.put(f"{bucket}/{name}", data),
        f"s3://{bucket}/",
        lambda prefix, names: s3.put_many(f"{bucket}/{prefix}", names),
    )


def http_site(pool: ProcessPoolExecutor, server: FaultyHttpServer, backend: str) -> Site:
    def put(name: str, data: bytes) -> str:
        server.objects[f"/data/{name}"] = data
        return f"{server.url}/data/{name}"

    return Site(SpawnedStorage(pool, backend, StorageOptions()), put, f"{server.url}/data/")


@contextlib.contextmanager
def nginx_site(pool: ProcessPoolExecutor, root: Path, scheme: str) -> Iterator[Site]:
    def put(name: str, data: bytes) -> str:
        path = root / "contract" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return f"{scheme}://contract/{name}"

    if find_nginx() is None:
        pytest.skip("nginx is not on this machine: scripts/install_servers.sh installs it")
    with Nginx(root) as nginx:
        options = StorageOptions(storage_options=nginx.s3_options if scheme == "s3" else nginx.gs_options)
        yield Site(SpawnedStorage(pool, "obstore", options), put, f"{scheme}://contract/")


def check_large_file(site: Site, bucket: str, s3: LocalS3, file: Path) -> None:
    data = DATA * 6  # 18 MB
    file.write_bytes(data)
    site.storage.put(site.root + "large.bin", file)
    assert b"".join(site.storage.get(site.root + "large.bin")[1]) == data
    sent = [request.method for request in s3.requests() if request.path == f"/{bucket}/large.bin"]
    assert (sent.count("PUT"), sent.count("POST")) == (3, 2)


class HttpContract(StorageContract):
    """And what HTTP servers do besides."""

    def test_a_server_without_ranges_still_gives_the_range(self, site: Site, server: FaultyHttpServer) -> None:
        url = site.put("x", DATA)
        server.script("/data/x", always=FaultyAnswer(fault=Fault.NO_RANGES))
        assert site.storage.get_range(url, 10, 20) == DATA[10:20]


class TestObstoreOnS3(ListingContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, s3: LocalS3) -> Site:
        s3.put("contract-obstore/x", b"")
        return s3_site(pool, s3, "obstore")

    def test_a_large_file_goes_in_parts(self, site: Site, s3: LocalS3, tmp_path: Path) -> None:
        check_large_file(site, "contract-obstore", s3, tmp_path / "large")


class TestFsspecOnS3(ListingContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, s3: LocalS3) -> Site:
        s3.put("contract-fsspec/x", b"")
        return s3_site(pool, s3, "fsspec")


class TestUrllib3OnHttp(HttpContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, server: FaultyHttpServer) -> Site:
        return http_site(pool, server, "urllib3")

    def test_head_that_the_server_refuses_is_asked_with_get(self, site: Site, server: FaultyHttpServer) -> None:
        url = site.put("x", DATA)
        server.script("/data/x", FaultyAnswer(fault=Fault.STATUS, status=405))
        assert site.storage.head(url).size_bytes == len(DATA)


class TestFsspecOnHttp(HttpContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, server: FaultyHttpServer) -> Site:
        return http_site(pool, server, "fsspec")


class TestObstoreOnGcs(ListingContract):
    """The emulator lacks the XML API that obstore speaks; that of S3, as moto has it, is nearly the same."""

    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, s3: LocalS3) -> Site:
        s3.put("gcscontract/x", b"")
        options = StorageOptions(storage_options={"endpoint_url": s3.endpoint_url, "bearer_token": "any"})
        return Site(
            SpawnedStorage(pool, "obstore", options),
            lambda name, data: s3.put(f"gcscontract/{name}", data).replace("s3:", "gs:"),
            "gs://gcscontract/",
            lambda prefix, names: [url.replace("s3:", "gs:") for url in s3.put_many(f"gcscontract/{prefix}", names)],
        )

    def test_a_large_file_goes_in_parts(self, site: Site, s3: LocalS3, tmp_path: Path) -> None:
        check_large_file(site, "gcscontract", s3, tmp_path / "large")


class TestObstoreOnNginxGcs(StorageContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, tmp_path: Path) -> Iterator[Site]:
        with nginx_site(pool, tmp_path, "gs") as site:
            yield site


class TestObstoreOnNginxS3(StorageContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, tmp_path: Path) -> Iterator[Site]:
        with nginx_site(pool, tmp_path, "s3") as site:
            yield site


class TestObstoreOnAzure(ListingContract):
    """With the address that fsspec users write, account and all."""

    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, azurite: Azurite) -> Site:
        root = f"abfs://contract@{ACCOUNT}.dfs.core.windows.net/"

        def put(name: str, data: bytes) -> str:
            azurite.put(f"contract/{name}", data)
            return root + name

        def put_many(prefix: str, names: list[str]) -> list[str]:
            return [put(f"{prefix}{name}", b"") for name in names[:60]]  # 3 ms each, and paging is tested with S3

        put("x", b"")
        options = {"account_key": KEY, "endpoint_url": azurite.endpoint_url}
        return Site(SpawnedStorage(pool, "obstore", StorageOptions(storage_options=options)), put, root, put_many)


@pytest.mark.parametrize("way", ["account key", "shared access signature", "nothing, of a public container", "environment"])
def test_azure_takes_each_kind_of_credentials(
    azurite: Azurite, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read with the right ones, refused with none, and not shown."""
    azurite.put("private/x", b"secret")
    azurite.put("public/x", b"secret", is_public=True)
    where = {"account_name": ACCOUNT, "endpoint_url": azurite.endpoint_url}
    options: dict[str, dict[str, object]] = {
        "account key": {**where, "account_key": KEY},
        "shared access signature": {**where, "sas_token": azurite.sas_token()},
        "nothing, of a public container": {**where, "anon": True},
        "environment": {"endpoint_url": azurite.endpoint_url},
    }
    if way == "environment":
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    with contextlib.closing(Stopping(StorageOptions(storage_options=options[way], num_retries=0))) as fetcher:
        fetcher.download(f"az://{'public' if 'public' in way else 'private'}/x", tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == b"secret"
    with (
        contextlib.closing(Stopping(StorageOptions(storage_options={**where, "anon": True}, num_retries=0))) as fetcher,
        pytest.raises((AccessDeniedError, ObjectNotFoundError)),
    ):
        fetcher.head("az://private/x")


class TestGcsfs(ListingContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, gcs: str) -> Site:
        def post(path: str, data: bytes, kind: str) -> None:
            request = urllib.request.Request(f"{gcs}/{path}", data=data, headers={"Content-Type": kind})
            urllib.request.urlopen(request).close()

        def put(name: str, data: bytes) -> str:
            details = json.dumps({"name": name}).encode()
            part = b"--cut\r\nContent-Type: application/%s\r\n\r\n%s\r\n"
            body = part % (b"json", details) + part % (b"x-test", data) + b"--cut--"
            post("upload/storage/v1/b/contract/o?uploadType=multipart", body, "multipart/related; boundary=cut")
            return f"gs://contract/{name}"

        def put_many(prefix: str, names: list[str]) -> list[str]:
            return [put(f"{prefix}{name}", b"") for name in names[:60]]  # 9 ms each, and paging is tested with S3

        with contextlib.suppress(urllib.error.HTTPError):  # 409: it is there
            post("storage/v1/b?project=test", b'{"name": "contract"}', "application/json")
        options = {"backend": "fsspec", "endpoint_url": gcs, "token": "anon", "project": "test"}
        return Site(SpawnedStorage(pool, "fsspec", StorageOptions(storage_options=options)), put, "gs://contract/", put_many)


class TestFsspecOnLocalFiles(ListingContract):
    @pytest.fixture
    def site(self, pool: ProcessPoolExecutor, tmp_path: Path) -> Site:
        def put(name: str, data: bytes) -> str:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_bytes(data)
            return str(tmp_path / name)

        def put_many(prefix: str, names: list[str]) -> list[str]:
            return [put(f"{prefix}{name}", b"") for name in names]

        return Site(SpawnedStorage(pool, "fsspec", StorageOptions()), put, f"{tmp_path}/", put_many)


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
def test_s3_without_the_right_to_read_is_access_denied(pool: ProcessPoolExecutor, s3: LocalS3, backend: str) -> None:
    url = s3.put("contract-denied/x", b"secret")
    options = StorageOptions(storage_options={"endpoint_url": s3.endpoint_url, "anon": True})
    storage = SpawnedStorage(pool, backend, options)
    for operation in (storage.head, storage.get):
        with pytest.raises(AccessDeniedError, match="contract-denied/x"):
            operation(url)


@pytest.mark.parametrize("backend", ["urllib3", "fsspec"])
def test_http_without_the_right_to_read_is_access_denied(
    pool: ProcessPoolExecutor, server: FaultyHttpServer, backend: str
) -> None:
    server.script("/x", always=FaultyAnswer(fault=Fault.STATUS, status=403))
    with pytest.raises(AccessDeniedError, match="credentials"):
        SpawnedStorage(pool, backend, StorageOptions()).get(f"{server.url}/x")
