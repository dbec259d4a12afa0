"""Indexes that nodes share: built once, whole or absent, never another one; on a folder in place of the helper, and on S3."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.cli.main import main
from sqlstream.config import IndexOptions, JoinOptions, LazyOptions, StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, IndexDatabaseError, SourceChangedError, TransientStorageError
from sqlstream.index.build.build import open_index
from sqlstream.index.build.lazy_build import open_lazy_index
from sqlstream.index.file.index import Index
from sqlstream.index.file.store import IndexStore
from sqlstream.storage.base.protocols import DownloadRoom, ObjectInfo
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import FaultyHttpServer, LocalS3
from tests.index.sources import FolderReader, all_rows, write_csv
from tests.processes import in_child

STORE = "s3://bucket/indexes/"
TABLE = "s3://bucket/t.csv"


class Bucket(FolderReader):
    """Serves a folder, and takes what is put: whole or not at all, as object stores do."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.before_upload: Callable[[str], None] = lambda url: None
        self.before_head: Callable[[str], None] = lambda url: None

    def upload(self, path: Path, url: str) -> None:
        self.before_upload(url)
        self.count["upload"] += 1
        target = self._path(url)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, f"{target}.part")
        os.replace(f"{target}.part", target)

    def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
        self._info(url)
        return super().download(url, path, room)

    def head(self, url: str) -> ObjectInfo:
        self.before_head(url)
        return super().head(url)


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    write_csv(tmp_path / "bucket" / "t.csv", "index,n\na,1\nb,2\nc,3\n")
    return Bucket(tmp_path / "bucket")


def node(directory: Path, bucket: Bucket, src: Any = TABLE, store: str | None = STORE, **changes: Any) -> Index:
    directory.mkdir(exist_ok=True)
    shared = None if store is None else IndexStore(store, bucket)
    return open_index(IndexOptions(src=src, **changes), directory, bucket, show_progress=False, store=shared)


def stored(bucket: Bucket) -> list[Path]:
    """What the store has: manifests, then index files."""
    return sorted((bucket.folder / "indexes").glob("*"), key=lambda path: (path.suffix != ".json", path.name))


