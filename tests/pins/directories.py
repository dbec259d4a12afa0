"""Cache directories as the code left them: archives in `directories/`, and what was in them in directories.json.

- `idle`: an index with two filters and a table of weights, all objects, stored samples; no process uses it.
- `lazy`: footers and chunks of a lazy index, whose filter was run on all of it.
- `killed`: its process was killed: pins, touches that no process has drained, a download half way, entries from before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.files.disk import Disk
from sqlstream.cache.recovery.rebuild import boot_id
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from sqlstream.transforms.presets import CacheTransform, LoadFromDiskTransform
from tests.pins.orders import WEIGHTS
from tests.pins.served import CSV, NUM_OBJECTS, PARQUET, served, url_of

SCENES = ("idle", "lazy", "killed")
FILTER, QUERY = "score > 0.3", "SELECT *, upper(index) AS name FROM dataframe WHERE score < 0.7 ORDER BY score DESC"
LIMIT_BYTES = 100_000
"""All objects fill nearly all of it, so that reads are noted in `touch`."""
HALF_WAY = NUM_OBJECTS - 1
"""The object whose download is under way when its process is killed."""
PINNED = (0, 1, 2)
ARCHIVES = Path(__file__).parent / "directories"


def opened_idle(directory: Path, **options: Any) -> StreamingDataset:
    """Open a dataset of objects whose samples are stored."""
    return StreamingDataset(
        CSV,
        directory,
        columns_to_download=["object"],
        transforms=[CacheTransform("loaded", [LoadFromDiskTransform(["object"])])],
        shuffle_seed=5,
        show_progress=False,
        cache_limit=None,
        **options,
    )


def opened_lazy(directory: Path) -> StreamingDataset:
    """Open a lazy dataset without objects."""
    return StreamingDataset(
        PARQUET,
        directory,
        lazy_index_chunk_size=10,
        where=FILTER,
        shuffle_seed=5,
        show_progress=False,
        cache_limit=None,
    )


def samples_of(dataset: StreamingDataset) -> list[list[object]]:
    """Return the next epoch: row, score and length of the object of each sample."""
    return [[sample["__row__"], sample["score"], len(sample["object"])] for sample in dataset]


def facts_of(directory: Path) -> dict[str, Any]:
    """Return what the ledger's tables hold, read without our code, and the names of the files."""
    with contextlib.closing(sqlite3.connect(directory / "ledger.sqlite")) as ledger:
        tables = ("entry", "owner", "pin", "touch")
        counts = {table: ledger.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables}
        states = dict(ledger.execute("SELECT state, count(*) FROM entry GROUP BY state").fetchall())
    data = sorted(str(path.relative_to(directory)) for path in (directory / "data").glob("*/*"))
    parts = sorted(path.name for path in (directory / "part").iterdir())
    index = sorted(path.name for path in (directory / "index").iterdir() if path.suffix != ".lock")
    return {"counts": counts, "states": states, "data": data, "parts": parts, "index": index}


def make_idle(directory: Path, _: FaultyHttpServer) -> dict[str, Any]:
    """Two epochs, and the openings of two filters and of weights."""
    with opened_idle(directory) as dataset:
        found = [samples_of(dataset) for _ in range(2)]
    filtered = []
    for options in ({"where": FILTER}, {"sql_query": QUERY}, {"weights": WEIGHTS}):
        with opened_idle(directory, **options) as dataset:
            filtered.append(samples_of(dataset))
    return {"epochs": found, "filtered": filtered}


def make_lazy(directory: Path, _: FaultyHttpServer) -> dict[str, Any]:
    """One epoch, after which the filter is known."""
    with opened_lazy(directory) as dataset:
        return {"epochs": [samples_of(dataset)], "length": len(dataset)}


def make_killed(directory: Path, server: FaultyHttpServer) -> dict[str, Any]:
    """A process that pins, reads, downloads, and is killed."""
    pid = os.fork()
    if pid == 0:
        try:
            be_killed(directory)
        finally:
            os._exit(1)
    path = f"/objects/{HALF_WAY}.bin"
    while not server.requests(path) or not any(part.stat().st_blocks for part in (directory / "part").iterdir()):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.05)
    time.sleep(1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    disk = Disk(directory)
    while any(map(disk.part_is_live, disk.scan_parts())):
        time.sleep(0.05)
    return {}


def be_killed(directory: Path) -> None:
    """The process."""
    cache = Cache(directory, limit=LIMIT_BYTES)
    urls = [url_of(number) for number in range(HALF_WAY)]
    for url in urls:
        with cache.pinned(url):
            pass
    cache.acquire_many([urls[number] for number in PINNED])
    cache.acquire_many(urls[5:8])  # these are touched, and given back
    cache.release_many(urls[5:8])
    cache.verify()  # writes what waits
    threading.Thread(target=cache.acquire_many, args=([url_of(HALF_WAY)],), daemon=True).start()
    signal.pause()


def compute(directory: Path) -> dict[str, Any]:
    """Make all directories and their archives; return what is in them."""
    socket.gethostname = lambda: "pins"
    sys.argv[0] = "pins"
    scenes: dict[str, Any] = {}
    ARCHIVES.mkdir(exist_ok=True)
    for scene, make in (("idle", make_idle), ("lazy", make_lazy), ("killed", make_killed)):
        with served() as server:
            answer = FaultyAnswer(fault=Fault.HOLD, after_bytes=2000, gate=threading.Event())
            server.script(f"/objects/{HALF_WAY}.bin", *([answer] if scene == "killed" else []))
            found = make(directory / scene, server)
        pack(directory / scene, ARCHIVES / f"{scene}.tar.xz")
        scenes[scene] = {**facts_of(directory / scene), **found}
    return {"scenes": scenes}


def pack(directory: Path, archive: Path) -> None:
    """Write an archive of a cache, without the ballast, which is room and nothing else."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return None if member.name.endswith(("/ballast", "-shm")) or not (member.isfile() or member.isdir()) else member

    with tarfile.open(archive, "w:xz") as tar:
        tar.add(directory, arcname=directory.name, filter=anonymous)


def unpacked(scene: str, directory: Path) -> Path:
    """Return a copy of a directory."""
    with tarfile.open(ARCHIVES / f"{scene}.tar.xz") as tar:
        tar.extractall(directory, filter="tar")
    for path in [directory / scene, *(directory / scene).rglob("*")]:
        if path.is_dir():
            path.chmod(0o700)
    say_that_the_machine_runs_since(directory / scene)
    return directory / scene


def say_that_the_machine_runs_since(directory: Path) -> None:
    """Have the ledger name this start of the machine: after another one, files as young as these are dropped as torn.

    Its write-ahead log is kept, which the last connection to close would empty.
    """
    files = [directory / "ledger.sqlite", directory / "ledger.sqlite-wal"]
    with contextlib.closing(sqlite3.connect(files[0])) as ledger:
        ledger.execute("UPDATE meta SET boot_id = ?", (boot_id(),))
        ledger.commit()
        copies = [Path(shutil.copy(file, file.with_name(f"{file.name}.copy"))) for file in files]
    for copy, file in zip(copies, files, strict=True):
        copy.replace(file)


@contextlib.contextmanager
def quiet(server: FaultyHttpServer) -> Iterator[list[str]]:
    """Collect the paths that are downloaded within."""
    num_before, paths = len(server.requests()), list[str]()
    yield paths
    paths += [request.path for request in server.requests()[num_before:] if request.method == "GET"]
