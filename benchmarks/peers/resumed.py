"""How exactly a library resumes: a whole run, one that stops after a third, one that goes on; each in a process of its own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

from benchmarks.peers import mixture
from benchmarks.peers.job import Job, Stream

WHOLE, FIRST, REST = "take_whole", "take_first", "take_rest"
PART_SECONDS = 80
"""Of one of three processes; on a quiet machine the longest takes six."""
Begin = Callable[[Job], Stream]


def resumed(job: Job, _begin: Begin) -> dict[str, float]:
    """Return how the run in two parts differs from the whole one: samples lost, repeated, in another place.

    Raises:
        RuntimeError: A process failed; with what it wrote.
    """
    for part in (WHOLE, FIRST, REST):
        command = [sys.executable, "-m", "benchmarks.peers.runner", replace(job, measure=part).to_json()]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PART_SECONDS)
        if ended.returncode:
            raise RuntimeError(f"{part}: {(ended.stderr or ended.stdout).strip()[-1500:]}")
    whole, first, rest = (json.loads(_path(job, part).read_text()) for part in (WHOLE, FIRST, REST))
    return compare(whole, first, rest) | {"drift": mixture.drift(whole, job.num_samples)}


def compare(whole: list[int], first: list[int], rest: list[int]) -> dict[str, float]:
    """Return what a run in two parts has lost, repeated and moved; samples are known by their numbers."""
    expected, given = Counter(whole), Counter(first) + Counter(rest)
    remaining = whole[len(first) :]
    return {
        "lost": (expected - given).total(),
        "repeated": (given - expected).total(),
        "out_of_place": sum(wanted != got for wanted, got in zip_longest(remaining, rest)),
        "before_stop": len(first),
        "before_stop_differ": sum(wanted != got for wanted, got in zip_longest(whole[: len(first)], first)),
        "after_stop": len(remaining),
    }


def take_whole(job: Job, begin: Begin) -> dict[str, float]:
    """Write the samples of an epoch that nothing interrupts."""
    return _write(job, WHOLE, [number for batch in _numbers(begin(job)) for number in batch])


def take_first(job: Job, begin: Begin) -> dict[str, float]:
    """Take a third of an epoch, and write its samples and the state that the library offers."""
    stream = begin(job)
    taken: list[int] = []
    for number, batch in enumerate(_numbers(stream), start=1):
        taken += batch
        if number == max(1, mixture.epoch_size(job.num_samples) // job.batch_size // 3):
            break
    _state_path(job).write_bytes(pickle.dumps(stream.loader.state_dict()))
    return _write(job, FIRST, taken)


def take_rest(job: Job, begin: Begin) -> dict[str, float]:
    """Load the state, and write the samples that come to the end of the epoch."""
    stream = begin(job)
    stream.loader.load_state_dict(pickle.loads(_state_path(job).read_bytes()))
    return _write(job, REST, [number for batch in _numbers(stream) for number in batch])


def _numbers(stream: Stream) -> Iterator[list[int]]:
    for batch in stream.batches:
        yield [mixture.number_of(photo) for photo in stream.payload(batch)]


def _state_path(job: Job) -> Path:
    return job.work_path / "state.pickle"


def _path(job: Job, part: str) -> Path:
    return job.work_path / f"{part}.json"


def _write(job: Job, part: str, numbers: list[int]) -> dict[str, float]:
    _path(job, part).write_text(json.dumps(numbers))
    return {"samples": len(numbers)}
