"""The index of a TAR and of a ZIP archive, beside `tarfile` and `zipfile` in the same run; and the content of ZIP members.

    .venv/bin/python benchmarks/members.py [--members 1000000] [--rounds 3] [--only zip] [--keep DIR]

Each figure comes from a process of its own, which reads a file that is in the page cache; `tarfile` forgets members as it goes.
Prints a line a figure and one JSON document. Seconds are CPU time of this machine; compare ratios.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time

from benchmarks.index import build, in_new_process
from sqlstream.storage.members.tar import read_members
from sqlstream.storage.members.zip.directory import read_directory
from sqlstream.storage.members.zip.member import content

READ_AHEAD_BYTES = 1 << 20
"""Of a local archive of small members: no request costs a round trip, and none brings what is not needed."""
NUM_CONTENTS = 50_000


class OnDisk:
    """A local file by `pread`."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)
        self.size_bytes = path.stat().st_size

    def read_at(self, offset: int, num_bytes: int, /) -> bytes:
        return os.pread(self._file, num_bytes, offset)


def names(num_members: int) -> list[str]:
    """Samples of two parts."""
    return [f"{number // 2:09d}.{('jpg', 'json')[number % 2]}" for number in range(num_members)]


def make_tar(path: Path, num_members: int, kind: int) -> None:
    """Write members of one byte."""
    with tarfile.open(path, "w", format=kind) as archive:
        for name in names(num_members):
            member = tarfile.TarInfo(name)
            member.size, member.mtime = 1, 1.5 if kind == tarfile.PAX_FORMAT else 1
            archive.addfile(member, io.BytesIO(b"1"))
            archive.members = []


def make_zip(path: Path, num_members: int) -> None:
    """Write deflated members of 2000 bytes of text."""
    text = json.dumps(list(range(400)))[:2000].encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names(num_members):
            archive.writestr(name, text)


def walk_tar(path: Path) -> int:
    return sum(1 for _ in read_members(OnDisk(path), "x", read_ahead_bytes=READ_AHEAD_BYTES))


def walk_tar_as_remote(path: Path) -> int:
    return sum(1 for _ in read_members(OnDisk(path), "x"))


def walk_by_tarfile(path: Path) -> int:
    count = 0
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            count += member.isreg()
            archive.members = []
    return count


def read_zip(path: Path) -> int:
    return sum(1 for _ in read_directory(OnDisk(path), "x"))


def read_by_zipfile(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return len(archive.infolist())


def contents(path: Path) -> int:
    source = OnDisk(path)
    members = [member for member, _ in zip(read_directory(source, "x"), range(NUM_CONTENTS), strict=False)]
    return sum(len(content(source.read_at(m.start, m.stop - m.start), m, "x")) for m in members)


def contents_by_zipfile(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(len(archive.read(name)) for name in archive.namelist()[:NUM_CONTENTS])


def whole_index(path: Path) -> int:
    """Build the index of a dataset: with its file, as a user does."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        return 2 * len(build(path, Path(scratch) / "index", index_limit=None))


def bytes_a_part(path: Path, num_members: int) -> float:
    """Return what the file of an index holds for a member, beyond the text of keys."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        index = build(path, Path(scratch) / "index", index_limit=None)
        ((num_key_bytes,),) = index.stored('SELECT sum(length("__key__")) FROM rows')
        size: int = index.path.stat().st_size - num_key_bytes
        index.close()
        return size / num_members


def peak_mib() -> float:
    """Return the most memory of this process; `ru_maxrss` of a child begins at what its parent had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def measure(run: Callable[[Path], int], path: Path) -> dict[str, float]:
    """Run once, after the file was read."""
    with path.open("rb") as file:
        while file.read(1 << 20):
            pass
    before, start = peak_mib(), process_time()
    count = run(path)
    return {"count": count, "seconds": process_time() - start, "more_mib": peak_mib() - before}


CASES: dict[str, tuple[str, list[Callable[[Path], int]]]] = {
    "tar, ustar": ("ustar.tar", [walk_by_tarfile, walk_tar, walk_tar_as_remote]),
    "tar, a pax header before each member": ("pax.tar", [walk_by_tarfile, walk_tar, walk_tar_as_remote]),
    "zip, directory": ("deflated.zip", [read_by_zipfile, read_zip]),
    "tar, whole index": ("ustar.tar", [walk_by_tarfile, whole_index]),
    "zip, whole index": ("deflated.zip", [read_by_zipfile, whole_index]),
    f"zip, directory and content of {NUM_CONTENTS} members": ("deflated.zip", [contents_by_zipfile, contents]),
}
"""The first of each is the standard library."""


def make(path: Path, num_members: int) -> None:
    """Write an archive, if it is not there."""
    makers: dict[str, Callable[[Path], None]] = {
        "ustar.tar": lambda path: make_tar(path, num_members, tarfile.USTAR_FORMAT),
        "pax.tar": lambda path: make_tar(path, num_members, tarfile.PAX_FORMAT),
        "deflated.zip": lambda path: make_zip(path, num_members),
    }
    if not path.exists():
        makers[path.name.partition("-")[2]](path.with_suffix(".part"))
        path.with_suffix(".part").rename(path)


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--members", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="how names of cases begin: 'zip'")
    parser.add_argument("--keep", type=Path, help="a directory for the archives, which the next run finds")
    options = parser.parse_args()
    results, sizes = {}, dict[str, float]()
    with tempfile.TemporaryDirectory() as scratch:
        place = options.keep or Path(scratch)
        for case, (name, runs) in CASES.items():
            if not case.startswith(options.only):
                continue
            make(path := place / f"{options.members}-{name}", options.members)
            rounds = [[in_new_process(measure, run, path) for run in runs] for _ in range(options.rounds)]
            assert len({found["count"] for of_round in rounds for found in of_round}) == 1, "all read the same"
            for number, run in enumerate(runs):
                ratios = [of_round[0]["seconds"] / of_round[number]["seconds"] for of_round in rounds]
                found = {key: median(of_round[number][key] for of_round in rounds) for key in rounds[0][number]}
                results[f"{case}: {run.__name__}"] = {**found, "ratio": median(ratios)}
                print(
                    f"{case}: {run.__name__}: {found['seconds']:.2f} s, {found['more_mib']:.0f} MiB, {median(ratios):.2f}×",
                    flush=True,
                )
            if whole_index in runs:
                sizes[case] = bytes_a_part(path, options.members)
                print(f"{case}: {sizes[case]:.1f} bytes of its file for a member", flush=True)
    print(json.dumps({"members": options.members, "rounds": options.rounds, "results": results, "bytes_a_part": sizes}))


if __name__ == "__main__":
    main()
