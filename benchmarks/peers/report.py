"""From results to `docs/benchmarks.md`: tables, bars, settings, versions, plots; nothing that was not measured."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers import contenders, data
from benchmarks.peers.case import SHORT_RUNS, Bar, Case
from benchmarks.peers.driver import LIMIT_SECONDS, ROUNDS_BESIDE, Run, Settings
from benchmarks.peers.on_shards import DROP_INS
from benchmarks.peers.reasons import NOT_COMPARABLE, REASONS
from benchmarks.peers.workloads import BARS, CASES, HEADLINES

DISTRIBUTIONS = (
    "torch mosaicml-streaming litdata webdataset datasets torchvision obstore pyarrow numpy pillow simplejpeg".split()
)
HEADLINE = "<!-- headline: `make bench` writes what is below -->", "<!-- end of headline -->"
Runs = Mapping[str, Sequence[Run]]
"""Runs of each contender, one a round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a bar came out."""

    value: float
    spread: str
    holds: bool


def read_results(directory: Path) -> dict[str, Runs]:
    """Return what is measured: runs by case and contender."""
    known = {case.name for case in CASES}
    return {path.stem: json.loads(path.read_text()) for path in sorted(directory.glob("*.json")) if path.stem in known}


def figures(runs: Sequence[Run], name: str) -> list[float]:
    """Return one figure of all runs that have it."""
    return [float(run[name]) for run in runs if name in run]


def in_rounds(results: Mapping[str, Runs], bar: Bar, case: Case) -> list[float]:
    """Return a bar's value in each round: ratios are taken within a round, where the machine was as busy for both."""
    runs = results[case.name]
    ours = runs.get(bar.contender, [])
    name = bar.figure or case.figure
    values = []
    for number, run in enumerate(ours):
        if name not in run:
            continue
        others = [runs[other][number] for other in bar.against if number < len(runs.get(other, []))]
        rivals = [float(other[name]) for other in others if name in other]
        if bar.over in results:
            rivals = [
                float(other[name]) for other in results[bar.over].get(bar.contender, [])[number : number + 1] if name in other
            ]
        elif bar.over:
            rivals = [float(run[bar.over])] if bar.over in run else []
        elif not bar.against:
            rivals = [1.0]
        if rivals:
            best = max(rivals) if case.is_higher_better else min(rivals)
            values.append(float(run[name]) / best)
    return values


def judge(results: Mapping[str, Runs], bar: Bar) -> Verdict | None:
    """Return how a bar came out; None: not measured."""
    case = next(case for case in CASES if case.name == bar.case)
    values = in_rounds(results, bar, case) if case.name in results else []
    if not values:
        return None
    value = statistics.median(values)
    holds = value >= bar.limit if bar.is_at_least else value <= bar.limit
    return Verdict(value=value, spread=f"{min(values):.3g} to {max(values):.3g}", holds=holds)


def case_table(case: Case, runs: Runs) -> list[str]:
    """Return the table of one case: median, spread, ratio to sqlstream."""
    medians = {name: statistics.median(values) for name in runs if (values := figures(runs[name], case.figure))}
    if not medians:
        return []
    ours = medians.get("sqlstream")
    lines = [f"### {case.title}", "", f"| | format | {case.unit} | lowest to highest | to sqlstream | CPU µs/sample |"]
    lines.append("|---|---|---|---|---|---|")
    for name in sorted(medians, key=lambda name: medians[name], reverse=case.is_higher_better):
        words = contenders.load_words(name)
        values = figures(runs[name], case.figure)
        ratio = f"{medians[name] / ours:.2f}" if ours else ""
        cpu = figures(runs[name], "cpu_us_per_sample")
        spread, cpu_shown = f"{min(values):.4g} to {max(values):.4g}", f"{statistics.median(cpu):.0f}" if cpu else ""
        cells = [words["TITLE"], words["FORMAT"], f"{medians[name]:.4g}", spread, ratio, cpu_shown]
        lines.append(f"| {' | '.join(cells)} |")
    rounds = max(len(values) for values in runs.values())
    loads = [load for values in runs.values() for load in figures(values, "load")]
    lines += [
        "",
        f"{rounds} {'round' if rounds == 1 else 'rounds'}, load of the machine {min(loads):.1f} to {max(loads):.1f}.",
        "",
    ]
    for name, values in runs.items():
        for error in {str(run["error"]).splitlines()[-1] for run in values if run.get("error")}:
            lines += [f"{contenders.load_words(name)['TITLE']} failed: `{error[:200]}`", ""]
    lines += [f"{line}\n" for line in extra(case, runs)]
    return lines