def test_a_node_takes_what_another_one_has_built(bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    built = node(tmp_path / "a", bucket)
    assert [path.suffix for path in stored(bucket)] == [".json", ".sqlite"]
    bucket.count.clear()
    asked: list[str] = []
    bucket.before_head = asked.append
    taken = node(tmp_path / "b", bucket, where="n > 1")
    assert bucket.count["upload"] == 0
    assert bucket.count["download"] == 1  # of the index: the table was not read
    assert all_rows(taken) == all_rows(built)[1:]
    assert (tmp_path / "b" / built.path.name).read_bytes() == built.path.read_bytes()
    alone = node(tmp_path / "c", bucket, store=None, where="n > 1")
    assert taken.content == alone.content is not None  # what states compare
    assert taken.fingerprint == alone.fingerprint
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    asked.clear()
    node(tmp_path / "b", bucket)
    assert [url for url in asked if url.startswith(STORE)] == []  # what is here is not looked for elsewhere


def test_an_index_with_joined_tables_is_shared_until_one_of_them_changes(bucket: Bucket, tmp_path: Path) -> None:
    table = write_csv(bucket.folder / "more.csv", "index,v\nb,2\na,1\nc,3\n")
    join = JoinOptions.of({"more": "s3://bucket/more.csv"}, "index", "raise")
    built = node(tmp_path / "a", bucket, join=join)
    bucket.count.clear()
    taken = node(tmp_path / "b", bucket, join=join, where="v > 1")
    assert (bucket.count["upload"], bucket.count["download"]) == (0, 1)  # neither table was read
    assert all_rows(taken) == all_rows(built)[1:] == [{"index": "b", "n": 2, "v": 2}, {"index": "c", "n": 3, "v": 3}]
    origins = taken.origins()
    assert [origins.table_of(0, column) for column in ("n", "v")] == [TABLE, "s3://bucket/more.csv"]
    write_csv(table, "index,v\nb,7\na,7\nc,7\n")
    os.utime(table, ns=(1, 1))
    assert [row["v"] for row in all_rows(node(tmp_path / "b", bucket, join=join))] == [7, 7, 7]


def test_a_new_version_of_the_table_is_another_index(bucket: Bucket, tmp_path: Path) -> None:
    node(tmp_path / "a", bucket)
    write_csv(bucket.folder / "t.csv", "index,n\nz,26\n")
    assert [row["index"] for row in all_rows(node(tmp_path / "b", bucket))] == ["z"]
    assert [path.suffix for path in stored(bucket)] == [".json", ".json", ".sqlite", ".sqlite"]
    with pytest.raises(SourceChangedError):
        node(tmp_path / "a", bucket, on_source_change="raise")


def test_a_lazy_index_is_shared_too(bucket: Bucket, tmp_path: Path) -> None:
    pq.write_table(pa.table({"index": range(20)}), bucket.folder / "t.parquet", row_group_size=5)
    options = IndexOptions(src="s3://bucket/t.parquet", lazy=LazyOptions(chunk_rows=5))
    lengths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        index = open_lazy_index(options, tmp_path / name, bucket, show_progress=False, store=IndexStore(STORE, bucket))
        lengths.append((len(index), index.bounds.tolist(), index.path.read_bytes()))
    assert lengths[0] == lengths[1]
    assert bucket.count["upload"] == 2


@pytest.mark.parametrize("number", [1, 2])
def test_a_killed_uploader_leaves_an_index_absent(
    number: int, bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def die(url: str) -> None:
        if bucket.count["upload"] == number - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        bucket.before_upload = die
        node(tmp_path / "a", bucket)

    assert in_child(work) == -signal.SIGKILL
    assert not [path for path in stored(bucket) if path.suffix == ".json"]
    assert len(node(tmp_path / "a", bucket)) == 3  # built before its builder died
    assert len(node(tmp_path / "b", bucket)) == 3
    assert [path for path in stored(bucket) if path.suffix == ".json"]
    bucket.count.clear()
    assert len(node(tmp_path / "c", bucket)) == 3
    assert bucket.count["upload"] == 0
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_killed_downloader_leaves_nothing_under_the_index_s_name(bucket: Bucket, tmp_path: Path) -> None:
    built = node(tmp_path / "a", bucket)

    class Dying(Bucket):
        def download(self, url: str, path: Path, room: DownloadRoom | None = None) -> ObjectInfo:
            path.write_bytes(self._path(url).read_bytes()[:-100])
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

    assert in_child(lambda: node(tmp_path / "b", Dying(bucket.folder))) == -signal.SIGKILL
    assert not (tmp_path / "b" / built.path.name).exists()
    assert all_rows(node(tmp_path / "b", bucket)) == all_rows(built)
    assert [path.name for path in (tmp_path / "b").iterdir()] == [built.path.name]  # also no temporary file


def test_a_damaged_index_is_not_put(bucket: Bucket, tmp_path: Path) -> None:
    path = node(tmp_path / "a", bucket, store=None).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IndexDatabaseError, match="its checksum is another one"):
        IndexStore(STORE, bucket).put(path)
    assert stored(bucket) == []


def flip(files: list[Path]) -> None:
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1
    files[1].write_bytes(data)


def say(**changes: Any) -> Callable[[list[Path]], None]:
    def change(files: list[Path]) -> None:
        files[0].write_text(json.dumps({**json.loads(files[0].read_text()), **changes}))

    return change


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (flip, "with SHA-256"),
        (lambda files: files[1].write_bytes(files[1].read_bytes()[:-1]), "and its manifest says"),
        (lambda files: files[1].unlink(), "404"),
        (lambda files: files[0].write_text("{"), "is no manifest of an index"),
        (lambda files: files[0].write_text("[]"), "is no manifest of an index"),
        (lambda files: files[0].write_bytes(b" " * 70_000), "has 70000 bytes, which no manifest has"),
        (lambda files: files[0].write_text("[" * 60_000), "is no manifest of an index"),
        (say(sha256="../../x"), "no key and SHA-256"),
        (say(key="0" * 32), "it is that of 00000000"),
    ],
)
def test_a_damaged_index_is_a_warning_and_is_built_and_replaced(
    damage: Callable[[list[Path]], object], cause: str, bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = all_rows(node(tmp_path / "a", bucket))
    damage(stored(bucket))
    assert all_rows(node(tmp_path / "b", bucket)) == rows
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"the index store {STORE} gives no index (")
    assert cause in warning
    assert not [path for path in (tmp_path / "b").iterdir() if path.name.endswith((".tmp", ".lock"))]
    caplog.clear()
    bucket.count.clear()
    assert all_rows(node(tmp_path / "c", bucket)) == rows
    assert (bucket.count["upload"], caplog.records) == (0, [])


def plant(bucket: Bucket, key: str, path: Path, *statements: str) -> None:
    """Put a file into the store as the index of a key, after it was changed."""
    copy = path.with_suffix(".planted")
    shutil.copyfile(path, copy)
    with contextlib.closing(sqlite3.connect(copy)) as connection:
        for statement in statements:
            connection.execute(statement)
        connection.commit()
    data = copy.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    (bucket.folder / "indexes" / f"{key}.{digest[:16]}.sqlite").write_bytes(data)
    manifest = {"key": key, "size_bytes": len(data), "sha256": digest, "src": "x"}
    (bucket.folder / "indexes" / f"{key}.json").write_text(json.dumps(manifest))


