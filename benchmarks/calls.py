"""What one warm sample costs in calls of our own code, in files that these calls visit, and in CPU.

    python -m benchmarks.calls                    # this checkout
    python -m benchmarks.calls --against PATH     # and another checkout, in turns; ratios of CPU

Measured as a user has it: a table of HTTP URLs, one transform that reads the file, no workers. A call counts for its sample in
whichever thread it is made: what the cache's background thread does until it rests is divided among the samples. CPU is that
of the process, the least of several rounds; calls and files do not depend on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeAlias

NUM_SAMPLES, OBJECT_BYTES, ALLOCATION_BYTES = 2000, 1000, 4096
NUM_COUNTED, NUM_TIMED = 256, 5000
QUIET_SECONDS = 1.0
"""The background thread writes what waits after a quarter of a second, and ends a third of a second later."""
LIMIT_BYTES = NUM_SAMPLES * ALLOCATION_BYTES * 105 // 100
Figures: TypeAlias = dict[str, float]


class Calls:
    """Counts calls of the package's functions, in all threads that start after this was made.

    Args:
        package: The package's folder.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._ours: dict[object, str | None] = {}
        self._is_counting = False
        self.num_calls = {True: 0, False: 0}
        """In the main thread, and in others."""
        self.files: dict[bool, set[str]] = {True: set(), False: set()}
        threading.setprofile(self._note)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count in the body."""
        self._is_counting = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._is_counting = False

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or not self._is_counting:
            return
        code = frame.f_code
        if code not in self._ours:
            name = code.co_filename
            self._ours[code] = name.removeprefix(self._package) if name.startswith(self._package) else None
        if (name := self._ours[code]) is not None:
            is_main = threading.current_thread() is threading.main_thread()
            self.num_calls[is_main] += 1
            self.files[is_main].add(name)


class _Handler(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_arguments: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def served(directory: Path) -> Iterator[str]:
    """Serve a folder of objects; give its URL."""
    for number in range(NUM_SAMPLES):
        (directory / f"{number}.bin").write_bytes(bytes(OBJECT_BYTES))
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *arguments: _Handler(*arguments, directory=str(directory))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def measure(url: str, directory: Path) -> Figures:
    """Return what samples cost in the package that is imported here."""
    import sqlstream
    from sqlstream import StreamingDataset
    from sqlstream.transforms.presets import LoadFromDiskTransform

    assert sqlstream.__file__ is not None
    calls = Calls(str(Path(sqlstream.__file__).parent) + os.sep)
    table = directory / "rows.csv"
    table.write_text("index,object\n" + "".join(f"{i},{url}/{i}.bin\n" for i in range(NUM_SAMPLES)))
    figures: Figures = {}
    with contextlib.ExitStack() as stack:
        datasets = [
            stack.enter_context(
                StreamingDataset(
                    table,
                    directory / name,
                    columns_to_download=["object"],
                    transforms=[LoadFromDiskTransform(["object"])],
                    shuffle_seed=5,
                    batch_size=8,
                    cache_limit=limit,
                    show_progress=False,
                )
            )
            for name, limit in (("unlimited", None), ("limited", LIMIT_BYTES))
        ]
        for dataset in datasets:
            assert sum(1 for _ in dataset) == NUM_SAMPLES
        figures |= _accesses(datasets[0], calls) | _steady(datasets[0], calls)
        figures |= _cpu(datasets[0], datasets[1])
    return figures


def _accesses(dataset: Any, calls: Calls) -> Figures:
    for number in range(64):  # what is made once is made, and looked at once more
        dataset[number]
    time.sleep(QUIET_SECONDS)
    num_files = []
    calls.num_calls = {True: 0, False: 0}
    with calls.counted():
        for number in range(NUM_COUNTED):
            calls.files[True].clear()
            dataset[5 + number % 7]
            num_files.append(len(calls.files[True]))
        time.sleep(QUIET_SECONDS)
    return {
        "access: calls": sum(calls.num_calls.values()) / NUM_COUNTED,
        "access: calls in the main thread": calls.num_calls[True] / NUM_COUNTED,
        "access: files": statistics.median(num_files),
    }


def _steady(dataset: Any, calls: Calls) -> Figures:
    samples = iter(dataset)
    for _ in range(NUM_COUNTED):
        next(samples)
    num_calls, num_files = [], []
    for _ in range(NUM_COUNTED):
        calls.num_calls = {True: 0, False: 0}
        calls.files[True].clear()
        with calls.counted():
            next(samples)
        num_calls.append(calls.num_calls[True])
        num_files.append(len(calls.files[True]))
    samples.close()
    return {
        "steady: calls": statistics.median(num_calls),
        "steady: files": statistics.median(num_files),
        "steady: calls, mean with planning": statistics.fmean(num_calls),
    }


def _cpu(unlimited: Any, limited: Any) -> Figures:
    access, epochs = [], {"unlimited": [], "limited": []}  # type: ignore[var-annotated]  # lists of seconds
    for _ in range(5):
        started = time.process_time()
        for number in range(NUM_TIMED):
            unlimited[number % NUM_SAMPLES]
        access.append((time.process_time() - started) / NUM_TIMED)
        for name, dataset in (("unlimited", unlimited), ("limited", limited)):
            started = time.process_time()
            assert sum(1 for _ in dataset) == NUM_SAMPLES
            epochs[name].append((time.process_time() - started) / NUM_SAMPLES)
    return {
        "access: CPU us": min(access) * 1e6,
        "epoch without a limit: CPU us": min(epochs["unlimited"]) * 1e6,
        "epoch under a limit of 1.05: CPU us": min(epochs["limited"]) * 1e6,
        "epoch: limit / without": min(epochs["limited"]) / min(epochs["unlimited"]),
    }


def _child(checkout: Path, url: str) -> Figures:
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, __file__, "--child", url, directory]
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        return json.loads(subprocess.run(command, env=environment, cwd=directory, check=True, stdout=subprocess.PIPE).stdout)  # type: ignore[no-any-return]


def main() -> None:
    """Measure one checkout, or two in turns, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--rounds", type=int, default=3, help="turns; CPU is the least of them (default: 3)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments.child[0], Path(arguments.child[1]))))
        return
    checkouts = [Path(__file__).resolve().parent.parent, *([arguments.against.resolve()] if arguments.against else [])]
    with tempfile.TemporaryDirectory() as directory, served(Path(directory)) as url:
        rounds = [[_child(checkout, url) for checkout in checkouts] for _ in range(arguments.rounds)]
    for name in rounds[0][0]:
        least = [min(turn[number][name] for turn in rounds) for number in range(len(checkouts))]
        ratio = f"  ratio {least[0] / least[1]:.2f}" if len(least) > 1 and least[1] else ""
        print(f"{name:40}" + "".join(f"{figure:10.2f}" for figure in least) + ratio)


if __name__ == "__main__":
    main()
