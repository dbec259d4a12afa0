"""Processes that were started with less than usual: no standard streams, few descriptors, no further threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.stream.sources import Photos

READ = """
import os, sys
from sqlstream import StreamingDataset
from tests.stream.sources import check_bytes

def main():
    src, dst, report = sys.argv[1:]
    with StreamingDataset(
        src, dst=dst, columns_to_download=["image"], transforms=[check_bytes], shuffle_seed=0, cache_limit="10mb", max_size=20
    ) as dataset:
        right = sum(sample["is_right"] for sample in dataset) + dataset[3]["is_right"]
        low = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
    with open(report, "w") as file:
        file.write(f"{right} {[name for name in low if dst in name or 'socket' in name or 'memfd' in name]}")
"""


def answer_of(program: str, shell: str, photos: Photos, tmp_path: Path) -> str:
    """What the program wrote into its report; `shell` starts it."""
    script = tmp_path / "program.py"
    script.write_text(f'{program}\nif __name__ == "__main__":\n    main()\n')
    command = [sys.executable, str(script), photos.src, str(tmp_path / "dst"), str(tmp_path / "report")]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(
        ["bash", "-c", shell, "bash", *command], cwd=root, env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}, check=False
    )
    assert done.returncode == 0
    return (tmp_path / "report").read_text()


@pytest.mark.parametrize(
    "closed",
    ["0<&- 1>&- 2>&-", "2>&-", pytest.param("0<&- 2>&-", marks=pytest.mark.slow), pytest.param("1>&-", marks=pytest.mark.slow)],
)
def test_started_without_standard_streams_it_works_and_keeps_their_numbers_free(
    photos: Photos, tmp_path: Path, closed: str
) -> None:
    assert answer_of(READ, f'"$@" {closed}', photos, tmp_path) == "21 []"


FEW_DESCRIPTORS = """
import sys
from sqlstream import StreamingDataset
from sqlstream.errors import SqlStreamError
from tests.stream.sources import check_bytes

def main():
    src, dst, report = sys.argv[1:]
    try:
        with StreamingDataset(
            src, dst=dst, columns_to_download=["image"], transforms=[check_bytes], on_error="raise", cache_limit="10mb"
        ) as dataset:
            answer = f"{sum(sample['is_right'] for sample in dataset)} right"
    except SqlStreamError as error:
        answer = f"{type(error).__name__}: {error}"
    with open(report, "w") as file:
        file.write(answer)
"""


@pytest.mark.parametrize("num", [64, pytest.param(40, marks=pytest.mark.slow)])
def test_with_few_descriptors_it_works_or_names_the_limit(photos: Photos, tmp_path: Path, num: int) -> None:
    answer = answer_of(FEW_DESCRIPTORS, f'ulimit -n {num}; "$@"', photos, tmp_path)
    assert answer == f"{photos.num} right" or "ulimit -n" in answer


LOCAL_SHARDS = """
import os, resource, sys
from pathlib import Path
from sqlstream import StreamingDataLoader, StreamingDataset
from tests.stream.shards import tar_of

def main():
    _, dst, report = sys.argv[1:]
    folder = Path(dst).parent / "shards"
    folder.mkdir()
    for shard in range(40):
        (folder / f"s-{shard:03}.tar").write_bytes(tar_of([(f"{number}", {"cls": b"%d" % number}) for number in range(5)]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    with StreamingDataset(f"{folder}/*.tar", dst=dst, on_error="raise", shuffle_seed=1, cache_limit="10mb") as dataset:
        rows = [row for batch in StreamingDataLoader(dataset, batch_size=4, num_workers=2) for row in batch["__row__"].tolist()]
    with open(report, "w") as file:
        file.write(f"{len(rows)} {sorted(rows) == list(range(200))}")
"""


def test_local_shards_leave_descriptors_to_the_rest_of_a_worker(photos: Photos, tmp_path: Path) -> None:
    assert answer_of(LOCAL_SHARDS, '"$@"', photos, tmp_path) == "200 True"


NO_THREADS = """
import sys, threading
from sqlstream import StreamingDataset
from sqlstream.errors import StorageError
from tests.stream.sources import check_bytes

def main():
    src, dst, report = sys.argv[1:]
    start, count, errors = threading.Thread.start, 0, []

    def start_but_one(thread):
        nonlocal count
        count += 1
        if count == refused:
            raise RuntimeError("can't start new thread")
        start(thread)

    threading.Thread.start = start_but_one
    for refused in range(1, 100):
        count, dataset = 0, None
        try:
            dataset = StreamingDataset(src, dst=dst, columns_to_download=["image"], transforms=[check_bytes], on_error="raise")
            assert dataset[3]["is_right"] and next(iter(dataset))["is_right"]
        except StorageError as error:
            errors.append("ulimit -u" in str(error))
        finally:
            if dataset is not None:
                dataset.close()
        if count < refused:
            break
    with open(report, "w") as file:
        file.write(f"{bool(errors) and all(errors)} {[thread.name for thread in threading.enumerate()]}")
"""


def test_where_no_thread_starts_reading_is_one_clear_error_and_close_works(photos: Photos, tmp_path: Path) -> None:
    assert answer_of(NO_THREADS, '"$@"', photos, tmp_path) == "True ['MainThread']"