def test_a_file_that_is_not_the_index_is_not_taken(bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By its manifest each is whole: what it says of itself decides."""
    wanted = node(tmp_path / "a", bucket)
    key = wanted.path.stem
    other = node(tmp_path / "b", bucket, store=None, key_column="n").path
    mine = node(tmp_path / "b", bucket, src=str(write_csv(tmp_path / "mine.csv", "index,n\nx,1\n")), store=None).path
    named = f"UPDATE meta SET value = '{key}' WHERE key = 'fingerprint'"
    no_views = ("DROP VIEW dataframe", "DROP VIEW samples", "ALTER TABLE rows RENAME TO r")
    for number, (path, statements, cause) in enumerate((
        (other, (), f"is the index {other.stem}"),
        (other, (named, "DELETE FROM meta WHERE key = 'base_url'"), "does not say its base_url"),
        (mine, (named,), "names sources that no shared index has"),  # its rows would be the user's own
        (other, (named, *no_views, "CREATE VIEW rows AS SELECT * FROM r"), "lacks the tables rows"),
    )):  # fmt: skip
        plant(bucket, key, path, *statements)
        caplog.clear()
        assert all_rows(node(tmp_path / f"c{number}", bucket)) == all_rows(wanted)
        assert cause in caplog.text


def test_of_two_builders_the_last_one_stays_and_each_index_is_whole(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one builds and puts its index while the first one is between its file and its manifest."""

    def build_another(url: str) -> None:
        if url.endswith(".json"):
            bucket.before_upload = lambda url: None
            second.append(node(tmp_path / "b", bucket))

    second: list[Index] = []
    bucket.before_upload = build_another
    first = node(tmp_path / "a", bucket)
    assert all_rows(first) == all_rows(second[0])
    assert bucket.count["upload"] == 4
    manifest = IndexStore(STORE, bucket).find(first.path.stem)
    assert manifest is not None
    taken = node(tmp_path / "c", bucket)
    assert taken.path.read_bytes() == first.path.read_bytes()
    assert not caplog.records


def test_a_builder_who_is_second_puts_nothing(bucket: Bucket, tmp_path: Path) -> None:
    seen: list[str] = []

    def build_another(url: str) -> None:
        if url.startswith(STORE):
            seen.append(url)
            if len(seen) == 2:  # the first one has built, and looks whether its index is still missing
                bucket.before_head = lambda url: None
                node(tmp_path / "b", bucket)

    bucket.before_head = build_another
    first = node(tmp_path / "a", bucket)
    assert len(seen) == 2
    assert bucket.count["upload"] == 2  # the other one's
    assert first.path.stem in stored(bucket)[0].name


@pytest.mark.parametrize("error", [TransientStorageError, AccessDeniedError])
def test_a_store_that_cannot_be_read_or_written_is_a_warning(
    error: type[Exception], bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(url: str) -> None:
        if url.startswith(STORE):
            raise error("the store is down")

    bucket.before_upload = refuse
    assert len(node(tmp_path / "a", bucket)) == 3
    bucket.before_head = refuse
    assert len(node(tmp_path / "b", bucket)) == 3
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == [
        f"the index store {STORE} does not take an index (the store is down): other nodes build it, too",
        f"the index store {STORE} gives no index (the store is down): it is built here",
    ]


def test_a_server_that_is_not_there_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead = StorageOptions(
        storage_options={"endpoint_url": "http://127.0.0.1:1", "key": "AKID", "secret": "hidden-word"}, num_retries=0
    )
    with (
        FaultyHttpServer({"/t.csv": b"index\n1\n"}) as server,
        contextlib.closing(Fetcher(dead)) as fetcher,
    ):
        options = IndexOptions(src=f"{server.url}/t.csv")
        index = open_index(options, tmp_path, fetcher, show_progress=False, store=IndexStore("s3://bucket/x", fetcher))
        assert len(index) == 1
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said.startswith("the index store s3://bucket/x/ gives no index (s3://bucket/x/")
    assert "hidden-word" not in said


def test_a_source_of_this_machine_is_refused(bucket: Bucket, tmp_path: Path) -> None:
    local = write_csv(tmp_path / "t.csv", "index\n1\n")
    listed = write_csv(tmp_path / "list.txt", f"{TABLE}\n")
    cases: list[tuple[Any, dict[str, Any]]] = [
        (str(local), {}),
        ([TABLE, str(local)], {}),
        (TABLE, {"join": JoinOptions.of({"more": str(local)}, "index", "raise")}),
        (pa.table({"index": [1]}), {}),
        (str(listed), {}),
        (TABLE, {"path_prefix": str(tmp_path)}),
        (f"sqlite:///{tmp_path}/x.db", {"sql_query": "SELECT 1"}),
    ]
    for src, changes in cases:
        with pytest.raises(ConfigError, match="is of this machine, and an index store has indexes of what every node sees"):
            node(tmp_path / "a", bucket, src=src, **changes)
    assert list((tmp_path / "a").glob("*.sqlite")) == []
    with pytest.raises(ConfigError, match="index_store=https://host/x can only be read"):
        IndexStore("https://user:secret@host/x", bucket)
    with pytest.raises(ConfigError, match="index_store='' is no URL"):
        IndexStore("", bucket)


def test_an_index_of_another_format_is_left_for_those_who_read_it(
    bucket: Bucket, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    node(tmp_path / "a", bucket)
    say(store_version=2, more="of it")(stored(bucket))
    bucket.count.clear()
    assert len(node(tmp_path / "b", bucket)) == 3
    assert "in format 2.1, and this one reads 1.1" in caplog.text
    assert bucket.count["upload"] == 0


def test_a_dataset_takes_its_index_from_s3_and_its_files_hold_no_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalS3() as s3:
        table = s3.put("bucket/t.csv", b"index,n\na,1\nb,2\n")
        options = {"endpoint_url": s3.endpoint_url, "key": "AKID-of-mine", "secret": "hidden-word"}
        flags = [word for key, value in options.items() for word in ("--storage-option", f"{key}={value}")]

        def command(*words: str | Path) -> Any:
            assert main(["index", *map(str, words), "--json", *flags]) == 0
            return json.loads(capsys.readouterr().out)

        key = command("build", table, tmp_path / "a", "--index-store", "s3://bucket/indexes")["fingerprint"]
        with StreamingDataset(
            table, tmp_path / "b", index_store="s3://bucket/indexes", storage_options=options, show_progress=False
        ) as dataset:
            assert [sample["n"] for sample in dataset] == [1, 2]
            puts = [request.path for request in s3.requests() if request.method == "PUT" and "/indexes/" in request.path]
            for number, place in enumerate(puts):
                dataset.cache.fetcher.download(f"s3:/{place}", tmp_path / str(number))
        assert s3.num_gets(table) == 1
        data, manifest = ((tmp_path / str(number)).read_bytes() for number in range(len(puts)))
        assert json.loads(manifest)["key"] == key
        for word in (b"hidden-word", b"AKID-of-mine", s3.endpoint_url.encode()):
            assert word not in data + manifest
        pushed = command("push", tmp_path / "a", "s3://bucket/other")
        assert (pushed["fingerprint"], pushed["store"]) == (key, "s3://bucket/other/")
        assert command("pull", tmp_path / "c", "s3://bucket/other", "--index", key[:4])["num_rows"] == 2
        assert (tmp_path / "c" / "index" / f"{key}.sqlite").read_bytes() == data


def test_an_index_of_a_store_is_chosen_by_the_start_of_its_fingerprint(bucket: Bucket, tmp_path: Path) -> None:
    store = IndexStore(STORE, bucket)
    with pytest.raises(ConfigError, match="holds no index"):
        store.choose(None)
    keys = [node(tmp_path / "a", bucket, key_column=column).path.stem for column in ("index", "n")]
    with pytest.raises(
        ConfigError, match=f"there are several: give --index with the start of one of {', '.join(sorted(keys))}"
    ):
        store.choose(None)
    assert store.choose(keys[1]).key == keys[1]
    with pytest.raises(ConfigError, match="--index='xyz' fits 0 of them"):
        store.choose("xyz")


def test_a_directory_can_be_the_store_and_a_result_of_a_query_is_not_pushed(
    bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dst").mkdir()
    query = "SELECT *, n + 1 AS m FROM dataframe"
    computed = node(tmp_path / "dst" / "index", bucket, store=None, sql_query=query)
    assert main(["index", "push", str(tmp_path / "dst"), str(tmp_path / "shared"), "--index", computed.path.stem]) == 2
    assert "is the result of a query, which each node computes" in capsys.readouterr().err
    (base,) = [path for path in (tmp_path / "dst" / "index").glob("*.sqlite") if path != computed.path]
    assert main(["index", "push", str(tmp_path / "dst"), str(tmp_path / "shared"), "--index", base.stem]) == 0
    assert sorted(path.suffix for path in (tmp_path / "shared").iterdir()) == [".json", ".sqlite"]
