"""A run by bucket that breaks off again and again, ours beside lhotse's: which rows come, and what a resume replays.

    python benchmarks/bucket_resume.py [--rows 4000] [--breaks 50] [--seed N]

Both run one epoch of the same log-normal lengths on some ranks, all of them in this process and without workers; after 3 to 12
steps the process is thought dead: sampler or loader are made anew, and go on from the state that was saved after the last step.
The layout is the same (2 ranks) or drawn from 1, 2 and 4 ranks. `DynamicBucketingSampler` refuses the state of another number
of ranks; what its user can do then is to begin the epoch anew, which is counted as it is. What is counted:

- rows that the run delivered more than once, and rows that it never delivered, of one epoch (ours: of its plan);
- steps whose rows are not those of the run that did not break off;
- batches that were made only to be thrown away.

lhotse is no dependency: without it only ours runs. SimpleTuner (3.1.6) is not here: its sampler imports, and is given, the
trainer's model, accelerator, state and backends of data and metadata, so it cannot be had without them.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream import Buckets, Lengths, StreamingDataLoader, StreamingDataset
from sqlstream.world import World

BOUNDS = (128, 256, 512, 1024, 4096)
BUDGET, MULTIPLE = 8192, 4
LAYOUTS = (1, 2, 4)


class Job(Protocol):
    """All ranks of a job."""

    num_thrown_away: int

    def step(self) -> list[int] | None:
        """Return the rows of the next step; None: the epoch is over."""

    def state(self) -> Any:
        """Return the state after the last step."""


@dataclass
class Outcome:
    """What a run with breaks has delivered."""

    num_again: int = 0
    num_lost: int = 0
    num_other_steps: int = 0
    num_steps: int = 0
    num_refused: int = 0
    num_thrown_away: int = 0


class Ours:
    """The loaders of all ranks."""

    def __init__(self, table: Path, num_ranks: int, state: Any) -> None:
        self.num_thrown_away = 0
        batches = Buckets("length", Lengths(BOUNDS), global_batch_tokens=BUDGET, rank_multiple=MULTIPLE)
        self.loaders = []
        for rank in range(num_ranks):
            dataset = StreamingDataset(
                table,
                table.parent / "cache",
                shuffle_seed=7,
                batches=batches,
                world=World(rank=rank, world_size=num_ranks),
                show_progress=False,
            )
            self.loaders.append(StreamingDataLoader(dataset, collate_fn=rows_of))
            if state is not None:
                self.loaders[-1].load_state_dict(state)
        self._running = [iter(loader) for loader in self.loaders]

    def step(self) -> list[int] | None:
        batches = [next(running, None) for running in self._running]
        return None if batches[0] is None else sorted(row for batch in batches for row in batch)

    def state(self) -> Any:
        return self.loaders[0].state_dict()


class Lhotse:
    """The samplers of all ranks."""

    def __init__(self, lengths: list[int], num_ranks: int, state: Any) -> None:
        from lhotse import CutSet
        from lhotse.dataset import DynamicBucketingSampler
        from lhotse.testing.dummies import dummy_cut

        cuts = CutSet.from_cuts(dummy_cut(row, duration=float(length)) for row, length in enumerate(lengths))
        self.samplers: list[Any] = [
            DynamicBucketingSampler(
                cuts,
                max_duration=BUDGET / num_ranks,
                num_buckets=len(BOUNDS),
                shuffle=True,
                seed=7,
                world_size=num_ranks,
                rank=rank,
                buffer_size=1000,
            )
            for rank in range(num_ranks)
        ]
        self.num_thrown_away = 0
        for sampler in self.samplers if state is not None else ():
            sampler.load_state_dict(copy.deepcopy(state))
        if state is not None:
            self.num_thrown_away = num_ranks * self.samplers[0].diagnostics.current_epoch_stats.total_batches
        self._running = [iter(sampler) for sampler in self.samplers]

    def step(self) -> list[int] | None:
        batches = [next(running, None) for running in self._running]
        if batches[0] is None:
            return None
        return sorted(int(cut.id.split("_dup")[0].rsplit("-", 1)[-1]) for batch in batches for cut in batch)

    def state(self) -> Any:
        return self.samplers[0].state_dict()


def rows_of(samples: list[dict[str, Any]]) -> list[int]:
    """Return the rows of a batch."""
    return [sample["__row__"] for sample in samples]


def run(
    make: Callable[[int, Any], Job], num_rows: int, num_breaks: int, draw: random.Random, layouts: tuple[int, ...]
) -> Outcome:
    """Break a run of one epoch off again and again; compare it with one that ends."""
    outcome, num_ranks, state = Outcome(), draw.choice(layouts), None
    plan, whole = list[list[int]](), make(num_ranks, None)
    while (rows := whole.step()) is not None:
        plan.append(rows)
    got, job, is_over = list[list[int]](), make(num_ranks, None), False
    for number in range(num_breaks + 1):
        for _ in range(draw.randint(3, 12) if number < num_breaks else len(plan) * 2):
            if (rows := job.step()) is None:
                is_over = True
                break
            got.append(rows)
        if is_over:
            break
        state, num_ranks = job.state(), draw.choice(layouts)
        try:
            job = make(num_ranks, state)
        except AssertionError:  # lhotse's, of another number of ranks
            outcome.num_refused += 1
            job = make(num_ranks, None)
        outcome.num_thrown_away += job.num_thrown_away
    counts, planned = Counter(row for rows in got for row in rows), Counter(row for rows in plan for row in rows)
    outcome.num_again = sum(max(0, count - max(1, planned[row])) for row, count in counts.items())
    outcome.num_lost = sum(row not in counts for row in planned)
    outcome.num_steps = len(got)
    outcome.num_other_steps = sum(number >= len(plan) or rows != plan[number] for number, rows in enumerate(got))
    return outcome


def main() -> None:
    """Run both ways and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--breaks", type=int, default=50)
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4)))
    given = parser.parse_args()
    print(f"seed {given.seed}, {given.rows} rows, {given.breaks} breaks at most")
    lengths = np.clip(np.random.default_rng(1).lognormal(5.5, 0.8, given.rows), 1, BOUNDS[-1]).astype(np.int64)  # [n]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.parquet"
        pq.write_table(pa.table({"length": lengths}), table)
        contenders: dict[str, Callable[[int, Any], Job]] = {"sqlstream": lambda ranks, state: Ours(table, ranks, state)}
        try:
            import lhotse

            as_list = lengths.tolist()
            contenders[f"lhotse {lhotse.__version__}"] = lambda ranks, state: Lhotse(as_list, ranks, state)
        except ImportError:
            print("lhotse is not installed")
        print("| | resumed on | steps | other than planned | rows again | rows never | states refused | batches thrown away |")
        print("|---|---|---|---|---|---|---|---|")
        for name, make in contenders.items():
            for where, layouts in (("2 ranks", (2,)), ("1, 2 or 4 ranks", LAYOUTS)):
                found = run(make, given.rows, given.breaks, random.Random(given.seed), layouts)
                counts = (found.num_steps, found.num_other_steps, found.num_again, found.num_lost)
                print(f"| {name} | {where} |", *(f"{count} |" for count in (*counts, found.num_refused, found.num_thrown_away)))


if __name__ == "__main__":
    main()
