"""Where files go: whatever ends a writing early, no index claims more than there is, and the writing can go on."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import (
    ConfigError,
    EncodeError,
    ObjectChangedError,
    OutputExistsError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.base.unfinished import JOURNAL_NAME
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import LocalS3
from sqlstream.testing.storage import MemoryStore
from sqlstream.write import MdsWriter, TarWriter, WriteOptions
from sqlstream.write.base.journal import LocalJournal, SourcePoint, StoredShard, parse_journal
from tests.processes import FORKSERVER
from tests.write.goldens import files_of
from tests.write.programs import NUM_SAMPLES, die_at, die_at_each_side_effect, open_writer, samples, write

RESUME = WriteOptions(resume=True)


class Interrupted(Exception):
    """What a test ends a writing with."""


def interrupted(kind: str, out: Any, at: int, options: WriteOptions | None = None) -> None:
    """Write up to a sample, at which the source of samples raises."""

    def before(number: int) -> None:
        if number == at:
            raise Interrupted

    with pytest.raises(Interrupted):
        write(kind, out, options or WriteOptions(), before)


def whole(kind: str, out: Path) -> dict[str, bytes]:
    write(kind, out, WriteOptions())
    return files_of(out)


@pytest.mark.parametrize("kind", ["mds", "tar"])
def test_a_kill_at_any_side_effect_leaves_what_can_be_resumed_and_no_index(kind: str, tmp_path: Path) -> None:
    expected = whole(kind, tmp_path / "expected")
    process = FORKSERVER.Process(target=die_at_each_side_effect, args=(kind, tmp_path / "killed"))
    process.start()
    process.join()
    assert process.exitcode == 0
    num_written = set()
    for out in (tmp_path / "killed").iterdir():
        if (out / "index.json").exists():
            assert files_of(out).items() >= expected.items()
        else:
            num_written.add(write(kind, out, RESUME))
            assert files_of(out) == expected
    assert num_written == {0, 1, 3, 5, 7}


def test_an_exception_leaves_full_shards_a_journal_and_no_index(tmp_path: Path) -> None:
    interrupted("mds", tmp_path, 5)
    assert sorted(os.listdir(tmp_path)) == [JOURNAL_NAME, "shard.00000.mds", "shard.00001.mds"]
    lines = [json.loads(line) for line in (tmp_path / JOURNAL_NAME).read_text().splitlines()]
    assert [line.get("number") for line in lines[:1]] == [None]
    assert {line["number"] for line in lines[1:]} == {0, 1}
    with pytest.raises(OutputExistsError, match="is not empty: write elsewhere, or say exist_ok"):
        write("mds", tmp_path, WriteOptions())
    assert write("mds", tmp_path, RESUME) == 3
    assert files_of(tmp_path) == whole("mds", tmp_path.with_name("expected"))


def test_a_line_that_is_cut_off_and_a_shard_that_is_not_whole_are_written_again(tmp_path: Path) -> None:
    expected = whole("mds", tmp_path / "expected")
    interrupted("mds", tmp_path / "out", 6)
    journal = tmp_path / "out" / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes()[:-5])
    (tmp_path / "out" / "shard.00001.mds").write_bytes(b"cut")
    interrupted("mds", tmp_path / "out", 3, RESUME)
    assert write("mds", tmp_path / "out", RESUME) == NUM_SAMPLES - 2
    assert files_of(tmp_path / "out") == expected


def test_a_writing_is_resumed_with_the_settings_that_it_was_begun_with(tmp_path: Path) -> None:
    interrupted("tar", tmp_path, 5)
    with pytest.raises(ConfigError, match=r"begun with format='tar' and is resumed with 'mds'|begun with column_"):
        write("mds", tmp_path, RESUME)
    (tmp_path / "00000-of-00002").mkdir()
    (tmp_path / JOURNAL_NAME).replace(tmp_path / "00000-of-00002" / JOURNAL_NAME)
    with pytest.raises(ConfigError, match=r"begun with part=None and is resumed with \[0, 2\]"):
        write("tar", tmp_path, WriteOptions(resume=True, part=(0, 2)))


def test_a_source_that_has_a_name_is_known_when_it_is_complete(tmp_path: Path) -> None:
    write("mds", tmp_path, WriteOptions(source="seven"))
    with pytest.raises(OutputExistsError, match="is complete: there is nothing to resume"):
        write("mds", tmp_path, WriteOptions(source="seven", resume=True))
    with pytest.raises(ConfigError, match="begun with source='seven' and is resumed with 'eight'"):
        write("mds", tmp_path, WriteOptions(source="eight", resume=True))
    write("mds", tmp_path, WriteOptions(source="eight", exist_ok=True))


def test_of_long_settings_the_message_shows_where_they_differ(tmp_path: Path) -> None:
    before, behind = "b" * 500, "e" * 500
    write("mds", tmp_path, WriteOptions(source=f"{before}=1{behind}"))
    with pytest.raises(ConfigError, match=r"with source=…b{39}=1e+… and is resumed with …b{39}=2e+…: resume") as raised:
        write("mds", tmp_path, WriteOptions(source=f"{before}=2{behind}", resume=True))
    assert len(str(raised.value)) < 500


def test_a_complete_writing_whose_index_is_lost_gets_it_again(tmp_path: Path) -> None:
    store = MemoryStore({})
    for out, remote in ((tmp_path, None), ("s3://b/out", store)):
        write("mds", out, WriteOptions(source="seven", remote=remote))
    expected = files_of(tmp_path)
    (tmp_path / "index.json").unlink()  # as `exist_ok` does before it begins a journal
    del store.objects["s3://b/out/index.json"]
    assert write("mds", tmp_path, WriteOptions(source="seven", resume=True)) == 0  # its journal names the shards
    assert files_of(tmp_path)["index.json"] == expected["index.json"]
    assert write("mds", "s3://b/out", WriteOptions(source="seven", resume=True, remote=store)) == NUM_SAMPLES
    assert store.objects["s3://b/out/index.json"] == expected["index.json"]


def test_a_journal_that_is_none_is_refused(tmp_path: Path) -> None:
    for text in (
        b"[]\n",
        b'{"version": 2, "settings": {}}\n',
        b'{"version": 1}\n',
        b'{"version": 1, "settings": {}}\n[1]\n',
        b"\xff\n",
    ):
        (tmp_path / JOURNAL_NAME).write_bytes(text)
        with pytest.raises(ConfigError, match="is no journal of a writing"):
            write("mds", tmp_path, RESUME)


def test_what_is_there_is_kept_unless_exist_ok_and_then_its_index_goes_first(tmp_path: Path) -> None:
    out = tmp_path / "out"
    expected = whole("mds", out)
    (out / "notes.txt").write_text("mine")
    (out / "lost.mds").symlink_to("nowhere")
    with pytest.raises(OutputExistsError, match="is not empty"):
        write("mds", out, WriteOptions())
    with pytest.raises(OutputExistsError, match="is not empty"):
        write("mds", out, RESUME)
    interrupted("mds", out, 3, WriteOptions(exist_ok=True))
    assert not (out / "index.json").exists()
    write("mds", out, WriteOptions(exist_ok=True))
    (out / "lost.mds").unlink()
    assert files_of(out) == {**expected, "notes.txt": b"mine"}


def test_shards_that_an_earlier_writing_left_are_named_where_it_is_written_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore({})
    for out, remote in ((tmp_path, None), ("s3://b/out", store)):
        write("tar", out, WriteOptions(remote=remote))
        with TarWriter(out, max_samples=5, options=WriteOptions(exist_ok=True, remote=remote)) as writer:
            for sample in samples("tar"):
                writer.write(sample)
    assert [record.getMessage().partition(" has ")[2] for record in caplog.records] == [
        "4 files that this writing did not make, such as shard-000002.tar: remove them, unless they belong there"
    ] * 2


def test_two_writers_of_one_directory_are_refused(tmp_path: Path) -> None:
    with open_writer("mds", tmp_path, WriteOptions()) as writer:
        with pytest.raises(OutputExistsError, match="is being written by another process"):
            open_writer("mds", tmp_path, RESUME)
        for sample in samples("mds"):
            writer.write(sample)
    with pytest.raises(ConfigError, match="has finished: open another one"):
        writer.write({})
    writer.finish()


def test_two_writers_that_begin_in_one_store_at_once_make_no_index_of_both() -> None:
    store = MemoryStore({})
    options = WriteOptions(remote=store)
    first = open_writer("mds", "s3://b/out", options)
    del store.objects[f"s3://b/out/{JOURNAL_NAME}"]  # the second one looked before it was there
    second = open_writer("mds", "s3://b/out", options)
    for sample in samples("mds"):
        second.write(sample)
    first.write(next(samples("mds")))
    with pytest.raises(OutputExistsError, match=r"s3://b/out/ is being written by another process as well"):
        first.finish()
    assert "s3://b/out/index.json" not in store.objects
    with pytest.raises(StorageError, match=r"shard.00000.mds is not what was stored: another process writes there as well"):
        second.finish()
    assert "s3://b/out/index.json" not in store.objects


class Overtaken(MemoryStore):
    """A store in which another writer puts its journal between the two requests that read ours."""

    def get_ranges(self, url: str, ranges: Sequence[tuple[int, int]], size_bytes: int | None = None) -> list[bytes]:
        raise ObjectChangedError(f"{url} has fewer than {size_bytes} bytes: it changed since it was indexed; rebuild the index")


def test_a_journal_that_another_writer_stores_as_it_is_read_is_told_as_that() -> None:
    with pytest.raises(OutputExistsError, match=r"s3://b/out/ is being written by another process as well"):
        write("mds", "s3://b/out", WriteOptions(remote=Overtaken({})))


def test_no_samples_give_an_index_of_no_shards(tmp_path: Path) -> None:
    with open_writer("mds", tmp_path, WriteOptions()):
        pass
    assert files_of(tmp_path) == {"index.json": b'{"shards": [], "version": 2}'}


def killed_at(event: str, ending: str, kind: str, out: Path, options: WriteOptions) -> None:
    process = FORKSERVER.Process(target=die_at, args=(event, ending, kind, out, options))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_kill_before_the_index_goes_leaves_no_journal_that_calls_what_is_there_complete(tmp_path: Path) -> None:
    expected = whole("mds", tmp_path / "expected")
    write("mds", tmp_path / "out", WriteOptions(source="seven"))
    killed_at("os.remove", "index.json", "mds", tmp_path / "out", WriteOptions(source="seven", exist_ok=True))
    assert write("mds", tmp_path / "out", replace(RESUME, source="seven")) == NUM_SAMPLES
    assert files_of(tmp_path / "out").items() >= expected.items()


def test_a_kill_between_a_tar_and_its_offsets_leaves_none_of_the_tar_that_was_there(tmp_path: Path) -> None:
    write("tar", tmp_path, WriteOptions())
    killed_at("os.rename", "shard-000001.tar.idx", "tar", tmp_path, WriteOptions(exist_ok=True))
    assert (tmp_path / "shard-000001.tar").exists()
    assert not (tmp_path / "shard-000001.tar.idx").exists()


def test_a_kill_before_nv_meta_is_whole_leaves_it_unprepared_and_a_resumed_writing_makes_it(tmp_path: Path) -> None:
    expected = whole("energon", tmp_path / "expected")
    killed_at("os.rename", ".nv-meta/.info.json", "energon", tmp_path / "out", WriteOptions(source="seven"))
    assert (tmp_path / "out" / ".nv-meta" / "index.sqlite").exists()
    assert not (tmp_path / "out" / ".nv-meta" / ".info.json").exists()
    assert write("energon", tmp_path / "out", replace(RESUME, source="seven")) == 0
    assert {name: content for name, content in files_of(tmp_path / "out").items() if name != JOURNAL_NAME} == expected


def test_what_energon_knows_of_tars_goes_before_they_are_written_over(tmp_path: Path) -> None:
    write("energon", tmp_path, WriteOptions())
    (tmp_path / ".nv-meta" / "split.yaml").write_text("mine")
    write("tar", tmp_path, WriteOptions(exist_ok=True))
    assert sorted(os.listdir(tmp_path / ".nv-meta")) == ["dataset.yaml", "split.yaml"]
    assert (tmp_path / ".nv-meta" / "split.yaml").read_text() == "mine"


@pytest.mark.parametrize("kind", ["mds", "tar"])
@pytest.mark.parametrize("name", [JOURNAL_NAME, "index.json", "{shard}", ".{shard}.part"])
def test_a_directory_in_the_place_of_a_file_is_named(kind: str, name: str, tmp_path: Path) -> None:
    name = name.format(shard={"mds": "shard.00001.mds", "tar": "shard-000001.tar"}[kind])
    (tmp_path / name / "mine").mkdir(parents=True)
    for options in (WriteOptions(exist_ok=True), *[RESUME] * (name == JOURNAL_NAME)):
        with pytest.raises(OutputExistsError, match=rf"{name} is a directory, in the place of a file: remove it, or write"):
            write(kind, tmp_path, options)
    assert not (tmp_path / name).exists() or os.listdir(tmp_path / name) == ["mine"]


def test_two_writers_to_two_urls_do_not_share_a_local_directory(tmp_path: Path) -> None:
    store = MemoryStore({})
    options = WriteOptions(remote=store)
    with open_writer("mds", (tmp_path, "s3://b/train"), options) as writer:
        for sample in samples("mds"):
            with pytest.raises(OutputExistsError, match="is being written by another process"):
                open_writer("mds", (tmp_path, "s3://b/val"), options)
            writer.write(sample)
    with open_writer("mds", (tmp_path, "s3://b/val"), options):
        pass
    assert {url.split("/")[3] for url in store.objects} == {"train", "val"}
    assert not tmp_path.exists(), "what was stored stays in the store alone"


def test_a_writer_that_is_refused_takes_nothing_away(tmp_path: Path) -> None:
    (tmp_path / "busy").mkdir()
    with open_writer("tar", tmp_path / "busy", WriteOptions()) as writer:
        for sample in samples("tar"):
            with pytest.raises(OutputExistsError, match="is being written by another process"):
                open_writer("tar", tmp_path / "busy", WriteOptions(exist_ok=True))
            writer.write(sample)
    assert files_of(tmp_path / "busy") == whole("tar", tmp_path / "expected")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_bytes(b"")
    (tmp_path / "full" / ".mine.part").write_bytes(b"")
    with pytest.raises(OutputExistsError, match="is not empty"):
        write("tar", tmp_path / "full", WriteOptions())
    assert sorted(os.listdir(tmp_path / "full")) == [".mine.part", "mine"]


def test_a_shard_behind_one_that_is_written_again_is_not_taken_from_the_first_writing(tmp_path: Path) -> None:
    def shard(number: int, at: int) -> str:
        stored = StoredShard(number=number, num_samples=1, files={}, record={}, point=SourcePoint(at))
        return f"{stored.as_json()}\n"

    journal = LocalJournal(tmp_path, is_kept=False)
    journal.begin({})
    journal.close()
    with open(tmp_path / JOURNAL_NAME, "a") as file:
        file.write(shard(0, 1) + shard(2, 4))  # number 1 was under way
    journal = LocalJournal(tmp_path, is_kept=False)
    journal.resume(1)
    journal.close()
    with open(tmp_path / JOURNAL_NAME, "a") as file:
        file.write(shard(1, 3))  # it ends elsewhere than number 2 began: a sample could be read this time
    assert [stored.point for stored in parse_journal((tmp_path / JOURNAL_NAME).read_text(), "here").shards] == [(1, 0), (3, 0)]


def test_shards_of_an_earlier_writing_are_named_by_a_writing_that_is_resumed_over_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write("tar", tmp_path, WriteOptions())
    (tmp_path / "shard-000004.tar").write_bytes(b"")
    interrupted("tar", tmp_path, 3, WriteOptions(exist_ok=True))
    write("tar", tmp_path, RESUME)
    assert "has 1 files that this writing did not make, such as shard-000004.tar" in caplog.text


@pytest.mark.parametrize("out", ["", 3, ("a",), ("s3://b/x", "s3://b/y"), "https://a.org/x", "a\0b"])
def test_an_output_that_is_no_place_is_refused(out: Any) -> None:
    with pytest.raises(ConfigError, match=r"out=|out:"):
        open_writer("mds", out, WriteOptions())


@pytest.mark.parametrize("name", ["exist_ok", "resume", "keep_local", "show_progress"])
def test_a_flag_that_is_a_text_is_refused_and_nothing_is_written_over(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='false' is no bool: give True or False"):
        WriteOptions(**{name: "false"})  # type: ignore[arg-type]  # refused


@pytest.mark.parametrize("kind", ["mds", "tar"])
def test_what_is_no_dict_is_no_sample_and_the_next_one_may_be_written(kind: str, tmp_path: Path) -> None:
    with open_writer(kind, tmp_path / "out", WriteOptions()) as writer:
        for wrong in ((), "x", 5):
            with pytest.raises(EncodeError, match=f"a sample is a dict .*, and not of type {type(wrong).__name__}"):
                writer.write(wrong)  # type: ignore[arg-type]  # refused
        for sample in samples(kind):
            writer.write(sample)
    assert files_of(tmp_path / "out") == whole(kind, tmp_path / "expected")


# -- a store ----------------------------------------------------------------------------------------------------------


def test_a_store_gets_the_index_last_and_the_local_disk_keeps_nothing(tmp_path: Path) -> None:
    expected = whole("tar", tmp_path / "expected")
    store = MemoryStore({})
    write("tar", "s3://b/out", WriteOptions(remote=store))
    assert {name: store.objects[f"s3://b/out/{name}"] for name in expected} == expected
    assert store.uploads[-2:] == ["s3://b/out/index.json", f"s3://b/out/{JOURNAL_NAME}"]
    assert set(store.objects) == {f"s3://b/out/{name}" for name in (*expected, JOURNAL_NAME)}
    write("tar", (tmp_path / "local", "s3://b/both"), WriteOptions(remote=store))
    assert not (tmp_path / "local").exists()
    write("tar", (tmp_path / "local", "s3://b/kept"), WriteOptions(remote=store, keep_local=True))
    assert files_of(tmp_path / "local") == expected


def test_a_second_directory_is_a_store_too(tmp_path: Path) -> None:
    write("mds", (tmp_path / "here", str(tmp_path / "there")), WriteOptions(keep_local=True))
    there = files_of(tmp_path / "there")
    assert json.loads(there.pop(JOURNAL_NAME).splitlines()[-1]) == {"is_complete": True}
    assert files_of(tmp_path / "here") == there == whole("mds", tmp_path / "expected")


def test_a_store_that_fails_ends_the_writing_which_then_goes_on(tmp_path: Path) -> None:
    expected = whole("mds", tmp_path / "expected")
    failing = {"shard.00002.mds"}

    def before_upload(url: str) -> None:
        if url.rpartition("/")[2] in failing:
            raise TransientStorageError(f"{url}: 503")

    store = MemoryStore({}, before_upload)
    with pytest.raises(TransientStorageError, match=r"shard.00002.mds: 503"):
        write("mds", "s3://b/out", WriteOptions(remote=store))
    assert "s3://b/out/index.json" not in store.objects
    failing = {"index.json"}
    with pytest.raises(TransientStorageError, match=r"index.json: 503"):
        write("mds", "s3://b/out", WriteOptions(remote=store, resume=True))
    assert "s3://b/out/index.json" not in store.objects
    failing = set()
    assert write("mds", "s3://b/out", WriteOptions(remote=store, resume=True)) == 0
    assert {name: store.objects[f"s3://b/out/{name}"] for name in expected} == expected
    with pytest.raises(OutputExistsError, match="is complete: there is nothing to resume"):
        write("mds", "s3://b/out", WriteOptions(remote=store, resume=True))
    with pytest.raises(OutputExistsError, match="is there: write elsewhere"):
        write("mds", "s3://b/out", WriteOptions(remote=store))


@pytest.mark.parametrize(
    ("cut", "message"), [(1, r"has \d+ bytes, \d+ were stored"), (0, "has the MD5 [0-9a-f]{32}, the file")]
)
def test_an_object_that_is_not_what_was_stored_ends_the_writing(cut: int, message: str) -> None:
    class Damaging(MemoryStore):
        def upload(self, path: Path, url: str) -> None:
            super().upload(path, url)
            if url.endswith("00001.mds"):
                data = self.objects[url]
                self.objects[url] = data[:-1] if cut else data[:-1] + b"?"

    store = Damaging({})
    options = WriteOptions(remote=store, storage_options={"verify_etag": True})
    with pytest.raises(StorageError, match=message):
        write("mds", "s3://b/out", options)
    assert "s3://b/out/index.json" not in store.objects


def test_an_index_in_a_store_that_is_written_over_claims_nothing_meanwhile() -> None:
    store = MemoryStore({})
    write("mds", "s3://b/out", WriteOptions(remote=store))
    interrupted("mds", "s3://b/out", 3, WriteOptions(remote=store, exist_ok=True))
    assert json.loads(store.objects["s3://b/out/index.json"]) == {"version": 2, "shards": []}


def test_an_object_that_is_lost_or_cut_in_the_store_is_written_again(tmp_path: Path) -> None:
    store = MemoryStore({})
    interrupted("mds", "s3://b/out", 6, WriteOptions(remote=store))
    store.objects["s3://b/out/shard.00001.mds"] = b"cut"
    assert write("mds", "s3://b/out", WriteOptions(remote=store, resume=True)) == NUM_SAMPLES - 2
    expected = whole("mds", tmp_path)
    assert {name: store.objects[f"s3://b/out/{name}"] for name in expected} == expected


@pytest.mark.parametrize("kind", ["mds", "energon"])
@pytest.mark.parametrize("begun_with", [True, False])
def test_a_local_copy_that_is_lost_is_made_again_by_a_writing_that_is_resumed(
    kind: str, begun_with: bool, tmp_path: Path
) -> None:
    store, local = MemoryStore({}), tmp_path / "out"
    out = (local, "s3://b/out")
    interrupted("tar" if kind == "energon" else kind, out, 5, WriteOptions(remote=store, keep_local=begun_with))
    shutil.rmtree(local, ignore_errors=True)  # as on another machine
    assert write(kind, out, WriteOptions(remote=store, keep_local=True, resume=True)) == NUM_SAMPLES
    expected = whole(kind, tmp_path / "expected")
    assert files_of(local) == expected == {name: store.objects[f"s3://b/out/{name}"] for name in expected}


def test_write_waits_while_too_many_shards_are_on_their_way(tmp_path: Path) -> None:
    may_go, is_at_last = threading.Event(), threading.Event()
    written: list[int] = []

    def before_upload(url: str) -> None:
        assert not url.endswith(".mds") or may_go.wait(60)

    def before_sample(number: int) -> None:
        written.append(number)
        if number == 6:  # it would begin shard 3
            is_at_last.set()

    store = MemoryStore({}, before_upload)
    options = WriteOptions(remote=store, num_uploads=1)
    thread = threading.Thread(target=write, args=("mds", (tmp_path, "s3://b/out"), options, before_sample))
    thread.start()
    assert is_at_last.wait(60)
    thread.join(0.1)  # shard 0 is on its way, 1 waits, and so does the writer, with 2
    assert (thread.is_alive(), written[-1], store.uploads) == (True, 6, [f"s3://b/out/{JOURNAL_NAME}"])
    may_go.set()
    thread.join()
    assert "s3://b/out/index.json" in store.objects


def test_the_journal_of_many_shards_is_stored_in_few_bytes() -> None:
    store = MemoryStore({})
    with open_writer("tar", "s3://b/out", WriteOptions(remote=store)) as writer:
        for n in range(400):
            writer.write({"__key__": str(n), "bin": b""})
    assert 32 < store.uploads.count(f"s3://b/out/{JOURNAL_NAME}") < 120


def test_s3_has_what_the_disk_has_and_our_reader_reads_it(s3: LocalS3, tmp_path: Path) -> None:
    s3.put("written/x", b"")
    options = WriteOptions(storage_options=s3.storage_options)
    interrupted("mds", "s3://written/out", 5, options)
    assert write("mds", "s3://written/out", replace(options, resume=True)) == 3
    expected = whole("mds", tmp_path / "expected")
    fetcher = Fetcher(options.storage)
    try:
        for name, content in expected.items():
            fetcher.download(f"s3://written/out/{name}", tmp_path / "back")
            assert (tmp_path / "back").read_bytes() == content
    finally:
        fetcher.close()
    dataset = StreamingDataset("s3://written/out/", str(tmp_path / "cache"), storage_options=s3.storage_options)
    try:
        assert [(row["x"], row["n"]) for row in dataset] == [(sample["x"], sample["n"]) for sample in samples("mds")]
    finally:
        dataset.close()


def test_a_journal_that_cannot_be_begun_keeps_no_later_writer_out(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        MdsWriter(tmp_path, {"x": "int"}, options=WriteOptions(source=object()))  # type: ignore[arg-type]  # it is no JSON
    assert os.listdir(tmp_path) == []
    LocalJournal(tmp_path, is_kept=False).close()


def test_a_line_of_the_journal_is_there_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    journal = LocalJournal(tmp_path, is_kept=False)
    journal.begin({})
    path = tmp_path / JOURNAL_NAME
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    shard = StoredShard(number=0, num_samples=1, files={"shard.00000.mds": 9}, record={})
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))  # as a disk with room for a part of it
    try:
        with pytest.raises(OSError, match="File too large"):
            journal.add(shard)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == before
    journal.add(shard)
    journal.close()
    assert parse_journal(path.read_text(), "here").shards == (shard,)
