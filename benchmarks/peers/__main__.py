"""The command: prepare, run rounds, report.

python -m benchmarks.peers --only warm random --rounds 5
python -m benchmarks.peers --report        # table and plots from the results that are there
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.peers.driver import ROOT, Settings, prepare, run_rounds, selected
from benchmarks.peers.report import write_report
from benchmarks.peers.workloads import CASES


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=[], help="groups (warm, random, cold, squeeze, start, …) or names of cases"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each throughput measurement")
    parser.add_argument("--num-samples", type=int, default=5000, help="photos")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "sqlstream-bench", help="kept between runs")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--also", type=Path, nargs="*", default=[], help="folders of other results that the page is made of")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs", help="where benchmarks.md and its plots go")
    parser.add_argument("--sds", default="", help="a checkout of sds")
    parser.add_argument("--report", action="store_true", help="only report what is measured already")
    options = parser.parse_args()
    settings = Settings(
        place=options.data / f"photos-{options.num_samples}",
        num_samples=options.num_samples,
        rounds=options.rounds,
        seconds=options.seconds,
        results=options.results,
        other_results=tuple(options.also),
        sds=options.sds,
        only=tuple(options.only),
    )
    if not options.report:
        cases = selected(CASES, settings.only)
        prepare(cases, settings)
        run_rounds(cases, settings)
    write_report(settings, options.docs)


if __name__ == "__main__":
    main()
