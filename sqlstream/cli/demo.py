"""`sqlstream demo`: the product at work on this machine, without network and accounts.

Makes pictures, puts them into a local S3 server with their index, streams them through a DataLoader under a cache limit far
below their size, and looks from outside whether the promises hold: every byte right, every row seen, the limit never passed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlstream.cli.cache import print_statistics
from sqlstream.cli.options import Subcommands, add_command, place
from sqlstream.cli.output import Size, percent, print_facts, print_json
from sqlstream.config import check_at_least
from sqlstream.environment import bypass_proxies
from sqlstream.errors import MissingDependencyError
from sqlstream.progress import Progress, progress

if TYPE_CHECKING:
    from sqlstream.cache import CacheStatistics
    from sqlstream.testing.servers import LocalS3

BUCKET = "sqlstream-demo"
BATCH_SIZE = 16
"""Arbitrary; small, so that two workers have many batches to share."""
LIMIT_SHARE = 0.2
"""The cache limit as a share of the data: most of an epoch has to be evicted before the next one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DemoPlan:
    """The tasks of the demo."""

    samples: int
    epochs: int
    workers: int
    cache_directory: Path
    limit_bytes: int
    data_bytes: int
    index_url: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The results of the demo."""

    num_samples: int
    """Samples delivered, over all epochs."""
    num_wrong: int
    """Samples delivered with other bytes than the index says."""
    num_missing: int
    """Rows that an epoch did not deliver, over all epochs."""
    delivered_bytes: int
    seconds: float
    highest_disk_bytes: int
    statistics: CacheStatistics

    def is_good(self, plan: DemoPlan) -> bool:
        """Return whether every promise held."""
        return not self.num_wrong and not self.num_missing and self.highest_disk_bytes <= plan.limit_bytes


def register(subcommands: Subcommands) -> None:
    """Declare the command and its options."""
    summary = "stream a made-up dataset from a local S3 server under a tight cache limit, and say what happened"
    parser = add_command(subcommands, "demo", run_demo, summary)
    parser.add_argument("--samples", type=int, default=400, metavar="N", help="pictures to make (default: %(default)s)")
    parser.add_argument("--epochs", type=int, default=2, metavar="N", help="times to stream them (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="DataLoader workers (default: %(default)s)")
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=place,
        help="cache directory to use and keep (default: one that is removed at the end)",
    )


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; return 1 if a promise did not hold."""
    for name, least in (("samples", 20), ("epochs", 1), ("workers", 0)):
        check_at_least(f"--{name}", getattr(options, name), least)
    _check_dependencies()
    from sqlstream.testing.servers import LocalS3

    bypass_proxies("127.0.0.1")  # where the server is
    with _cache_directory(options.dir) as directory, LocalS3() as server:
        say: Callable[[str], None] = (lambda _: None) if options.json else print
        plan = _prepare(options, directory, server, say)
        outcome = stream(plan, server.storage_options, show_progress=not options.json)
    if options.json:
        print_json({**_as_document(plan, outcome), "limit_held": outcome.highest_disk_bytes <= plan.limit_bytes})
    else:
        _print_outcome(plan, outcome)
    return 0 if outcome.is_good(plan) else 1


