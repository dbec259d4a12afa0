"""How exact mixtures are, and what it costs to look a turn up, to start and to go on; beside the rules of four peers.

    python benchmarks/mixture.py [--weightings 1000] [--positions 1000] [--json FILE]

**Proportions.** Random weightings of 2 to 1000 streams (log-normal, of random spread); of each at random positions the counts
of *all* streams. The peers' rules are written down here from their sources and checked against picks of their own code before
use: grain's cascade of floors over int(w * 100 / min(w)), Megatron's greedy argmax (sequential, so its positions are its first
turns), MosaicML's `random` batching (stream ids of an epoch, shuffled), sds's counts (shares / smallest share, rounded, at
least 1), in consecutive order. The ideal is position x the weight that was given.

**Time.** Best of many calls on one machine: quote ratios.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sqlstream.order import (
    Even,
    Int64Array,
    Mixture,
    ScheduleType,
    Shuffled,
    relative_choose,
    whole_weights,
)
from sqlstream.order.streams.mixed import Mixed, MixtureSince, TurnLayout

LAST_POSITION = 10**6
NUM_ROWS = 10**9
EPOCH_SIZE = 1 << 40  # of a mixture without end
SEQUENTIAL_WEIGHTINGS, SEQUENTIAL_TURNS = 60, 20_000  # of rules that have to walk
Counts = Callable[[list[float], Int64Array], NDArray[Any]]


# -- rules: counts of all streams at sorted positions [streams, positions] ------------------------------------------------


def even_counts(weights: tuple[int, ...], positions: Int64Array) -> Int64Array:
    """Counts of the even schedule, all positions together: the walk of `Even.counts` with vectors."""
    even = Even(weights)
    tree = even._tree
    turns = np.zeros((len(tree.weight), len(positions)), np.int64)
    turns[tree.root] = positions
    for node in range(tree.num_inner - 2, -1, -2):
        weight, part = int(tree.weight[node]), int(tree.left_weight[node])
        whole, rest = np.divmod(turns[node], weight)
        right, left = tree.children[node : node + 2]
        turns[left] = whole * part + (rest * part + weight // 2) // weight
        turns[right] = turns[node] - turns[left]
    at = int(positions[len(positions) // 2])
    assert even.counts(at) == tuple(turns[tree.num_inner :: 2, len(positions) // 2].tolist())
    return turns[tree.num_inner :: 2]


def grain_counts(weights: list[float], positions: Int64Array) -> Int64Array:
    whole = [int(weight * (100 / min(weights))) for weight in weights]
    left, total, counts = positions.copy(), sum(whole), []
    for weight in whole:
        passed = left * (total - weight) // total
        counts.append(left - passed)
        left, total = passed, total - weight
    return np.array(counts)


def megatron_counts(weights: list[float], positions: Int64Array) -> Int64Array:
    shares = np.array(weights) / sum(weights)
    counts, found, at = np.zeros(len(shares)), [], 0
    for position in positions.tolist():
        for turn in range(at, position):
            counts[np.argmax(shares * max(turn, 1) - counts)] += 1
        at = position
        found.append(counts.astype(np.int64))
    return np.array(found).T


def mosaicml_counts(weights: list[float], positions: Int64Array) -> Int64Array:
    choose = relative_choose(weights, LAST_POSITION)
    ids = np.repeat(np.arange(len(choose), dtype=np.int16), choose)
    np.random.default_rng(9176).shuffle(ids)
    parts = [np.bincount(part, minlength=len(choose)) for part in np.split(ids, positions)[:-1]]
    counts: Int64Array = np.cumsum(parts, axis=0).T
    return counts


def sds_whole(weights: list[float]) -> Int64Array:
    shares = np.array(weights) / sum(weights)
    if (shares == 1 / len(shares)).all():
        return np.ones(len(shares), np.int64)
    rounded = np.round(shares, decimals=6)
    counts = np.round(rounded / rounded[rounded > 0].min()).astype(np.int64)
    counts[counts < 1] = 1
    counts[rounded == 0] = 0
    whole: Int64Array = counts
    return whole


def sds_counts(weights: list[float], positions: Int64Array) -> Int64Array:
    whole = sds_whole(weights)
    period, within = np.divmod(positions, int(whole.sum()))
    starts = np.cumsum(whole) - whole
    counts: Int64Array = period * whole[:, None] + np.clip(within - starts[:, None], 0, whole[:, None])
    return counts


def check_rules() -> None:
    """Compare the rules with what the peers' own code gave (reference/mixing/mixing-golden.json)."""

    def picks(rule: Counts, weights: list[float], stop: int = 40) -> str:
        counts = rule(weights, np.arange(1, stop + 1))
        before = np.concatenate([np.zeros((len(weights), 1), np.int64), counts[:, :-1]], axis=1)
        return "".join(map(str, (counts - before).argmax(axis=0)))

    assert picks(grain_counts, [0.7, 0.2, 0.1]) == "0001001002000100100200010010020001001002"
    assert picks(grain_counts, [2, 3, 4]) == "0121021220121021220121021220121021220121"
    assert picks(megatron_counts, [0.7, 0.2, 0.1]) == "0102000100010200010001020001000102000100"
    assert picks(megatron_counts, [2, 3, 4]) == "2102120120212120120212120120212120120212"
    assert sds_whole([0.6, 0.4]).tolist() == [1, 1]
    assert sds_whole([0.55, 0.3, 0.15]).tolist() == [4, 2, 1]
    lagging = grain_counts([1.0] * 50 + [950.0], np.arange(1, 1001))
    assert np.abs(lagging - np.arange(1, 1001) * np.array([1] * 50 + [950])[:, None] / 1000).max() == 47.5


