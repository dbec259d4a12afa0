"""The dataset in real processes: DataLoader workers of every kind, early ends, Ctrl-C, several jobs on one cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from sqlstream.cache import Cache
from sqlstream.cli.main import main
from sqlstream.process import locks
from sqlstream.storage.client.starter import STARTER
from tests.cache.actors import wait_for_helpers
from tests.cache.session import Session
from tests.processes import COMMANDS, ROOT, SCRIPTS, Program, children, is_alive, wait_until
from tests.stream import programs
from tests.stream.kit import rows_in_order
from tests.stream.programs import open_dataset
from tests.stream.sources import Photos


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stream.programs", program, *map(str, arguments)]
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str], timeout: float = 500) -> str:
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"hangs:\n{out}\n{err}") from None
    assert process.returncode == 0, f"{out}\n{err}"
    return out


def start_forked(program: str, *arguments: object) -> Program:
    """One that no signal is sent to, without the time that PyTorch takes to import."""
    return SCRIPTS.start(programs.main, program, *map(str, arguments), directory=ROOT)


def finish_forked(process: Program) -> str:
    done = process.finish()
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class DiskSampler(threading.Thread):
    """Adds up the files under data/ and part/, over and over.

    A walk is no snapshot: while it goes, files leave that it has seen and others come that it will see. What two walks in a
    row have both seen was there together at the moment between them; that sum is exact or too small, never too large.
    """

    def __init__(self, cache: Path) -> None:
        super().__init__(daemon=True)
        self._cache = cache
        self._stop_event = threading.Event()
        self.highest_bytes = 0
        self.num_walks = 0

    def run(self) -> None:
        before: dict[tuple[int, str], int] = {}
        while not self._stop_event.is_set():
            now = walk(self._cache)
            self.highest_bytes = max(self.highest_bytes, sum(min(now[file], before[file]) for file in now.keys() & before))
            before = now
            self.num_walks += 1

    def stop(self) -> int:
        self._stop_event.set()
        self.join()
        return self.highest_bytes


def walk(cache: Path) -> dict[tuple[int, str], int]:
    """Sizes of all files by inode and key: a part that is renamed stays one file, a reused inode is another one."""
    sizes: dict[tuple[int, str], int] = {}
    for folder in ("part", "data"):
        for directory, _, names in os.walk(cache / folder):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(directory, name))
                    sizes[(status.st_ino, name[:32])] = status.st_size
    return sizes


def disk_bytes(cache: Path) -> int:
    return sum(walk(cache).values())


@pytest.mark.parametrize(
    ("num_workers", "context", "is_persistent"),
    [(0, None, False), (1, "fork", False), (3, "fork", True), (2, "spawn", False), (2, "forkserver", True)],
)
def test_every_kind_of_worker_gives_every_row_once_an_epoch(
    photos: Photos, tmp_path: Path, num_workers: int, context: str | None, is_persistent: bool
) -> None:
    with open_dataset(photos.src, str(tmp_path / "cache"), shuffle_seed=5, batch_size=4, cache_limit=900_000) as dataset:
        assert dataset[0]["is_right"]  # the helper has run in the parent
        loader = DataLoader(
            dataset,
            batch_size=4,
            num_workers=num_workers,
            multiprocessing_context=context,
            persistent_workers=is_persistent,
        )
        orders = []
        for epoch in range(2):
            batches = list(loader)
            assert all(all(batch["is_right"]) for batch in batches)
            assert {number for batch in batches for number in batch["__epoch__"].tolist()} == {epoch}
            orders.append([row for batch in batches for row in batch["__row__"].tolist()])
            # The loader asks its workers in turn, so the order is the plan's, whatever their number.
            assert orders[-1] == rows_in_order(dataset, epoch, 0, photos.num).tolist()
        assert orders[0] != orders[1]
        del loader


def test_the_helper_that_has_read_the_index_brings_the_first_samples(photos: Photos, tmp_path: Path) -> None:
    with open_dataset(photos.src, str(tmp_path / "cache")) as dataset:
        pid = dataset.cache.fetcher.helper_pid
        assert pid is not None
        for _ in dataset:
            assert dataset.cache.fetcher.helper_pid == pid


def has_starter() -> bool:
    return STARTER.pid is not None


@pytest.mark.usefixtures("starts_anew")
def test_helpers_are_prepared_for_as_long_as_objects_are_missing(photos: Photos, tmp_path: Path) -> None:
    with open_dataset(photos.src, str(tmp_path / "cache")) as dataset:
        assert has_starter()
        assert all(sample["is_right"] for sample in DataLoader(dataset, batch_size=None, num_workers=1))
        assert has_starter()
    assert not has_starter()
    with open_dataset(photos.src, str(tmp_path / "cache")):
        assert not has_starter()


@pytest.mark.parametrize("hits", ["none", "locks", "rows"])
def test_an_iterator_that_ends_after_its_cache_asks_nothing_of_it(
    photos: Photos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hits: str
) -> None:
    limit = {"none": None, "locks": 100 * photos.total_bytes, "rows": photos.total_bytes}[hits]
    with open_dataset(photos.src, str(tmp_path / "cache"), cache_limit=limit) as dataset:
        if hits != "none":
            assert len(list(dataset)) == photos.num
        samples = iter(dataset)
        next(samples)
        session = Session(dataset.cache)
        dataset.cache.close()  # as at the end of Python, when modules may be empty by the time a forgotten iterator goes
        asked: list[object] = []

        def guard() -> contextlib.AbstractContextManager[None]:
            asked.append("guard")
            return contextlib.nullcontext()

        monkeypatch.setattr(session.downloads, "cancel", asked.append)
        monkeypatch.setattr(locks, "fork_guard", guard)
        samples.close()  # type: ignore[attr-defined]  # a generator
        monkeypatch.undo()
        assert asked == []


@pytest.mark.usefixtures("starts_anew")
def test_leaving_a_loop_early_leaves_no_thread_and_no_process(photos: Photos, tmp_path: Path) -> None:
    threads_before, children_before = set(threading.enumerate()), children(os.getpid())
    for num_workers in (0, 2):
        with open_dataset(photos.src, str(tmp_path / "cache"), cache_limit=600_000) as dataset:
            loader = DataLoader(dataset, batch_size=4, num_workers=num_workers)
            for _ in loader:
                break
            del loader

            def ours() -> set[str]:
                return {thread.name for thread in set(threading.enumerate()) - threads_before if "faulty" not in thread.name}

            assert wait_until(lambda: not {name for name in ours() if "sqlstream" in name}), ours()
            assert wait_until(lambda: children(os.getpid()) - {STARTER.pid} <= children_before)
            assert Session(dataset.cache).holdings.num_revocable == 0
        assert wait_until(lambda: children(os.getpid()) <= children_before), "it waits for the next epoch, and no longer"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_ctrl_c_ends_at_once_and_leaves_nothing(photos: Photos, tmp_path: Path, num_workers: int) -> None:
    process = start("stream_until_interrupted", photos.src, tmp_path / "cache", num_workers)
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    family = children(process.pid)
    assert family
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the script and its workers at once
    assert finish(process).startswith("ended")  # a hang is what this looks for; the machine may be busy
    assert wait_until(lambda: not any(is_alive(pid) for pid in family))
    with Cache(tmp_path / "cache", create=False) as cache:
        assert cache.statistics().pinned_entries == 0
        assert cache.verify() == []


@pytest.mark.parametrize("num_workers", [0, 2])
def test_sigkill_of_the_script_leaves_no_process_and_no_pin(photos: Photos, tmp_path: Path, num_workers: int) -> None:
    process = start("stream_until_interrupted", photos.src, tmp_path / "cache", num_workers)
    assert process.stdout is not None
    assert process.stdout.readline() == "streaming\n"
    family = children(process.pid)
    process.kill()
    process.communicate()
    assert wait_until(lambda: not any(is_alive(pid) for pid in family)), [
        Path(f"/proc/{pid}/cmdline").read_text() for pid in family if is_alive(pid)
    ]
    wait_for_helpers(tmp_path / "cache")  # one that was started since
    with Cache(tmp_path / "cache", create=False) as cache:
        statistics = cache.statistics()
        assert statistics.pinned_entries == 0
        assert statistics.filling_bytes == 0
        assert statistics.used_bytes >= disk_bytes(tmp_path / "cache")
        assert cache.verify() == []


@pytest.mark.parametrize("num_runs", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.timeout(900)
def test_random_access_and_then_forked_workers_never_hang(photos: Photos, tmp_path: Path, num_runs: int) -> None:
    for number in range(num_runs):
        assert finish_forked(start_forked("access_then_fork", photos.src, tmp_path / f"cache-{number % 2}")) == "done\n"


def test_a_forked_process_opens_a_dataset_after_its_parent_did(photos: Photos, tmp_path: Path) -> None:
    """Torch's threads, which a parent has started, are missing in its child: code that needs them waits for ever."""
    assert finish_forked(start_forked("open_then_fork", photos.src, tmp_path / "cache")) == "done\n"


