"""Bar plots of each group, as PNG."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers import contenders
from benchmarks.peers.case import Case
from benchmarks.peers.report import Runs, figures
from benchmarks.peers.workloads import CASES

OURS, THEIRS = "#1f77b4", "#b0b0b0"


def write_plots(results: Mapping[str, Runs], directory: Path) -> list[str]:
    """Write one picture a group; return their names. Without matplotlib, none."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: matplotlib is not installed here (make bench installs it)")
        return []
    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    groups = dict.fromkeys(case.group for case in CASES if case.name in results)
    return [name for group in groups if (name := _plot(group, results, directory))]


def _plot(group: str, results: Mapping[str, Runs], directory: Path) -> str:
    from matplotlib import pyplot

    cases = [case for case in CASES if case.group == group and case.name in results]
    figure, axes = pyplot.subplots(len(cases), 1, figsize=(8, 0.6 + 1.9 * len(cases)), squeeze=False)
    for axis, case in zip(axes[:, 0], cases, strict=True):
        _draw(axis, case, results[case.name])
    figure.tight_layout()
    name = f"{group}.png"
    figure.savefig(directory / name, dpi=80)
    pyplot.close(figure)
    return name


def _draw(axis: object, case: Case, runs: Runs) -> None:
    names = [name for name in case.contenders if figures(runs.get(name, []), case.figure)]
    names.sort(key=lambda name: statistics.median(figures(runs[name], case.figure)), reverse=not case.is_higher_better)
    for number, name in enumerate(names):
        values = figures(runs[name], case.figure)
        median = statistics.median(values)
        spread = [[median - min(values)], [max(values) - median]]
        color = OURS if name.startswith("sqlstream") else THEIRS
        axis.barh(number, median, xerr=spread, color=color, capsize=2)  # type: ignore[attr-defined]  # matplotlib has no types here
    axis.set_yticks(range(len(names)), [contenders.load_words(name)["TITLE"] for name in names], fontsize=7)  # type: ignore[attr-defined]
    axis.set_title(f"{case.title} ({case.unit})", fontsize=8)  # type: ignore[attr-defined]
    axis.tick_params(axis="x", labelsize=7)  # type: ignore[attr-defined]