def _check_dependencies() -> None:
    for name in ("PIL", "moto", "boto3"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            message = f"the demo needs {name}, which is not installed: pip install 'sqlstream-data[demo]'"
            raise MissingDependencyError(message) from error


@contextlib.contextmanager
def _cache_directory(kept: str | None) -> Iterator[Path]:
    if kept is not None:
        yield Path(kept)
        return
    with tempfile.TemporaryDirectory(prefix="sqlstream-demo-") as directory:
        yield Path(directory) / "cache"


def _prepare(options: argparse.Namespace, directory: Path, server: LocalS3, say: Callable[[str], None]) -> DemoPlan:
    """Make the pictures, put them and their index into the server, and decide the limit."""
    from sqlstream.cli.demo_data import index_of, make_pictures

    pictures = list(make_pictures(options.samples))
    for picture in pictures:
        server.put(f"{BUCKET}/pictures/{picture.key}.jpg", picture.jpeg)
    index_url = server.put(f"{BUCKET}/index.parquet", index_of(pictures, f"s3://{BUCKET}/pictures"))
    data_bytes = sum(len(picture.jpeg) for picture in pictures)
    limit_bytes = int(data_bytes * LIMIT_SHARE)
    say(f"{len(pictures):,} pictures, {Size(data_bytes)}, in s3://{BUCKET} on {server.endpoint_url}")
    say(f"cache in {directory}, limit {Size(limit_bytes)} ({percent(limit_bytes, data_bytes)} of the data)")
    return DemoPlan(
        samples=options.samples,
        epochs=options.epochs,
        workers=options.workers,
        cache_directory=directory,
        limit_bytes=limit_bytes,
        data_bytes=data_bytes,
        index_url=index_url,
    )


def stream(plan: DemoPlan, storage_options: Mapping[str, object], *, show_progress: bool) -> Outcome:
    """Stream all epochs through a DataLoader, check each sample and watch the disk meanwhile."""
    from torch.utils.data import DataLoader

    from sqlstream import StreamingDataset
    from sqlstream.cache import Cache
    from sqlstream.testing.disk import DiskWatch

    dataset = StreamingDataset(
        plan.index_url,
        str(plan.cache_directory),
        columns_to_download=["image"],
        shuffle_seed=7,
        transforms=[check_picture],
        cache_limit=plan.limit_bytes,
        batch_size=BATCH_SIZE,
        storage_options=dict(storage_options),
        on_error="raise",
    )
    tally = DemoCounts()
    started = time.perf_counter()
    with dataset, DiskWatch(plan.cache_directory) as disk, _workers_end_on_error():  # closed before the directory is removed
        loader = DataLoader(dataset, batch_size=BATCH_SIZE, num_workers=plan.workers)
        for epoch in range(1, plan.epochs + 1):
            with progress(plan.samples, " samples", f"epoch {epoch} of {plan.epochs}", show_progress) as bar:
                tally.add_epoch(loader, plan.samples, bar)
    seconds = time.perf_counter() - started
    with Cache(plan.cache_directory, create=False) as cache:
        statistics = cache.statistics()
    return Outcome(**dataclasses.asdict(tally), seconds=seconds, highest_disk_bytes=disk.highest_bytes, statistics=statistics)


@contextlib.contextmanager
def _workers_end_on_error() -> Iterator[None]:
    """End the DataLoader's workers when the body fails or is interrupted: else they write on while the directory is removed.

    They live as long as the loader's iterator, which the frames of the traceback hold.
    """
    try:
        yield
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise


def check_picture(sample: dict[str, Any]) -> dict[str, Any]:
    """Compare a picture's bytes with the hash in the index, decode it, and keep what the trainer counts."""
    from PIL import Image

    path = Path(sample["image"])
    jpeg = path.read_bytes()
    with Image.open(path) as picture:
        picture.load()
        has_size = picture.size == (sample["width"], sample["height"])
    is_right = has_size and hashlib.sha256(jpeg).hexdigest() == sample["sha256"]
    return {"row": sample["__row__"], "num_bytes": len(jpeg), "is_right": is_right, "caption": sample["caption"]}


@dataclasses.dataclass(slots=True)
class DemoCounts:
    """Counts what the loader delivers."""

    num_samples: int = 0
    num_wrong: int = 0
    num_missing: int = 0
    delivered_bytes: int = 0

    def add_epoch(self, batches: Iterable[Mapping[str, Any]], num_rows: int, bar: Progress) -> None:
        """Count one epoch's batches; `num_rows` rows must all be in it."""
        missing = set(range(num_rows))
        for batch in batches:
            rows = batch["row"].tolist()
            missing.difference_update(rows)
            self.num_samples += len(rows)
            self.num_wrong += len(rows) - int(batch["is_right"].sum())
            self.delivered_bytes += int(batch["num_bytes"].sum())
            bar.update(len(rows))
        self.num_missing += len(missing)


def _as_document(plan: DemoPlan, outcome: Outcome) -> dict[str, object]:
    rates = {
        "samples_per_second": outcome.num_samples / outcome.seconds,
        "bytes_per_second": outcome.delivered_bytes / outcome.seconds,
    }
    return {**dataclasses.asdict(plan), **dataclasses.asdict(outcome), **rates}


def _print_outcome(plan: DemoPlan, outcome: Outcome) -> None:
    rate, size_rate = outcome.num_samples / outcome.seconds, Size(int(outcome.delivered_bytes / outcome.seconds))
    statistics = outcome.statistics
    limit_held = "limit held" if outcome.highest_disk_bytes <= plan.limit_bytes else "LIMIT PASSED"
    print()
    print_facts(
        [
            ("delivered", f"{outcome.num_samples:,} samples in {outcome.seconds:.1f} s: {rate:,.0f} samples/s, {size_rate}/s"),
            ("checked", f"{outcome.num_wrong:,} with wrong bytes, {outcome.num_missing:,} missing"),
            ("hits", f"{statistics.hits:,} of {statistics.hits + statistics.misses:,}"),
            ("evictions", f"{statistics.evictions:,} ({Size(statistics.evicted_bytes)})"),
            ("disk", f"at most {Size(outcome.highest_disk_bytes)} of {Size(plan.limit_bytes)}: {limit_held}"),
        ]
    )
    print("\nthe cache at the end, as `sqlstream cache stats` shows it:")
    print_statistics(statistics)