def test_three_jobs_on_one_cache_keep_the_limit_and_every_byte(photos: Photos, tmp_path: Path) -> None:
    """Acceptance 2: two DataLoaders of two workers each and one process of random access, a limit of 5 % of the data."""
    cache, limit = tmp_path / "cache", photos.total_bytes // 20
    Cache(cache).close()
    sampler = DiskSampler(cache)
    sampler.start()
    jobs = [
        start_forked("train", photos.src, cache, limit, 1, 2),
        start_forked("train", photos.src, cache, limit, 2, 2),
        start_forked("access_at_random", photos.src, cache, limit, 150),
    ]
    assert [finish_forked(job) for job in jobs] == ["done\n"] * 3
    assert sampler.stop() <= limit, "the limit was passed"
    assert sampler.num_walks > 5
    verify = COMMANDS.run(main, "cache", "verify", str(cache))
    assert verify.returncode == 0, verify.stdout + verify.stderr
    stats = COMMANDS.run(main, "cache", "stats", str(cache), "--json")
    account = json.loads(stats.stdout)
    files = [path for path in (cache / "data").rglob("*") if path.is_file()]
    assert account["entries"] == len(files)
    assert account["used_bytes"] == sum(-(-path.stat().st_size // 4096) * 4096 for path in files)
    assert account["filling_bytes"] == account["pinned_entries"] == account["failures"] == 0
    assert account["limit_bytes"] == limit
    assert not list((cache / "part").iterdir())


def test_two_jobs_that_start_on_an_empty_cache_fetch_each_object_once(photos: Photos, tmp_path: Path) -> None:
    """Acceptance 3."""
    jobs = [start_forked("train", photos.src, tmp_path / "cache", "none", 9, 1) for _ in range(2)]
    assert [finish_forked(job) for job in jobs] == ["done\n"] * 2
    assert photos.num_gets() == {photos.path(number): 1 for number in range(photos.num)}


def test_workers_leave_each_other_their_share_so_little_is_fetched_twice(photos: Photos, tmp_path: Path) -> None:
    """The first worker must not fill the cache with its window, only to give it up when the second one comes."""
    with open_dataset(photos.src, str(tmp_path / "cache"), batch_size=4, cache_limit=photos.total_bytes * 3 // 10) as dataset:
        batches = list(DataLoader(dataset, batch_size=4, num_workers=2))
    assert sum(len(batch["__row__"]) for batch in batches) == photos.num
    # Sizes are not in the index: a first guess that was too small, with no room to extend it, is asked for once more.
    assert sum(photos.num_gets().values()) < 1.15 * photos.num
