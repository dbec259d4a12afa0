"""How a contender is counted: one function for each kind of measurement, the same for all contenders.

Each takes the contender's function, bound to its job, and returns figures by name. Contenders measure nothing themselves.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.peers import resumed
from benchmarks.peers.job import Job, Lookup, Stream, names
from benchmarks.peers.processes import cpu_seconds, memory_bytes

Figures = dict[str, float]
CUT_SECONDS = 60
"""After which an epoch of those is cut off who would take an hour for it; their result has `is_cut`."""
FULL = 0.95
"""Of the photos: WebDataset drops nothing, sharded samplers may leave out a batch for each worker."""


def weigh(stream: Stream, batch: Any) -> tuple[int, int]:
    """Return samples and bytes of a batch; every payload is touched as a trainer would get at it."""
    num_samples = num_bytes = 0
    for value in stream.payload(batch):
        num_bytes += value.nbytes if hasattr(value, "nbytes") else len(value)
        num_samples += 1
    return num_samples, num_bytes


def run_epoch(stream: Stream) -> tuple[int, int]:
    """Take all batches of an epoch; return samples and bytes."""
    num_samples = num_bytes = 0
    for batch in stream.batches:
        num, size = weigh(stream, batch)
        num_samples += num
        num_bytes += size
    return num_samples, num_bytes


def epochs(job: Job, stream: Stream) -> Iterator[int]:
    """Yield the samples of each batch, epoch after epoch; none of them may be short."""
    while True:
        num_samples = 0
        for batch in stream.batches:
            num, _ = weigh(stream, batch)
            num_samples += num
            yield num
        if num_samples < FULL * job.num_samples:
            raise RuntimeError(f"{job.contender}: an epoch gave {num_samples} samples of {job.num_samples}")


def throughput(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Samples per second over epochs, after a first part that is not counted."""
    batches = epochs(job, begin(job))
    num_warmup = job.num_warmup_batches or -(-job.num_samples // job.batch_size)
    for _ in range(num_warmup):
        next(batches)
    num_samples = 0
    started, cpu, own = time.perf_counter(), cpu_seconds(), time.process_time()
    while not num_samples or time.perf_counter() - started < job.seconds:
        num_samples += next(batches)
    seconds, cpu, own = time.perf_counter() - started, cpu_seconds() - cpu, time.process_time() - own
    return {
        "samples_per_second": num_samples / seconds,
        "cpu_us_per_sample": 1e6 * cpu / num_samples,
        "trainer_cpu_us_per_sample": 1e6 * own / num_samples,
        "worker_cpu_us_per_sample": 1e6 * (cpu - own) / num_samples,
        "samples": num_samples,
    }


def lookups(job: Job, begin: Callable[[Job], Lookup]) -> Figures:
    """Microseconds of single accesses in random order, after one of each sample in order, which is not counted.

    What was imported is frozen first, for all alike: a collection of all that would fall on whoever has the most modules. The
    garbage of the accesses themselves is collected as ever, and counts.
    """
    lookup = begin(job)
    generator = random.Random(job.seed)
    num = max(200, min(job.num_samples, 5000))
    taken: list[float] = []
    for index in range(job.num_samples):
        lookup.get(index)
    gc.collect()
    gc.freeze()
    for index in [generator.randrange(job.num_samples) for _ in range(num)]:
        started = time.perf_counter()
        data = lookup.get(index)
        taken.append(time.perf_counter() - started)
        if not len(data):
            raise RuntimeError(f"{job.contender}: sample {index} is empty")
    taken.sort()
    return {"p50_us": 1e6 * taken[len(taken) // 2], "p99_us": 1e6 * taken[int(len(taken) * 0.99)]}


def one_pass(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Samples per second of a first epoch, from its first batch on: how workers start is not what is compared."""
    started, cpu = time.perf_counter(), cpu_seconds()
    stream = begin(job)
    batches = iter(stream.batches)
    num_first, num_bytes = weigh(stream, next(batches))
    first = time.perf_counter()
    num_samples = num_first
    for batch in batches:
        num, size = weigh(stream, batch)
        num_samples += num
        num_bytes += size
    over, cpu = time.perf_counter(), cpu_seconds() - cpu
    if num_samples < FULL * job.num_samples:
        raise RuntimeError(f"{job.contender}: the epoch gave {num_samples} samples of {job.num_samples}")
    return {
        "samples_per_second": (num_samples - num_first) / (over - first),
        "seconds": over - started,
        "cpu_us_per_sample": 1e6 * cpu / num_samples,
        "payload_bytes": num_bytes,
    }


def first_epoch(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Samples per second of a first epoch, from `iter` to its end: the start of workers counts."""
    return whole_epochs(job, begin(job), seconds=0)


def opened_epoch(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """The same, from opening the dataset on: who reads shards as it opens has them in its epoch for nothing."""
    started = time.perf_counter()
    stream = begin(job)
    opening_seconds = time.perf_counter() - started
    figures = whole_epochs(job, stream, seconds=0)
    seconds = time.perf_counter() - started
    return figures | {
        "samples_per_second": job.num_samples / seconds,
        "seconds": seconds,
        "opening_seconds": opening_seconds,
        "epoch_seconds": figures["seconds"],
    }


def bounded_epoch(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Samples per second from opening the dataset to the end of its epoch, cut off after `CUT_SECONDS`; and requests."""
    started = time.perf_counter()
    stream = begin(job)
    opening_seconds, opening_requests = time.perf_counter() - started, len(_sent(job))
    num_samples = 0
    is_cut = False
    for batch in stream.batches:
        num_samples += weigh(stream, batch)[0]
        is_cut = time.perf_counter() - started > CUT_SECONDS and num_samples < FULL * job.num_samples
        if is_cut:
            break
    seconds = time.perf_counter() - started
    if not is_cut and num_samples < FULL * job.num_samples:
        raise RuntimeError(f"{job.contender}: the epoch gave {num_samples} samples of {job.num_samples}")
    return {
        "samples_per_second": num_samples / seconds,
        "seconds": seconds,
        "samples": num_samples,
        "is_cut": is_cut,
        "opening_seconds": opening_seconds,
        "opening_requests": opening_requests,
        "requests_per_sample": (len(_sent(job)) - opening_requests) / num_samples,
    }


def second_epoch(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """The same, of epochs after a first one that fetched all data, each from `iter` to its end."""
    stream = begin(job)
    run_epoch(stream)
    return whole_epochs(job, stream, job.seconds)


def whole_epochs(job: Job, stream: Stream, seconds: float) -> Figures:
    """Count epochs, at least one, until so many seconds have gone."""
    num_samples = num_epochs = 0
    started, cpu, own = time.perf_counter(), cpu_seconds(), time.process_time()
    while not num_epochs or time.perf_counter() - started < seconds:
        num, _ = run_epoch(stream)
        if num < FULL * (stream.num_samples or job.num_samples):
            raise RuntimeError(f"{job.contender}: an epoch gave {num} samples of {stream.num_samples or job.num_samples}")
        num_samples += num
        num_epochs += 1
    taken, cpu, own = time.perf_counter() - started, cpu_seconds() - cpu, time.process_time() - own
    return {
        "samples_per_second": num_samples / taken,
        "seconds": taken / num_epochs,
        "cpu_us_per_sample": 1e6 * cpu / num_samples,
        "trainer_cpu_us_per_sample": 1e6 * own / num_samples,
    }


def two_passes(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Seconds of two epochs under a limit; the driver adds what the server sent and what the disk held."""
    stream = begin(job)
    started = time.perf_counter()
    rows: list[int] = []
    num_samples = 0
    for _ in range(2):
        for batch in stream.batches:
            num_samples += len(stream.payload(batch))
            rows += stream.rows(batch) if stream.rows is not None else []
    figures: Figures = {"seconds": time.perf_counter() - started, "samples": num_samples}
    if stream.rows is not None and job.limit_bytes is not None:
        figures["lru_bytes"] = lru_bytes(job, rows, job.limit_bytes)
    return figures


def later_passes(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Bytes that the server sent in the second and third epoch, under a limit; of the data, for each of them."""
    stream = begin(job)
    started = time.perf_counter()
    num_samples, num_bytes = run_epoch(stream)
    before = sent_bytes(job)
    for _ in range(NUM_LATER_PASSES):
        run_epoch(stream)
    sent = (sent_bytes(job) - before) / NUM_LATER_PASSES
    return {
        "later_share": sent / num_bytes,
        "first_share": before / num_bytes,
        "samples": num_samples,
        "seconds": time.perf_counter() - started,
    }


def sent_bytes(job: Job) -> int:
    """Return what the server has sent so far."""
    return sum(int(line.split()[0]) for line in _sent(job))


def _sent(job: Job) -> list[str]:
    return (job.work_path / "sent.log").read_text().splitlines()


def lru_bytes(job: Job, rows: list[int], limit_bytes: int) -> int:
    """Return what an LRU cache of whole blocks would download for these rows in this order."""
    sizes = [(job.photos / name).stat().st_size for name in names(job.num_samples)]
    held: OrderedDict[int, int] = OrderedDict()
    held_bytes = downloaded = 0
    for row in rows:
        if row in held:
            held.move_to_end(row)
            continue
        charge = -(-sizes[row] // 4096) * 4096
        while held_bytes + charge > limit_bytes:
            held_bytes -= held.popitem(last=False)[1]
        held[row] = charge
        held_bytes += charge
        downloaded += sizes[row]
    return downloaded


def first_batch(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Seconds from opening the dataset to its first batch; imports are not in it."""
    started = time.perf_counter()
    stream = begin(job)
    batch = next(iter(stream.batches))
    seconds = time.perf_counter() - started
    if not len(stream.payload(batch)):
        raise RuntimeError(f"{job.contender}: the first batch is empty")
    return {"first_batch_seconds": seconds}


def memory(job: Job, begin: Callable[[Job], Stream]) -> Figures:
    """Bytes of a worker after some batches, on average, and of the trainer."""
    stream = begin(job)
    batches: Any = iter(stream.batches)
    for _ in range(NUM_BATCHES_BEFORE_MEMORY):
        next(batches)
    workers = [worker.pid for worker in multiprocessing.active_children() if worker.pid is not None]
    return {
        "worker_rss_mb": sum(memory_bytes(pid, "Rss") for pid in workers) / len(workers) / 1e6,
        "worker_pss_mb": sum(memory_bytes(pid, "Pss") for pid in workers) / len(workers) / 1e6,
        "trainer_rss_mb": memory_bytes(os.getpid(), "Rss") / 1e6,
    }


NUM_BATCHES_BEFORE_MEMORY = 50
NUM_LATER_PASSES = 2
MEASURES: dict[str, Callable[[Job, Any], Figures]] = {
    "throughput": throughput,
    "lookups": lookups,
    "one_pass": one_pass,
    "first_epoch": first_epoch,
    "opened_epoch": opened_epoch,
    "second_epoch": second_epoch,
    "two_passes": two_passes,
    "later_passes": later_passes,
    "bounded_epoch": bounded_epoch,
    "first_batch": first_batch,
    "memory": memory,
    "resumed": resumed.resumed,
    resumed.WHOLE: resumed.take_whole,
    resumed.FIRST: resumed.take_first,
    resumed.REST: resumed.take_rest,
}
