"""Pictures of what `benchmarks/buckets.py` has measured, for docs/batches.md: crops and fill, as PNG. Needs matplotlib.

python benchmarks/bucket_plots.py benchmarks/results/buckets/buckets.json docs/benchmarks
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

OURS, THEIRS = "#1f77b4", "#b0b0b0"


def draw(title: str, values: dict[str, float], path: Path) -> None:
    """Write a bar for each value."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 0.7 + 0.35 * len(values)))
    names = list(values)[::-1]
    colors = [OURS if name.startswith(("sqlstream", "buckets")) else THEIRS for name in names]
    axis.barh(range(len(names)), [100 * values[name] for name in names], color=colors)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    axis.set_title(title, fontsize=8)
    axis.tick_params(axis="x", labelsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def main(source: Path, folder: Path) -> None:
    """Write both pictures."""
    result: dict[str, Any] = json.loads(source.read_text())
    crops = {name: row["mean crop"] for name, row in result["crops"].items()}
    draw("mean share of a picture that is cut away (%; less is better)", crops, folder / "bucket-crops.png")
    draw("share of a batch that is no padding (%; more is better)", result["fill"], folder / "bucket-fill.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