def extra(case: Case, runs: Runs) -> list[str]:
    """Return what a case measured beside its figure."""
    shown = {
        "p99_us": "p99 µs",
        "worker_rss_mb": "RSS of a worker, MB",
        "disk_over_limit": "disk to limit",
        "seconds": "seconds",
        "lost": "samples lost",
        "repeated": "samples repeated",
        "drift": "most samples that a stream was ahead or behind its share, in the uninterrupted run",
    }
    names = [name for name in shown if name != case.figure and any(figures(values, name) for values in runs.values())]
    return [
        f"{shown[name]}: "
        + ", ".join(
            f"{contenders.load_words(contender)['TITLE']} {statistics.median(values):.4g}"
            for contender in runs
            if (values := figures(runs[contender], name))
        )
        for name in names
    ]


def bars_table(results: Mapping[str, Runs]) -> list[str]:
    """Return what should hold, and whether it does."""
    lines = ["| case | bar | measured | rounds | |", "|---|---|---|---|---|"]
    for bar in BARS:
        case = next(case for case in CASES if case.name == bar.case)
        verdict = judge(results, bar)
        if verdict is None:
            lines.append(f"| {case.title} | {bar.text} | not measured | | |")
            continue
        reason = "holds" if verdict.holds else f"**does not hold**: {REASONS.get((bar.case, bar.text), 'see the profile')}"
        lines.append(f"| {case.title} | {bar.text} | {verdict.value:.3g} | {verdict.spread} | {reason} |")
    return lines


def machine() -> str:
    """Return what this was measured on, in words; no name of it."""
    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        "unknown CPU",
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GB of memory, {system}"


def commits(results: Mapping[str, Runs]) -> str:
    """Return what was measured."""
    found = {str(run["commit"]) for runs in results.values() for values in runs.values() for run in values if "commit" in run}
    return " and ".join(sorted(found)) or "unknown"


def headline(results: Mapping[str, Runs]) -> str:
    """Return the table of the README: medians of ratios, only of what was measured."""
    lines = ["| | sqlstream, as a ratio |", "|---|---|"]
    for name, text, wanted in HEADLINES:
        verdicts = [judge(results, next(bar for bar in BARS if (bar.case, bar.text) == one)) for one in wanted]
        measured = [verdict.value for verdict in verdicts if verdict is not None]
        if len(measured) == len(wanted):
            lines.append(f"| {name} | {text.format(*measured)} |")
    verdicts = [judge(results, bar) for bar in BARS]
    held, judged = sum(verdict.holds for verdict in verdicts if verdict), sum(verdict is not None for verdict in verdicts)
    contenders = {(bar.case, bar.contender) for bar, verdict in zip(BARS, verdicts, strict=True) if verdict is not None}
    rounds = sorted({len(results[case][contender]) for case, contender in contenders})
    counted = f"{rounds[0]} to {rounds[-1]}" if len(rounds) > 1 else f"{rounds[0] if rounds else 0}"
    return "\n".join([*lines, "", f"Medians of {counted} rounds; {held} of {judged} bars hold."])


def with_headline(readme: str, table: str) -> str:
    """Return a README with this table between its two marks; one without marks stays as it is."""
    start, end = readme.find(HEADLINE[0]), readme.find(HEADLINE[1])
    if not 0 <= start < end:
        return readme
    return f"{readme[: start + len(HEADLINE[0])]}\n\n{table}\n\n{readme[end:]}"


def versions() -> str:
    """Return the versions of all that took part."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} not installed")
    return ", ".join(found)


def drop_in_table(results: Mapping[str, Runs]) -> list[str]:
    """Return what a peer's script gives before and after its imports are changed, round by round: ratios above 1 are better."""
    heads = ("case", "script of", "before", "after", "after to before", "CPU of a sample, before to after", "rounds", "load")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for case in CASES:
        for peer, drop_in in DROP_INS.items():
            runs = results.get(case.name, {})
            pairs = [
                (before, after)
                for before, after in zip(runs.get(peer, []), runs.get(drop_in, []), strict=False)
                if case.figure in before and case.figure in after
            ]
            if not pairs:
                continue
            sign = 1 if case.is_higher_better else -1
            ratios = [(float(after[case.figure]) / float(before[case.figure])) ** sign for before, after in pairs]
            cpu = [
                float(before["cpu_us_per_sample"]) / float(after["cpu_us_per_sample"])
                for before, after in pairs
                if "cpu_us_per_sample" in before and "cpu_us_per_sample" in after
            ]
            shown = [f"{statistics.median(figures(runs[name], case.figure)):.4g} {case.unit}" for name in (peer, drop_in)]
            spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            cpu_shown = f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})" if cpu else ""
            title = contenders.load_words(peer)["TITLE"]
            loads = [float(run["load"]) for pair in pairs for run in pair if "load" in run]
            load = f"{min(loads):.0f} to {max(loads):.0f}" if loads else ""
            lines.append(f"| {' | '.join([case.title, title, *shown, spread, cpu_shown, str(len(pairs)), load])} |")
    return lines


