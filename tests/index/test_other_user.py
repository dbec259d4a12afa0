"""Files that belong to another user: what may not be read is an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlstream.errors import AccessDeniedError, IndexDatabaseError
from sqlstream.index.file.intact import is_there
from sqlstream.index.sources.base.access import stat_file
from sqlstream.index.sources.shards.by_name import shard_urls
from sqlstream.storage.base.protocols import NO_REQUESTS
from tests.other_user import as_other_user


def test_an_index_file_of_another_user_is_named_with_the_cure(shared: Path) -> None:
    index = shared / "index.sqlite"
    index.write_bytes(b"SQLite format 3\0" + bytes(100))
    index.chmod(0)
    with as_other_user(), pytest.raises(IndexDatabaseError, match=r"index\.sqlite may not be read .*: give each user a dst"):
        is_there(index)


def test_shards_in_a_folder_of_another_user_are_looked_for_and_refused_by_name(shared: Path) -> None:
    folder = shared / "shards"
    folder.mkdir()
    (folder / "0.tar").touch()
    folder.chmod(0)
    with as_other_user():
        named = shard_urls(f"{folder}/{{0..1}}.tar")
        assert named == [f"{folder}/0.tar", f"{folder}/1.tar"]
        with pytest.raises(AccessDeniedError, match=r"0\.tar may not be read"):
            stat_file(named[0], NO_REQUESTS)
    folder.chmod(0o700)
