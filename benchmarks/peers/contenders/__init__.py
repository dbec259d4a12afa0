"""One file for each system: what it is, how it is set up best, and a function for each workload that it takes part in.

A contender has `TITLE`, `FORMAT` (`LOOSE` or `SHARDS`) and `SETTINGS` (what was chosen, and why); it may have `prepare(job)`
and `prepare_rows(job)`, which write its own format once. `sds` also needs a checkout, named with `--sds`.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

LOOSE, SHARDS = "loose files", "own shards"
WORDS = ("TITLE", "FORMAT", "SETTINGS")


def load(name: str) -> ModuleType:
    """Return a contender."""
    return importlib.import_module(f"{__name__}.{name}")


MODULES = {
    "sqlstream": "sqlstream",
    "sqlstream_belady": "sqlstream",
    "sqlstream_mds": "streaming",
    "sqlstream_tar": "webdataset",
    "drop_in_mds": "streaming",
    "drop_in_tar": "webdataset",
    "sqlstream_zip": "sqlstream",
    "sqlstream_pillow": "sqlstream",
    "sqlstream_views": "sqlstream",
    "sqlstream_drawing": "sqlstream",
    "plain_torch": "torch",
    "litdata_raw": "litdata",
    "litdata_chunks": "litdata",
    "mosaicml": "streaming",
    "webdataset": "webdataset",
    "huggingface": "datasets",
    "huggingface_files": "datasets",
    "sds": "torch",
    "raw_obstore": "obstore",
}
"""What must be installed for each; asked without importing it."""


def can_run(name: str) -> bool:
    """Return whether what a contender needs is installed."""
    return importlib.util.find_spec(MODULES[name]) is not None


def load_words(name: str) -> dict[str, str]:
    """Return `TITLE`, `FORMAT` and `SETTINGS` of a contender; its file is read, not imported: its packages may be missing."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    words = {"LOOSE": LOOSE, "SHARDS": SHARDS, "sqlstream.FORMAT": LOOSE}
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in WORDS:
            value = node.value
            found[node.targets[0].id] = value.value if isinstance(value, ast.Constant) else words[ast.unparse(value)]
    return {word: str(found[word]) for word in WORDS}


def has(name: str, function: str) -> bool:
    """Return whether a contender has a function; its file is read, not imported."""
    return f"def {function}(" in (Path(__file__).parent / f"{name}.py").read_text()