def page(results: Mapping[str, Runs], settings: Settings, plots: Sequence[str]) -> str:
    """Return docs/benchmarks.md."""
    photos: dict[str, Any] = json.loads(data.describe(settings.place))
    lines = [
        "# Benchmarks",
        "",
        "Made by `make bench`; do not edit. What counts are ratios within one run; times and rates are of one machine alone.",
        "",
        f"Made {datetime.now(tz=UTC):%Y-%m-%d}, measured at commit {commits(results)} on {machine()}. Versions: {versions()}.",
        "",
        f"Data: {photos['photos']} JPEGs of {photos['mean_bytes'] / 1000:.0f} KB on average (500×375), in the page "
        "cache; batches of 64. Contenders run in fresh processes, in turn, case after case, round after round; shown are the "
        f"medians of the rounds; for first batches at 10^6 rows, a round is the median of {SHORT_RUNS} processes, one after "
        f"the other. What no bar needs is run in the first {ROUNDS_BESIDE} rounds only; who gives no answer within "
        f"{LIMIT_SECONDS} s is cut off, and not run again in that case. Each run writes into a directory of its own, which "
        "ext4 is asked to put far from the last one's (`benchmarks/peers/disks.py` says why); before it the data is "
        "read once. To resume is to load a state that was saved before, from a file.",
        "",
        "**As users write it**: cases whose titles begin so have the same transform (a plain class that opens and reads the "
        "file, where the library gives a path) and the same collate function for all (`benchmarks/peers/users.py`), no setting "
        "that favours a contender, and count whole epochs from `iter(loader)` to the end, the start of workers in it. That "
        "transform draws no random numbers, as its code shows, so sqlstream seeds no generators for it; *sqlstream, drawing* "
        "has one that draws, which no peer makes reproducible. A second "
        "epoch is a new `iter` of the same loader, after a first one that fetched all data from the server. All other cases "
        "take what each library brings for the purpose, and rates after the first batch.",
        "",
        "## Bars",
        "",
        *bars_table(results),
        "",
        *[f"![{name}](benchmarks/{name})" for name in plots],
        "",
        "## Drop-ins",
        "",
        "The script of a peer, as `benchmarks/peers/contenders` has it, and the same text with its imports changed. Ratios are "
        "of two runs of one round, and above 1 the drop-in is better.",
        "",
        *drop_in_table(results),
        "",
        "## Run it again",
        "",
        "```",
        "make bench                              # everything, five rounds",
        'make bench ONLY="warm random" ROUNDS=3   # some groups or cases',
        "make bench SDS=path/to/sds              # with a checkout of sds",
        "```",
        "",
        "It sets up `.venv-bench` (the peers, about 1.6 GB), makes its data in the directory for temporary files, "
        "needs nginx (`scripts/install_servers.sh`), says at the start how long it will take (some minutes more the first "
        "time, for the data), writes `benchmarks/results/*.json`, this page and the README's table, and after a whole run "
        "profiles of our own path (`benchmarks/results/profiles`). MosaicML's "
        "package asks for older numpy and transformers than the others allow; it runs with those installed here.",
        "",
        "## Who, and how set up",
        "",
        "| | format | settings |",
        "|---|---|---|",
    ]
    for name in contenders.MODULES:
        words = contenders.load_words(name)
        lines.append(f"| {words['TITLE']} | {words['FORMAT']} | {words['SETTINGS']} |")
    lines += ["", "## What is not comparable", "", *[f"- {text}" for text in NOT_COMPARABLE], "", "## Figures", ""]
    for case in CASES:
        if case.name in results:
            lines += case_table(case, results[case.name])
    return "\n".join(lines).rstrip() + "\n"


def lost_cases(path: Path, results: Mapping[str, Runs]) -> list[str]:
    """Return the cases that a page has figures of, and would have no longer."""
    headings = set(path.read_text().splitlines()) if path.exists() else set[str]()
    return [case.name for case in CASES if f"### {case.title}" in headings and case.name not in results]


def write_report(settings: Settings, docs: Path) -> None:
    """Write the page, its plots, and the README's table."""
    from benchmarks.peers.plots import write_plots

    results: dict[str, Runs] = {}
    for folder in (settings.results, *settings.other_results):
        results = read_results(folder) | results
    table = headline(results)
    (settings.results / "headline.md").write_text(f"{table}\n")
    if lost := lost_cases(docs / "benchmarks.md", results):
        print(table, flush=True)
        print(f"{docs / 'benchmarks.md'} is left as it is, for it has what is not in these results: {', '.join(lost)}.")
        print("Name the folders of those with --also, or another place for the page with --docs.", flush=True)
        return
    plots = write_plots(results, docs / "benchmarks")
    data.prepare(settings.place, settings.num_samples)  # the page describes them; cases may have had others
    (docs / "benchmarks.md").write_text(page(results, settings, plots))
    readme = docs.parent / "README.md"
    if readme.exists():
        readme.write_text(with_headline(readme.read_text(), table))
    print(table, flush=True)
