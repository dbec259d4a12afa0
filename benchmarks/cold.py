"""What one downloaded object costs in CPU, by process: trainer, workers, their helper processes, and the server.

    python -m benchmarks.cold                                    # this checkout, http and s3
    python -m benchmarks.cold --against PATH --schemes http      # and another checkout, in turns; ratios

As a user has it: a table of URLs, one transform that reads the file, two workers, an empty cache, nginx on the same machine
that answers late. CPU is that of each kind of process over the whole epoch, from /proc: its clock ticks a hundred times a
second, so take a thousand objects or more. The start of processes counts: compare two numbers of objects to tell it from the
rest. The first round of a checkout compiles it. Shown are medians of the rounds; switches are voluntary ones of a helper's
threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from benchmarks.peers.disks import scattered
from benchmarks.peers.processes import TICK_SECONDS, children_of, command_of

Figures: TypeAlias = dict[str, float]
BUCKET = "bench"


class Read:
    """The transform of a user: it opens and reads the file."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        """Return the sample with the bytes of its object."""
        with open(sample["object"], "rb") as file:
            sample["object"] = file.read()
        return sample


def listed(samples: Sequence[dict[str, Any]]) -> list[bytes]:
    """Collate bytes: a list of them."""
    return [sample["object"] for sample in samples]


class Usage(NamedTuple):
    """What a process has used."""

    seconds: float
    """Of CPU, in user and system mode, of its dead threads too."""
    num_switches: int
    """Of its living threads, of their own will."""


def used(pid: int) -> Usage:
    """Return what one process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    switches = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        for line in status.read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches"):
                switches += int(line.split()[1])
    return Usage((int(fields[11]) + int(fields[12])) * TICK_SECONDS, switches)


def kind_of(pid: int) -> str:
    """Return what a process below the trainer is."""
    return "helpers" if "sqlstream.storage.worker" in command_of(pid) else "workers"


def measure(arguments: argparse.Namespace, directory: Path) -> Figures:
    """Run one cold epoch in the package that is imported here; return CPU µs for each object, by kind of process."""
    from sqlstream import StreamingDataLoader, StreamingDataset

    endpoint, server_pid, num_workers = arguments.endpoint, arguments.server_pid, arguments.num_workers
    is_s3 = arguments.scheme == "s3"
    root = f"s3://{BUCKET}" if is_s3 else f"{endpoint}/{BUCKET}"
    table = directory / "rows.csv"
    table.write_text("index,object\n" + "".join(f"{i},{root}/{i:06}.bin\n" for i in range(arguments.num_objects)))
    dataset = StreamingDataset(
        table,
        directory / "cache",
        columns_to_download=["object"],
        transforms=[Read()],
        storage_options={"anon": True, "endpoint_url": endpoint, "region": "us-east-1"} if is_s3 else {},
        shuffle_seed=5,
        show_progress=False,
    )
    loader = StreamingDataLoader(
        dataset, batch_size=64, num_workers=num_workers, persistent_workers=num_workers > 0, collate_fn=listed
    )
    own_before, server_before, started = time.process_time(), used(server_pid).seconds, time.perf_counter()
    num_samples = sum(len(batch) for batch in loader)
    seconds = time.perf_counter() - started
    spent = {"trainer": time.process_time() - own_before, "workers": 0.0, "helpers": 0.0}
    num_switches = 0
    for pid in children_of(os.getpid()):
        usage, kind = used(pid), kind_of(pid)
        spent[kind] += usage.seconds
        num_switches += usage.num_switches if kind == "helpers" else 0
    if num_samples != arguments.num_objects:
        raise RuntimeError(f"{num_samples} samples came, of {arguments.num_objects}")
    figures = {f"CPU us: {kind}": 1e6 * seconds / num_samples for kind, seconds in spent.items()}
    return figures | {
        "CPU us: all of ours": sum(figures.values()),
        "CPU us: server": 1e6 * (used(server_pid).seconds - server_before) / num_samples,
        "switches of helpers": num_switches / num_samples,
        "objects a second": num_samples / seconds,
    }


def run_child(checkout: Path, arguments: argparse.Namespace, scheme: str, endpoint: str, server_pid: int) -> Figures:
    """Measure a checkout in a process of its own."""
    directory = Path(tempfile.mkdtemp(dir=scattered(Path(arguments.directory))))
    command = [sys.executable, __file__, "--child", str(directory), "--scheme", scheme, "--endpoint", endpoint]
    command += ["--server-pid", str(server_pid), "--num-objects", str(arguments.num_objects)]
    command += ["--num-workers", str(arguments.num_workers)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = f"{checkout}{os.pathsep}{Path(__file__).resolve().parent.parent}"
    environment["PYTHONPYCACHEPREFIX"] = f"{arguments.directory}/bytecode"  # users have it, and a checkout may not
    try:
        answer = subprocess.run(command, env=environment, cwd=directory, check=True, stdout=subprocess.PIPE).stdout
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return json.loads(answer)  # type: ignore[no-any-return]


def main() -> None:
    """Measure one checkout, or two in turns, and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num-objects", type=int, default=1500)
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--size-bytes", type=int, default=44_000)
    parser.add_argument("--latency", type=float, default=0.02, help="seconds")
    parser.add_argument("--schemes", nargs="+", default=["http", "s3"], choices=["http", "s3"])
    parser.add_argument("--directory", default=f"{tempfile.gettempdir()}/sqlstream-cold", help="where caches are written")
    for hidden in ("--child", "--scheme", "--endpoint", "--server-pid"):
        parser.add_argument(hidden, type=int if hidden == "--server-pid" else str, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(measure(arguments, Path(arguments.child))), flush=True)
        return
    from sqlstream.testing.nginx import Nginx

    checkouts = [Path(__file__).resolve().parent.parent, *([arguments.against.resolve()] if arguments.against else [])]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / BUCKET).mkdir()
        for i in range(arguments.num_objects):
            (Path(folder) / BUCKET / f"{i:06}.bin").write_bytes(random.randbytes(arguments.size_bytes))
        with Nginx(Path(folder), latency_seconds=arguments.latency) as nginx:
            while not (workers := [pid for pid in children_of(os.getpid()) if "nginx: worker" in command_of(pid)]):
                time.sleep(0.01)
            (server_pid,) = workers
            for scheme in arguments.schemes:
                rounds = []
                for number in range(arguments.rounds):
                    turn: dict[Path, Figures] = {}
                    for checkout in checkouts[:: -1 if number % 2 else 1]:  # to be first is no advantage
                        turn[checkout] = run_child(checkout, arguments, scheme, nginx.url, server_pid)
                    rounds.append([turn[checkout] for checkout in checkouts])
                report(scheme, rounds)


def report(scheme: str, rounds: list[list[Figures]]) -> None:
    """Print the medians of the rounds, and the median of their ratios."""
    print(f"{scheme}, {len(rounds)} rounds")
    for name in rounds[0][0]:
        each = [statistics.median(turn[number][name] for turn in rounds) for number in range(len(rounds[0]))]
        ratios = [turn[0][name] / turn[1][name] for turn in rounds if len(turn) > 1 and turn[1][name]]
        ratio = f"   ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        print(f"  {name:24}" + "".join(f"{figure:10.1f}" for figure in each) + ratio)


if __name__ == "__main__":
    main()
