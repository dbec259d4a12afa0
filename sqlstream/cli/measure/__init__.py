"""`sqlstream index measure`: columns that a function computes once for each row, as a table that later runs join.

    rows of the index ─ parts of `PART_ROWS` rows, some processes → <dst>/measured/<name>.parts/*.parquet → <name>.parquet

A part is there whole or not at all, and is named by its rows: a run that was stopped goes on with those that are missing. With
`--part i/n` a machine makes its share of the parts, beside a file that all machines see (`--out`), and `--merge` joins them.
"""

from __future__ import annotations

from sqlstream.cli.measure.columns import Share, measure_columns
from sqlstream.cli.measure.command import register
from sqlstream.cli.measure.part import Measure

__all__ = ["Measure", "Share", "measure_columns", "register"]
