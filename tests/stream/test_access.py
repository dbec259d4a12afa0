"""Who may name what, seen from a dataset: rows of local and remote tables, lists of them, names that resolve, credentials."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError, SampleError, StorageError
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.cache.session import Session

PICTURE = b"picture"
SECRET = {"headers": {"Authorization": "Bearer secret", "X-Own": "mine"}}


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"/a.jpg": PICTURE}) as running:
        yield running


@pytest.fixture
def other() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer({"/b.jpg": PICTURE, "/same.jpg": PICTURE}) as running:
        yield running


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.jpg"
    path.write_bytes(b"mine")
    return path


def rows_of(*files: object) -> bytes:
    return "".join(json.dumps({"index": f"{n}-{file}", "file": str(file)}) + "\n" for n, file in enumerate(files)).encode()


def opened(src: object, tmp_path: Path, **options: Any) -> StreamingDataset:
    given = {"columns_to_download": ["file"], "on_error": "raise", "show_progress": False, **options}
    return StreamingDataset(src, tmp_path / "cache", **given)


def read(dataset: StreamingDataset, row: int) -> bytes:
    return Path(dataset[row]["file"]).read_bytes()


def headers_at(server: FaultyHttpServer, path: str, name: str) -> set[str]:
    return {request.headers.get(name.lower(), "") for request in server.requests(path)}


# -- lists and tables ---------------------------------------------------------------------------------------------------


def test_rows_of_remote_tables_that_a_local_list_names_are_foreign(
    server: FaultyHttpServer, secret: Path, tmp_path: Path
) -> None:
    server.objects |= {"/one.jsonl": rows_of(secret, "a.jpg"), "/two.jsonl": rows_of(f"file://{secret}", f"local://{secret}")}
    (tmp_path / "list.txt").write_text(f"{server.url}/one.jsonl\n{server.url}/two.jsonl\n")
    with opened(tmp_path / "list.txt", tmp_path) as dataset:
        for row, table in ((0, "one"), (2, "two"), (3, "two")):
            with pytest.raises(AccessDeniedError, match=rf"secret\.jpg.* is named by the remote index .*/{table}\.jsonl"):
                dataset[row]
        with pytest.raises(AccessDeniedError):
            list(dataset)


@pytest.mark.parametrize("lazy", [{}, {"lazy_index_chunk_size": 10}], ids=["built", "lazy"])
@pytest.mark.parametrize("is_one_of_several", [False, True])
def test_relative_rows_of_a_remote_table_in_a_local_list_start_beside_the_table(
    is_one_of_several: bool, lazy: dict[str, Any], server: FaultyHttpServer, secret: Path, tmp_path: Path
) -> None:
    table = pa.table({"index": list("abcd"), "file": ["own.jpg", str(secret), "sub/own.jpg", None]})
    pq.write_table(table, tmp_path / "t.parquet")
    server.objects["/deep/t.parquet"] = (tmp_path / "t.parquet").read_bytes()
    server.objects |= {"/deep/own.jpg": PICTURE, "/deep/sub/own.jpg": PICTURE}
    pq.write_table(pa.table({"index": ["e"], "file": ["secret.jpg"]}), tmp_path / "own.parquet")
    (tmp_path / "list.txt").write_text(f"{server.url}/deep/t.parquet?q=1\nown.parquet\n")
    (tmp_path / "more").mkdir()
    pq.write_table(pa.table({"index": ["f"], "file": ["../secret.jpg"]}), tmp_path / "more/m.parquet")
    src = [tmp_path / "list.txt", tmp_path / "more/m.parquet"] if is_one_of_several else tmp_path / "list.txt"
    with opened(src, tmp_path, **lazy) as dataset:
        assert [read(dataset, row) for row in (0, 2, 4)] == [PICTURE, PICTURE, b"mine"]
        with pytest.raises(AccessDeniedError, match=r"secret\.jpg.* is named by the remote index .*/deep/t\.parquet"):
            dataset[1]
        assert not is_one_of_several or read(dataset, 5) == b"mine"
    own_place = {"source_options": {"path_prefix": str(tmp_path)}, "allowed_roots": [str(tmp_path)]}
    with opened(src, tmp_path, **own_place, **lazy) as dataset, pytest.raises(FileNotFoundError, match=f"{tmp_path}/own.jpg"):
        dataset[0]


def test_a_remote_list_may_not_have_a_local_table_indexed_unless_its_root_is_allowed(
    server: FaultyHttpServer, tmp_path: Path, secret: Path
) -> None:
    (tmp_path / "own.jsonl").write_bytes(rows_of(secret, "/etc/hostname"))
    for line in (f"{tmp_path}/own.jsonl", f"file://{tmp_path}/own.jsonl", f"local://{tmp_path}/own.jsonl"):
        server.objects["/list.txt"] = f"file://{tmp_path}/own.jsonl".encode() if line.startswith("/") else line.encode()
        with pytest.raises(AccessDeniedError, match=r"own\.jsonl is named by the remote index .*/list\.txt"):
            opened(f"{server.url}/list.txt", tmp_path)
    server.objects["/list.txt"] = f"file://{tmp_path}/own.jsonl".encode()
    with opened(f"{server.url}/list.txt", tmp_path, allowed_roots=[str(tmp_path)]) as dataset:
        assert read(dataset, 0) == b"mine"
        with pytest.raises(AccessDeniedError, match="hostname"):
            dataset[1]


def test_each_row_goes_by_its_own_table_where_local_and_remote_ones_are_joined(
    server: FaultyHttpServer, tmp_path: Path, secret: Path
) -> None:
    (tmp_path / "own.jsonl").write_bytes(rows_of(secret))
    server.objects["/foreign.jsonl"] = rows_of(f"file://{secret}", "a.jpg")
    for src in (
        [tmp_path / "own.jsonl", f"{server.url}/foreign.jsonl"],
        [f"{server.url}/foreign.jsonl", tmp_path / "own.jsonl"],
    ):
        first_own = 0 if isinstance(src[0], Path) else 2
        with opened(src, tmp_path) as dataset:
            again = pickle.loads(pickle.dumps(dataset))
            for one in (dataset, again):
                assert read(one, first_own) == b"mine"
                assert read(one, (first_own + 2) % 3) == PICTURE
                with pytest.raises(AccessDeniedError, match=r"foreign\.jsonl"):
                    one[(first_own + 1) % 3]
            again.close()
        with opened(src, tmp_path, where="file LIKE '%secret%'", sql_query="SELECT * FROM dataframe") as dataset:
            assert read(dataset, 0 if first_own == 0 else 1) == b"mine"
            with pytest.raises(AccessDeniedError, match=r"foreign\.jsonl"):
                dataset[1 if first_own == 0 else 0]


def test_rows_that_are_computed_from_a_foreign_table_are_foreign(
    server: FaultyHttpServer, tmp_path: Path, secret: Path
) -> None:
    server.objects["/foreign.jsonl"] = rows_of("a.jpg")
    query = f"SELECT \"index\", 'file://{secret}' AS file, 1 AS one FROM dataframe"
    with opened(f"{server.url}/foreign.jsonl", tmp_path, sql_query=query) as dataset, pytest.raises(AccessDeniedError):
        dataset[0]


def test_blanks_around_a_url_are_named_with_the_cure(server: FaultyHttpServer, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"index,file\na, {server.url}/a.jpg\nb,{server.url}/a.jpg \n")
    with opened(tmp_path / "t.csv", tmp_path) as dataset:
        with pytest.raises(
            SampleError, match=r"row 0 \(sample 'a'\) has 'http://.*/a\.jpg' in column 'file' with a blank before it"
        ):
            dataset[0]
        with pytest.raises(ObjectNotFoundError, match=r"row 1 has 'http://.*/a\.jpg ' in column 'file'"):
            dataset[1]
    query = "SELECT *, trim(file) AS trimmed FROM dataframe"
    with opened(tmp_path / "t.csv", tmp_path, sql_query=query, columns_to_download=["trimmed"]) as dataset:
        assert [Path(sample["trimmed"]).read_bytes() for sample in dataset] == [PICTURE, PICTURE]


def first_file(sample: dict[str, Any]) -> dict[str, Any]:
    files = sample["file"]
    return {**sample, "file": files[0] if isinstance(files, list) else files["at"]}


@pytest.mark.parametrize("make", [lambda url: [url, url], lambda url: {"at": url}], ids=["list", "dict"])
def test_a_column_of_lists_or_structs_names_no_object_until_one_of_its_values_is_taken(
    make: Any, request: pytest.FixtureRequest, server: FaultyHttpServer, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"index": ["a"], "file": [make(f"{server.url}/a.jpg")]}), tmp_path / "t.parquet")
    problem = rf"row 0 \(sample 'a'\) has a {request.node.callspec.id} in column 'file', which names no file"
    with opened(tmp_path / "t.parquet", tmp_path) as dataset, pytest.raises(SampleError, match=problem):
        dataset[0]
    assert not server.requests()
    with opened(tmp_path / "t.parquet", tmp_path, predownload_transforms=[first_file]) as dataset:
        assert Path(dataset[0]["file"]).read_bytes() == PICTURE


def test_what_a_predownload_transform_makes_of_a_foreign_row_is_foreign(
    server: FaultyHttpServer, tmp_path: Path, secret: Path
) -> None:
    server.objects["/foreign.jsonl"] = rows_of("a.jpg")
    options = {"predownload_transforms": [lambda row: {**row, "file": f"file://{secret}"}]}
    with opened(f"{server.url}/foreign.jsonl", tmp_path, **options) as dataset, pytest.raises(AccessDeniedError):
        dataset[0]
    with opened(f"{server.url}/foreign.jsonl", tmp_path, allowed_roots=[str(tmp_path)], **options) as dataset:
        assert read(dataset, 0) == b"mine"


def test_rows_of_a_lazy_index_go_by_their_own_file(server: FaultyHttpServer, tmp_path: Path, secret: Path) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"index": ["f0", "f1"], "file": [f"file://{secret}", "a.jpg"]}), sink)
    server.objects["/foreign.parquet"] = sink.getvalue().to_pybytes()
    pq.write_table(pa.table({"index": ["o0", "o1"], "file": [str(secret)] * 2}), tmp_path / "own.parquet")
    src = [tmp_path / "own.parquet", f"{server.url}/foreign.parquet"]
    with opened(src, tmp_path, lazy_index_chunk_size=1) as dataset:
        assert read(dataset, 1) == b"mine"
        assert read(dataset, 3) == PICTURE
        with pytest.raises(AccessDeniedError, match=r"foreign\.parquet"):
            dataset[2]


def test_rows_of_a_database_in_a_local_file_are_the_users_own(tmp_path: Path, secret: Path) -> None:
    import sqlite3

    database = sqlite3.connect(tmp_path / "own.db")
    database.execute('CREATE TABLE t ("index" TEXT, file TEXT)')
    database.execute("INSERT INTO t VALUES ('a', ?)", (str(secret),))
    database.commit()
    database.close()
    with opened(f"sqlite:///{tmp_path}/own.db", tmp_path, sql_query="SELECT * FROM t") as dataset:
        assert read(dataset, 0) == b"mine"


def test_the_error_shows_the_rows_own_text_the_reason_and_a_cure_that_works(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects |= {"/meta/i.jsonl": rows_of("../photos/a.jpg", "../../a.jpg", "%2e%2e/a.jpg"), "/photos/a.jpg": PICTURE}
    src, root = f"{server.url}/meta/i.jsonl", f"{server.url}/photos"
    with opened(src, tmp_path) as dataset, pytest.raises(AccessDeniedError) as caught:
        dataset[0]
    for part in ("'../photos/a.jpg'", "has '..' in its path", f"allowed_roots=['{root}']"):
        assert part in str(caught.value)
    with opened(src, tmp_path, allowed_roots=[root]) as dataset:
        assert read(dataset, 0) == PICTURE
        for row in (1, 2):
            with pytest.raises(AccessDeniedError, match=r"has '\.\.' in its path"):
                dataset[row]
    assert {request.path for request in server.requests() if "photos" in request.path} == {"/photos/a.jpg"}


def test_a_missing_object_is_named_as_the_row_has_it_where_its_url_differs(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/meta/i.jsonl"] = rows_of("/mnt/x.jpg", f"{other.url}/gone.jpg", "y.jpg?sig=hidden")
    with opened(f"{server.url}/meta/i.jsonl", tmp_path) as dataset:
        with pytest.raises(
            ObjectNotFoundError, match=r"/meta/mnt/x\.jpg does not exist.*row 0 has '/mnt/x\.jpg' in column 'file'"
        ):
            dataset[0]
        with pytest.raises(ObjectNotFoundError, match=r"gone\.jpg does not exist \(status 404\): check the URL$"):
            dataset[1]
        with pytest.raises(ObjectNotFoundError, match=r"row 2 has 'y\.jpg' in") as caught:
            dataset[2]
    assert caught.value.context["url"] == f"{server.url}/meta/y.jpg"
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("place", ["disk", "http", "s3"])
def test_names_with_marks_are_read_from_every_place_and_shown_whole_when_they_are_not_there(
    place: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    names = ["hash#1.jpg", "percent%20.jpg", "percent%zz.jpg", "q?x=1.jpg", "a b+ü.jpg"]
    (tmp_path / "photos").mkdir()
    for path, data in {"i.jsonl": rows_of(*names, "gone?x=1#2.jpg"), **{name: name.encode() for name in names}}.items():
        (tmp_path / "photos" / path).write_bytes(data)
        server.objects[f"/photos/{path}"] = data
    src = {"disk": str(tmp_path / "photos"), "http": f"{server.url}/photos", "s3": "s3://photos"}[place]
    options = {"endpoint_url": server.url, "anon": True}
    with opened(f"{src}/i.jsonl", tmp_path, storage_options=options) as dataset:
        assert [read(dataset, row).decode() for row in range(len(names))] == names
        with pytest.raises(FileNotFoundError, match=r"gone\?x=1#2\.jpg"):
            dataset[len(names)]


def test_a_refusal_by_the_server_shows_the_rows_own_text(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/meta/i.jsonl"] = rows_of("/mnt/x.jpg")
    server.script("/meta/mnt/x.jpg", always=FaultyAnswer(fault=Fault.STATUS, status=403))
    with (
        opened(f"{server.url}/meta/i.jsonl", tmp_path) as dataset,
        pytest.raises(AccessDeniedError, match=r"row 0 has '/mnt/x\.jpg' in column 'file'"),
    ):
        dataset[0]


# -- credentials --------------------------------------------------------------------------------------------------------


def test_headers_go_to_the_hosts_of_the_source_and_to_no_other_that_a_row_names(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/i.jsonl"] = rows_of("a.jpg", f"{other.url}/b.jpg")
    with opened(f"{server.url}/i.jsonl", tmp_path, storage_options=SECRET) as dataset:
        assert [read(dataset, row) for row in (0, 1)] == [PICTURE] * 2
    assert headers_at(server, "/i.jsonl", "Authorization") == headers_at(server, "/a.jpg", "Authorization") == {"Bearer secret"}
    for name in ("Authorization", "X-Own"):
        assert headers_at(other, "/b.jpg", name) == {""}


def test_headers_go_to_hosts_that_credential_hosts_lists(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/i.jsonl"] = rows_of("a.jpg", f"{other.url}/b.jpg")
    options = {**SECRET, "credential_hosts": [other.url]}
    with opened(f"{server.url}/i.jsonl", tmp_path, storage_options=options) as dataset:
        assert [read(dataset, row) for row in (0, 1)] == [PICTURE] * 2
    assert headers_at(other, "/b.jpg", "Authorization") == headers_at(server, "/a.jpg", "Authorization") == {"Bearer secret"}


def test_headers_go_where_own_rows_lead_and_with_credential_hosts_only_there(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    (tmp_path / "own.jsonl").write_bytes(rows_of(f"{server.url}/a.jpg", f"{other.url}/b.jpg"))
    with opened(tmp_path / "own.jsonl", tmp_path, storage_options=SECRET) as dataset:
        assert [read(dataset, row) for row in (0, 1)] == [PICTURE] * 2
    assert headers_at(server, "/a.jpg", "Authorization") == headers_at(other, "/b.jpg", "Authorization") == {"Bearer secret"}
    (tmp_path / "own.jsonl").write_bytes(rows_of(f"{other.url}/same.jpg"))
    options = {**SECRET, "credential_hosts": [server.url]}
    with opened(tmp_path / "own.jsonl", tmp_path, storage_options=options) as dataset:
        assert read(dataset, 0) == PICTURE
    assert headers_at(other, "/same.jpg", "Authorization") == {""}


def test_headers_go_to_tables_that_a_local_list_names_and_not_to_other_hosts_of_their_rows_or_of_a_remote_list(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects |= {
        "/i.jsonl": rows_of(f"{server.url}/a.jpg", f"{other.url}/b.jpg"),
        "/list.txt": f"i.jsonl\n{other.url}/j.jsonl".encode(),
    }
    other.objects["/j.jsonl"] = rows_of("same.jpg")
    (tmp_path / "list.txt").write_text(f"{server.url}/i.jsonl")
    with opened(tmp_path / "list.txt", tmp_path, storage_options=SECRET) as dataset:
        assert [read(dataset, row) for row in (0, 1)] == [PICTURE] * 2
    assert headers_at(server, "/i.jsonl", "Authorization") == {"Bearer secret"}
    assert headers_at(other, "/b.jpg", "Authorization") == {""}
    with opened(f"{server.url}/list.txt", tmp_path, storage_options=SECRET) as dataset:
        assert len(dataset) == 3
    assert headers_at(other, "/j.jsonl", "Authorization") == {""}


def test_a_refusal_without_credentials_names_credential_hosts(
    server: FaultyHttpServer, other: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/i.jsonl"] = rows_of(f"{other.url}/b.jpg")
    other.script("/b.jpg", *[FaultyAnswer(fault=Fault.STATUS, status=403)] * 9)
    named = rf"credential_hosts'\]=\['{other.url}'\]"
    with (
        opened(f"{server.url}/i.jsonl", tmp_path, storage_options=SECRET) as dataset,
        pytest.raises(AccessDeniedError, match=named),
    ):
        dataset[0]


def test_failures_that_are_written_down_hold_no_password(tmp_path: Path) -> None:
    from sqlstream.cache import Cache
    from sqlstream.cache.ledger.reports import Failure, failures, record_failures

    failure = Failure(
        url="https://me:hid/den@h/x?sig=hidden", error="ValueError: at https://me:hid/den@h/x, password=hidden", row=1
    )
    with Cache(tmp_path / "cache") as cache:
        with Session(cache).transaction() as tx:
            record_failures(tx, [failure])
        (found,) = failures(Session(cache).ledger)
    assert "hid" not in found.url + found.error
    assert "den" not in found.url + found.error


@pytest.mark.parametrize(("status", "num_retries", "num_tries"), [(400, 1, 1), (403, 1, 1), (503, 0, 3), (503, 1, 6)])
def test_an_access_is_tried_again_only_where_that_may_mend_it(
    server: FaultyHttpServer, tmp_path: Path, status: int, num_retries: int, num_tries: int
) -> None:
    """As often as docs/storage.md says: each of its tries is a download with all of its own."""
    server.script("/a.jpg", always=FaultyAnswer(fault=Fault.STATUS, status=status))
    table = tmp_path / "rows.jsonl"
    table.write_bytes(rows_of(f"{server.url}/a.jpg"))
    options = {"num_downloading_retries": num_retries, "num_random_access_retries": 2}
    with opened(table, tmp_path, **options) as dataset, pytest.raises(StorageError):
        dataset[0]
    assert len(server.requests("/a.jpg")) == num_tries