# -- proportions ----------------------------------------------------------------------------------------------------------


def random_weights(rng: np.random.RandomState) -> list[float]:
    num_streams = int(np.exp(rng.uniform(np.log(2), np.log(1001))))
    weights: list[float] = np.exp(rng.uniform(0, 2) * rng.randn(num_streams)).tolist()
    return weights


def drift(counts: NDArray[Any], positions: Int64Array, weights: list[float] | tuple[int, ...]) -> float:
    shares = np.array(weights, np.float64) / sum(weights)
    return float(np.abs(counts - shares[:, None] * positions).max())


def measure_proportions(num_weightings: int, num_positions: int) -> dict[str, Any]:
    rng = np.random.RandomState(19)
    worst: dict[str, list[float]] = {}
    num_exact = num_checked = 0
    streams = []
    for number in range(num_weightings):
        weights = random_weights(rng)
        positions = np.sort(rng.randint(1, LAST_POSITION + 1, num_positions))
        whole = whole_weights(weights)
        streams.append(len(weights))
        counts = even_counts(whole, positions)
        worst.setdefault("sqlstream even, of its whole weights", []).append(drift(counts, positions, whole))
        worst.setdefault("sqlstream even, of the given weights", []).append(drift(counts, positions, weights))
        periods = int(rng.randint(0, 1 << 20))
        num_exact += Even(whole).counts(periods * sum(whole)) == tuple(periods * weight for weight in whole)
        num_checked += len(positions)
        rules: dict[str, Counts] = {"grain": grain_counts, "sds, consecutive": sds_counts}
        for name, rule in rules.items():
            worst.setdefault(name, []).append(drift(rule(weights, positions), positions, weights))
        if number < SEQUENTIAL_WEIGHTINGS:
            early = np.unique(positions % SEQUENTIAL_TURNS + 1)[-1000:]
            worst.setdefault("Megatron, first 20000 turns", []).append(drift(megatron_counts(weights, early), early, weights))
            some = np.unique(positions)[:: max(1, num_positions // 100)]
            worst.setdefault("MosaicML random", []).append(drift(mosaicml_counts(weights, some), some, weights))
    table = {
        name: {"weightings": len(found), "worst": round(max(found), 4), "median": round(float(np.median(found)), 4)}
        for name, found in worst.items()
    }
    return {
        "weightings": num_weightings,
        "streams": [min(streams), int(np.median(streams)), max(streams)],
        "positions, each with the counts of all streams": num_checked,
        "exact at a random multiple of W": f"{num_exact} of {num_weightings}",
        "worst |count - ideal|": table,
    }


# -- time -----------------------------------------------------------------------------------------------------------------


def best_seconds(call: Callable[[], object], repeats: int) -> float:
    """The fastest of `repeats` calls: what it costs when nothing disturbs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def mixture_of(num_streams: int, schedule: ScheduleType, block: int | None = None) -> Mixture:
    weights = np.exp(np.random.RandomState(num_streams).randn(num_streams)).tolist()
    changes = ((0, whole_weights(weights)),)
    return Mixture(num_streams=num_streams, changes=changes, schedule=schedule, seed=7, block=block)


class Rows:
    """Rows of the streams of a mixture, each shuffled by itself over 10^9 rows."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture
        self.shuffles = [Shuffled(num_rows=NUM_ROWS, seed=seed) for seed in range(mixture.num_streams)]
        self._mixed = Mixed(orders=tuple(self.shuffles), weights=self, turns=TurnLayout(epoch_size=EPOCH_SIZE))

    fingerprint = "weights that do not change"

    def since(self, turns: TurnLayout) -> MixtureSince:
        """Return whose turn it is; see `StreamWeights`."""
        return MixtureSince(0, (0,) * self.mixture.num_streams, self.mixture)

    def together(self, numbers: Int64Array) -> Int64Array:
        """The rows as a run looks them up."""
        return self._mixed.rows_at(0, numbers).row

    def apart(self, numbers: Int64Array) -> Int64Array:
        """Stream by stream."""
        turns = self.mixture.at(numbers)
        rows = np.empty_like(turns.draw)
        for stream in np.unique(turns.stream).tolist():
            here = np.flatnonzero(turns.stream == stream)
            draws = turns.draw[here]
            for epoch in np.unique(draws // NUM_ROWS).tolist():
                own = draws // NUM_ROWS == epoch
                rows[here[own]] = self.shuffles[stream].rows_at(epoch, draws[own] % NUM_ROWS).row
        return rows


def measure_lookup() -> dict[str, Any]:
    alone = Shuffled(num_rows=NUM_ROWS, seed=7)
    result: dict[str, Any] = {}
    single = best_seconds(lambda: alone.rows_at(4, np.arange(64) + 10**8), 3000)
    result["one dataset without a mixture, microseconds"] = round(1e6 * single, 1)

    def times(look_up: Callable[[Int64Array], object], first: int, repeats: int) -> float:
        return round(best_seconds(partial(look_up, np.arange(64) + first), repeats) / single, 2)

    for num_streams in (1, 3, 50, 1000):
        rows = Rows(mixture_of(num_streams, ScheduleType.PROPORTIONAL))
        numbers = np.arange(64) + 10**8
        assert (rows.together(numbers) == rows.apart(numbers)).all()
        figures: dict[str, float] = {}
        for first in (0, 10**6, 10**9, 10**12):
            figures[f"rows from {first:.0e}"] = times(rows.together, first, 800)
        figures["turns alone from 1e+09"] = times(rows.mixture.at, 10**9, 800)
        figures["rows stream by stream from 1e+09"] = times(rows.apart, 10**9, 100)
        result[f"{num_streams} streams, x one dataset"] = figures
    return result


def measure_start() -> dict[str, Any]:
    """Milliseconds to the first 64 turns: from weights as numbers, and at turn 10^7 from whole weights, as a state has them."""
    result: dict[str, Any] = {}
    kinds = {
        "proportional": (ScheduleType.PROPORTIONAL, None),
        "random_order, blocks of 1024": (ScheduleType.RANDOM_ORDER, 1024),
        "fixed_random_order": (ScheduleType.FIXED_RANDOM_ORDER, None),
        "random": (ScheduleType.RANDOM, None),
    }
    for name, (kind, block) in kinds.items():
        for num_streams in (3, 1000):
            given = mixture_of(num_streams, kind, block)
            weights = np.exp(np.random.RandomState(num_streams).randn(num_streams)).tolist()

            def start(kind: ScheduleType = kind, block: int | None = block, weights: list[float] = weights) -> object:
                changes = ((0, whole_weights(weights)),)
                mixture = Mixture(num_streams=len(weights), changes=changes, schedule=kind, seed=7, block=block)
                return mixture.at(np.arange(64))

            drawn = given.counts(10**7)  # which a state has

            def resume(given: Mixture = given, drawn: tuple[int, ...] = drawn) -> object:
                mixture = Mixture(
                    num_streams=given.num_streams,
                    changes=given.changes,
                    schedule=given.schedule,
                    seed=given.seed,
                    block=given.block,
                )
                if mixture.schedule is ScheduleType.RANDOM:
                    mixture.remember(10**7, drawn)
                return mixture.counts(10**7), mixture.at(np.arange(64) + 10**7)

            result[f"{name}, {num_streams} streams"] = {
                "start_ms": round(1e3 * best_seconds(start, 60), 3),
                "resume_at_1e7_ms": round(1e3 * best_seconds(resume, 60), 3),
            }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weightings", type=int, default=1000)
    parser.add_argument("--positions", type=int, default=1000, help="of each weighting")
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    options = parser.parse_args()
    check_rules()
    figures = {
        "lookup of 64 positions": measure_lookup(),
        "start and resume": measure_start(),
        "proportions": measure_proportions(options.weightings, options.positions),
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
