"""Which directories become a cache, and what its files are."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cache.files import layout
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.files.owner_files import OwnerNote
from sqlstream.cli.main import main
from sqlstream.errors import CacheDirectoryError, CacheDiskError, CacheError, ConfigError
from sqlstream.process import locks
from sqlstream.testing.faults import SideEffects
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.storage import ScriptedFetcher
from tests.cache.session import Session
from tests.other_user import OTHER_USER, as_other_user

KEY = bytes(range(16))


def test_a_cache_directory_is_private_and_says_what_it_is(directory: Path) -> None:
    Cache(directory).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert json.loads((directory / "FORMAT").read_text())["format"] == 1
    assert (directory / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886806bc55")
    assert sorted(path.name for path in directory.iterdir()) == sorted(
        "FORMAT CACHEDIR.TAG ballast data gate index ledger.sqlite lock owners part removing".split()
    )


def test_a_directory_with_strange_files_is_refused_and_left_alone(directory: Path) -> None:
    directory.mkdir()
    (directory / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(CacheDirectoryError, match=r"photo\.jpg.*give an empty directory"):
        Cache(directory)
    assert [path.name for path in directory.iterdir()] == ["photo.jpg"]


def test_a_symlink_is_refused(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    directory.symlink_to(tmp_path / "real")
    with pytest.raises(CacheDirectoryError, match="symbolic link"):
        Cache(directory)


def test_a_file_is_refused(directory: Path) -> None:
    directory.write_text("a file")
    with pytest.raises(CacheDirectoryError, match=str(directory)):
        Cache(directory)


def test_a_strangers_link_in_the_place_of_a_folder_is_an_error_and_no_endless_loop(directory: Path) -> None:
    with Cache(directory) as cache:
        cache.fetcher = ScriptedFetcher({"http://h/1": b"1"})
        for number in range(256):
            (directory / f"data/{number:02x}").symlink_to("nowhere")
        with pytest.raises(CacheDiskError, match="cannot write http://h/1"), cache.pinned("http://h/1"):
            pass
    check_invariants(directory, at_rest=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(directory: Path) -> None:
    directory.mkdir()
    os.chown(directory, 12345, 12345)
    with pytest.raises(CacheDirectoryError, match="belongs to user 12345, we are 0"):
        Cache(directory)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_a_cache_that_another_user_may_not_look_into_is_named_with_its_owner(
    shared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shared / "cache"
    Cache(place).close()
    commands = (["cache", "stats"], ["cache", "verify"], ["cache", "top", "--once"], ["index", "info"])
    for words in commands:  # what they import may lie where the other user has no right to look
        main([*words, str(place)])
    capsys.readouterr()
    with as_other_user():
        with pytest.raises(CacheDirectoryError, match=rf"{place} belongs to user 0, we are {OTHER_USER}"):
            Cache(place, create=False)
        with pytest.raises(CacheDirectoryError, match=f"cannot create the cache directory {place}/inner"):
            Cache(place / "inner")
        for words in commands:
            assert main([*words, str(place)]) == 2
            error = capsys.readouterr().err
            assert str(place) in error
            assert error.count("\n") == 1


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_that_is_not_writable_is_refused(directory: Path) -> None:
    directory.mkdir(mode=0o500)
    with pytest.raises(CacheDirectoryError, match="not writable"):
        Cache(directory)


def test_a_path_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheDirectoryError, match="cannot create"):
        Cache(tmp_path / "file" / "cache")


def test_create_false_refuses_what_is_no_cache_and_makes_nothing(directory: Path) -> None:
    with pytest.raises(CacheDirectoryError, match="no sqlstream cache"):
        Cache(directory, create=False)
    assert not directory.exists()


def test_another_layout_version_is_refused(directory: Path) -> None:
    Cache(directory).close()
    (directory / "FORMAT").write_text('{"format": 2, "uuid": "x"}')
    with pytest.raises(CacheDirectoryError, match="has layout 2"):
        Cache(directory)
    (directory / "FORMAT").write_text("something")
    with pytest.raises(CacheDirectoryError, match="is not as sqlstream writes it: remove that file"):
        Cache(directory)


@pytest.mark.parametrize("name", ["lock", "ledger.sqlite", "gate"])
def test_a_planted_symlink_is_never_followed(directory: Path, tmp_path: Path, name: str) -> None:
    Cache(directory).close()
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "target")
    with contextlib.suppress(CacheError):  # the ledger's is moved aside, the locks' is refused
        Cache(directory).close()
    assert not (tmp_path / "target").exists()


def test_a_killed_creation_is_repeated(directory: Path) -> None:
    """FORMAT comes last: whatever of the rest is there already is ours."""
    Cache(directory).close()
    (directory / "FORMAT").unlink()
    (directory / "owners").rmdir()
    (directory / "ledger.sqlite-journal").touch()  # another process makes the ledger at this moment
    Cache(directory).close()
    assert (directory / "FORMAT").exists()
    assert (directory / "owners").is_dir()


@pytest.mark.parametrize("name", ["create", "allow_network_fs"])
def test_a_flag_that_is_a_text_is_refused(directory: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='false' is no bool: give True or False"):
        Cache(directory, **{name: "false"})  # type: ignore[arg-type]  # refused
    with Cache(directory) as cache, pytest.raises(ConfigError, match="index='no' is no bool"):
        cache.clear(index="no")  # type: ignore[arg-type]  # refused


def test_locks_that_do_not_work_are_noticed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, kind: None)  # as on a file system that only says yes
    with pytest.raises(CacheDirectoryError, match="locks do not work"):
        Cache(directory)
    Cache(directory, allow_network_fs=True).close()
    assert not list((directory / "index").iterdir())


def test_a_directory_that_takes_no_file_to_lock_is_named_with_the_cure(directory: Path) -> None:
    with pytest.raises(CacheDirectoryError, match=r"cannot create and lock files in .* \(No such file.*\): .*makes it again"):
        layout.check_locks(directory / "index")


@pytest.mark.parametrize(
    "url", ["s3://bucket/cache", "S3://bucket/cache", "gs://b", "file:///cache", "FILE:/cache", "a::s3://b/c"]
)
def test_a_cache_directory_that_is_a_url_is_refused_and_makes_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is a URL: give a directory on a disk of this machine"):
        Cache(url)
    assert list(tmp_path.iterdir()) == []


def test_a_tilde_in_the_path_of_a_cache_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with Cache("~/cache") as cache:
        assert cache.path == tmp_path / "cache"


@pytest.mark.parametrize("inside", ["index", "data/ab", "mine/deep"])
def test_a_directory_inside_another_cache_is_refused(directory: Path, tmp_path: Path, inside: str) -> None:
    Cache(directory).close()
    with pytest.raises(CacheDirectoryError, match=f"lies inside the cache {directory}"):
        Cache(directory / inside)
    (tmp_path / "link").symlink_to(directory / "index")
    with pytest.raises(CacheDirectoryError, match=f"lies inside the cache {directory}"):
        Cache(tmp_path / "link/mine")
    assert list((directory / "index").iterdir()) == []


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "9p"])
def test_network_file_systems_are_refused_by_type(tmp_path: Path, kind: str) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path} rw - {kind} server:/x rw\n")
    assert layout.filesystem_kind(tmp_path, str(table)) == kind
    assert layout.is_network(kind)
    assert layout.filesystem_kind(Path("/"), str(table)) == "ext4"
    assert not layout.is_network("ext4")


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("d\u00e9mo", "d\u00e9mo"),
        ("\u6570\u636e", "\u6570\u636e"),
        ("a b\tc\\d", "a\\040b\\011c\\134d"),
        ("n\u00a0b\u0085", "n\u00a0b\u0085"),
        ("b\udcff", "b\udcff"),
    ],
    ids=["latin", "chinese", "escaped", "blanks of unicode", "no utf-8"],
)
def test_a_mount_point_of_any_spelling_is_found(tmp_path: Path, name: str, written: str) -> None:
    table = tmp_path / "mountinfo"
    text = f"1 0 8:1 / / rw - ext4 /dev/a rw\n2 1 0:2 / {tmp_path}/{written} rw,noatime shared:7 - nfs4 server:/x rw\n"
    table.write_bytes(os.fsencode(text))
    assert layout.filesystem_kind(tmp_path / name / "cache", str(table)) == "nfs4"
    assert layout.filesystem_kind(tmp_path, str(table)) == "ext4"


def test_a_part_is_locked_from_its_creation_and_free_after_its_close(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    part = disk.create_part(KEY)
    assert disk.part_is_live(part.name) is True
    disk.remove_dead_part(part.name)
    assert disk.scan_parts() == [part.name]  # it is not dead
    disk.close_part(part)
    assert disk.part_is_live(part.name) is False
    disk.remove_dead_part(part.name)
    assert disk.part_is_live(part.name) is None


def test_a_part_that_is_removed_gives_its_bytes_back_at_once_and_its_lock_later(directory: Path) -> None:
    Cache(directory).close()
    disk = Disk(directory)
    removed, published = disk.create_part(KEY), disk.create_part(KEY[::-1])
    for part in (removed, published):
        os.pwrite(part.fd, bytes(100_000), 0)
    disk.publish(published, KEY[::-1], ".bin", 100_000)
    for part in (removed, published):
        assert disk.remove_part(part.name)
    assert disk.scan_parts() == []
    assert (os.fstat(removed.fd).st_size, os.fstat(removed.fd).st_blocks) == (0, 0)
    assert disk.data_size(KEY[::-1], ".bin") == 100_000, "what is in data/ is no part any more"
    for part in (removed, published):
        disk.close_part(part)


def test_two_who_ask_whether_a_part_lives_do_not_disturb_each_other(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    disk.close_part(part := disk.create_part(KEY))
    fd = locks.open_descriptor(directory / "part" / part.name, os.O_RDWR)
    assert not locks.is_locked(fd)  # and holds what it asked with
    assert disk.part_is_live(part.name) is False
    locks.close_descriptor(fd)


def test_published_bytes_are_cut_to_their_length_and_named_by_the_key(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    part = disk.create_part(KEY)
    disk.allocate(part, 8192)
    os.pwrite(part.fd, b"hello", 0)
    disk.publish(part, KEY, ".txt", 5)
    disk.close_part(part)
    assert Path(disk.data_path(KEY, ".txt")).read_bytes() == b"hello"
    assert disk.data_path(KEY, ".txt") == f"{directory}/data/{KEY.hex()[:2]}/{KEY.hex()}.txt"
    assert disk.data_size(KEY, ".txt") == 5
    assert [(file.key, file.ext, file.size_bytes) for file in disk.scan_data()] == [(KEY, ".txt", 5)]
    assert disk.remove_data(KEY, ".txt")
    assert disk.remove_data(KEY, ".txt")  # it is gone: that is what was asked
    assert disk.data_size(KEY, ".txt") is None


def test_a_directory_in_the_place_of_a_file_is_moved_aside_not_deleted(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    path = Path(disk.data_path(KEY, ""))
    path.mkdir(parents=True)
    (path / "mine").write_text("precious")
    assert disk.data_size(KEY, "") is None
    assert disk.remove_data(KEY, "")
    assert not path.exists()
    assert [found.read_text() for found in path.parent.rglob("mine")] == ["precious"]
    assert list(disk.scan_data()) == []


def test_an_owner_note_comes_back_as_it_was_written(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    fd = disk.owners.create("0" * 32)
    assert disk.owners.read_note("0" * 32) is None
    for note in (
        OwnerNote(pid=1, limit_bytes=None, pinned=[KEY, KEY[::-1]]),
        OwnerNote(pid=1 << 22, limit_bytes=1 << 50, pinned=[]),
    ):
        disk.owners.write_note(fd, note)
        assert disk.owners.read_note("0" * 32) == note
    locks.close_descriptor(fd)
    assert disk.owners.read_note("1" * 32) is None


def test_the_ballast_is_given_up_and_taken_back(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    assert (directory / "ballast").stat().st_blocks * 512 >= 8 << 20
    disk.drop_ballast()
    assert not (directory / "ballast").exists()
    assert disk.is_ballast_dropped
    disk.restore_ballast()
    assert (directory / "ballast").stat().st_blocks * 512 >= 8 << 20
    assert not disk.is_ballast_dropped


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("folder", ["data", "part", "owners", "index"])
def test_a_folder_that_somebody_removed_is_made_anew(directory: Path, folder: str, is_open: bool) -> None:
    urls = ["s3://bucket/0", "s3://bucket/1"]
    fetcher = ScriptedFetcher(dict.fromkeys(urls, b"bytes"))
    with Cache(directory, limit="1mb") as cache:
        cache.fetcher = fetcher
        with cache.pinned(urls[0]):
            pass
        if is_open:
            shutil.rmtree(directory / folder)
            assert cache.statistics().index_bytes == 0
            assert cache.clear(index=True).removed_index_files == 0
            for url in urls:
                with cache.pinned(url) as path:
                    assert path.read_bytes() == b"bytes"
    if not is_open:
        shutil.rmtree(directory / folder)
    with Cache(directory) as cache:
        cache.fetcher = fetcher
        for url in urls:
            with cache.pinned(url) as path:
                assert path.read_bytes() == b"bytes"
        assert cache.verify() == []
    check_invariants(directory, at_rest=True)


def test_clearing_index_files_leaves_builders_and_links_alone_and_may_meet_another_one(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Cache(directory) as cache:
        place = directory / "index"
        for name in ("key.lock", "key.0.part.tmp", "dead.0.part.tmp", "index.sqlite", "gone.sqlite"):
            (place / name).write_bytes(b"bytes")
        (place / "link").symlink_to(directory / "FORMAT")
        builder = locks.open_descriptor(place / "key.lock", os.O_RDWR)
        assert locks.try_lock(builder)
        found = Session(cache).disk.index_files()
        (place / "gone.sqlite").unlink()  # another process clears at the same moment
        monkeypatch.setattr(Session(cache).disk, "index_files", lambda: found)
        assert cache.statistics().index_bytes == 4 * len(b"bytes")
        assert cache.clear(index=True).removed_index_files == 2
        assert sorted(os.listdir(place)) == ["key.0.part.tmp", "key.lock", "link"]
        locks.close_descriptor(builder)


def test_a_directory_that_was_moved_while_open_opens_at_its_new_place(directory: Path, tmp_path: Path) -> None:
    url, moved = "s3://bucket/0", tmp_path / "moved"
    fetcher = ScriptedFetcher({url: b"bytes"})
    with Cache(directory) as cache:
        cache.fetcher = fetcher
        with cache.pinned(url):
            pass
        Session(cache).flush()
        directory.rename(moved)
        with pytest.raises(CacheDirectoryError, match="is gone"), cache.pinned(url):
            pass
        with Cache(moved) as anew:
            anew.fetcher = fetcher
            with anew.pinned(url) as path:
                assert path.read_bytes() == b"bytes"
                assert path.is_relative_to(moved)
                cache.close()
                assert anew.clear().kept_pinned_entries == 1
            assert anew.verify() == []
    assert fetcher.num_gets[url] == 1
    check_invariants(moved, at_rest=True)


def test_a_directory_whose_format_was_lost_with_the_power_is_made_a_cache_again(directory: Path) -> None:
    url = "s3://bucket/0"
    fetcher = ScriptedFetcher({url: b"bytes"})
    for _ in range(2):
        with Cache(directory) as cache:
            cache.fetcher = fetcher
            with cache.pinned(url) as path:
                assert path.read_bytes() == b"bytes"
        (directory / "FORMAT").write_bytes(b"")
    assert fetcher.num_gets[url] == 1


def test_a_ballast_that_cannot_be_had_is_no_error(directory: Path) -> None:
    def fail(name: str) -> None:
        (directory / "ballast").unlink(missing_ok=True)  # another process, which fails as well
        raise OSError(errno.ENOSPC, "no space left")

    with Cache(directory) as cache:
        disk = Session(cache).disk
        for effect in ("create", "posix_fallocate"):
            disk.drop_ballast()
            with SideEffects(1, fail, only=frozenset([effect])).installed():
                disk.restore_ballast()
            assert disk.is_ballast_dropped
        disk.restore_ballast()
        assert not disk.is_ballast_dropped


@pytest.mark.parametrize("folder", ["data", "index", "owners"])
def test_a_folder_that_cannot_be_read_is_an_error_of_ours(directory: Path, folder: str) -> None:
    with Cache(directory, limit="1mb") as cache:
        place = directory / folder
        if folder == "owners":
            (own,) = place.iterdir()
            place = own
        place.rename(directory / "aside")
        place.mkdir() if folder == "owners" else place.write_bytes(b"")
        with pytest.raises(CacheDiskError, match="cannot read"):
            cache.verify() if folder == "data" else cache.statistics()
        place.rmdir() if folder == "owners" else place.unlink()
        (directory / "aside").rename(place)
        assert cache.statistics().entries == 0
    check_invariants(directory, at_rest=True)


def test_an_object_that_cannot_be_looked_at_is_an_error_of_ours(directory: Path) -> None:
    url = "http://nowhere/a.bin"
    with Cache(directory, limit="1mb") as cache:
        cache.fetcher = ScriptedFetcher({url: b"data"})
        with cache.pinned(url) as path:
            folder = path.parent
        aside = folder.rename(directory / "aside")
        folder.write_bytes(b"")
        for look in (cache.verify, lambda: cache.acquire_many([url])):
            with pytest.raises(CacheDiskError, match=f"cannot read {path} .Not a directory.: look at that disk"):
                look()
        folder.unlink()
        aside.rename(folder)
        with cache.pinned(url) as path:
            assert path.read_bytes() == b"data"
    check_invariants(directory, at_rest=True)


def test_a_part_that_cannot_be_looked_at_is_an_error_of_ours(directory: Path) -> None:
    disk = Disk(directory)
    disk.open(create=True)
    (directory / "part").rmdir()
    (directory / "part").write_bytes(b"")
    with pytest.raises(CacheDiskError, match=r"cannot read .*part/x"):
        disk.part_is_live("x")
