"""Writes `.nv-meta`, by which Megatron-Energon reads a directory of tars: their samples and parts in SQLite, counts, a split.

.nv-meta/index.sqlite     samples and parts, with their places (no database of ours: SQLite is the format)
.nv-meta/.info.json       samples of each tar; their order is `tar_file_id`
.nv-meta/split.yaml       all tars are `train`: change it by hand
.nv-meta/dataset.yaml     samples are dicts of their parts
.nv-meta/index.uuid       names this content
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import shutil
import sqlite3
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from sqlstream.errors import SourceError
from sqlstream.storage.members.names import group
from sqlstream.storage.members.tar import TarMember, read_members
from sqlstream.write.check import FileRange, tar_offsets

FOLDER = ".nv-meta"
ENERGON_FILES = ("dataset.yaml", "split.yaml", "index.uuid", "index.sqlite", ".info.json")
"""The files, in the order in which they are stored: Energon takes a directory as prepared that has the last one."""
_VERSION = "7.4.1"
"""The version of Megatron-Energon whose files these equal."""
_TABLES = """
CREATE TABLE samples (
    tar_file_id INTEGER NOT NULL, sample_key TEXT NOT NULL UNIQUE, sample_index INTEGER NOT NULL,
    byte_offset INTEGER, byte_size INTEGER
);
CREATE TABLE sample_parts (
    tar_file_id INTEGER, sample_index INTEGER, part_name TEXT, content_byte_offset INTEGER, content_byte_size INTEGER
);
"""
_INDEXES = """
CREATE INDEX idx_samples_by_tar_and_idx ON samples(tar_file_id, sample_index);
CREATE INDEX idx_sample_parts_seq ON sample_parts(tar_file_id, sample_index, content_byte_offset);
CREATE INDEX idx_sample_parts_full
    ON sample_parts(tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size);
"""


@contextlib.contextmanager
def part_folder(directory: Path) -> Iterator[Path]:
    """Give an empty directory in that of the tars, for the time of the context; what a killed process left there is removed."""
    folder = directory / f"{FOLDER}.part"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_energon(tars: Iterable[tuple[str, Path]], folder: Path) -> int:
    """Write the files of `.nv-meta` into a directory, and return how many samples there are.

    Args:
        tars: Name, relative to the directory that `.nv-meta` will be in, and file of each tar, needed for its turn only.
        folder: Where the files are written; it is empty.

    Raises:
        SourceError: A key comes twice, or a tar is damaged.
        OSError: The disk takes no more.
    """
    counts: dict[str, int] = {}
    digest = hashlib.sha256()
    connection = sqlite3.connect(folder / "index.sqlite")
    try:
        connection.executescript(_TABLES)
        for number, (name, path) in enumerate(tars):
            digest.update(f"{name}\0{path.stat().st_size}\0".encode() + tar_offsets(path, name))
            counts[name] = _add(connection, number, name, path)
        connection.executescript(_INDEXES)
        connection.commit()
    except sqlite3.OperationalError as error:
        code = errno.ENOSPC if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_FULL else errno.EIO
        raise OSError(code, f"SQLite: {error}", str(folder)) from error
    finally:
        connection.close()
    (folder / ".info.json").write_text(json.dumps({"energon_version": _VERSION, "shard_counts": counts}, indent=2))
    names = "".join(f"\n  - {json.dumps(name)}" for name in counts) or " []"
    (folder / "split.yaml").write_text(f"split_parts:\n  train:{names}\n  val: []\n  test: []\nexclude: []\n")
    (folder / "dataset.yaml").write_text("__module__: megatron.energon\n__class__: CrudeWebdataset\n")
    (folder / "index.uuid").write_text(str(uuid.UUID(bytes=digest.digest()[:16], version=4)))
    return sum(counts.values())


def _add(connection: sqlite3.Connection, number: int, name: str, path: Path) -> int:
    """Insert the samples of a tar, and return how many."""
    samples = list(_samples(name, path))
    starts = [min(member.start for _, member in parts) for _, parts in samples]
    ends = [max(member.offset + member.size + -member.size % 512 for _, member in parts) for _, parts in samples[-1:]]
    sizes = [stop - start for start, stop in zip(starts, [*starts[1:], *ends], strict=True)]
    try:
        connection.executemany(
            "INSERT INTO samples VALUES (?, ?, ?, ?, ?)",
            [(number, key, at, starts[at], sizes[at]) for at, (key, _) in enumerate(samples)],
        )
    except sqlite3.IntegrityError as error:
        raise SourceError(
            f"{name}: a key of it comes twice, and Energon needs each once in all tars: write them anew"
        ) from error
    connection.executemany(
        "INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)",
        [(number, at, part, member.offset, member.size) for at, (_, parts) in enumerate(samples) for part, member in parts],
    )
    return len(samples)


def _samples(name: str, path: Path) -> Iterator[tuple[str, list[tuple[str, TarMember]]]]:
    """Yield keys with their parts, whose names keep their case."""
    for key, parts in group(read_members(FileRange(path), name), name):
        yield key, [(member.name[len(key) + 1 :], member) for member in parts.values()]
