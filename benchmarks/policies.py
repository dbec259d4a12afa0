"""Hit rates of the eviction policies over two shuffled epochs, through a real ledger, beside naive simulations.

    python -m benchmarks.policies [--rows 2000] [--shares 10 30 60]

Every row is one object; the second epoch alone can hit. Counts, no times: any machine gives the same figures.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from sqlstream.cache.model.policies import POLICIES
from tests.cache.simulations import WINDOW, belady_hits, epochs, ledger_hits, lru_hits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--shares", type=int, nargs="+", default=[10, 30, 60], help="room, in percent of all objects")
    options = parser.parse_args()
    order = epochs(options.rows, 2)
    print(f"{options.rows} objects, two epochs, windows of {WINDOW}: hits in percent of an epoch, downloads of exact LRU = 100")
    names = [*POLICIES, "lru, exact", "belady, exact"]
    print("room".rjust(5), *(name.rjust(15) for name in names))
    for share in options.shares:
        capacity = options.rows * share // 100
        hits = {}
        for policy in POLICIES:
            with tempfile.TemporaryDirectory(prefix="sqlstream-bench-") as directory:
                hits[policy] = ledger_hits(Path(directory) / "cache", order, capacity, policy)
        hits |= {"lru, exact": lru_hits(order, capacity), "belady, exact": belady_hits(order, capacity)}
        least = len(order) - hits["lru, exact"]
        cells = [f"{100 * hits[name] / options.rows:.1f} % ({100 * (len(order) - hits[name]) / least:.1f})" for name in names]
        print(f"{share} %".rjust(5), *(cell.rjust(15) for cell in cells), flush=True)


if __name__ == "__main__":
    main()
