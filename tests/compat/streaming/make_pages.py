"""Writes pages/*.txt (ruff would format .md): the Python code of MosaicML Streaming's pages, as it is (Apache-2.0, MosaicML).

git clone --branch v0.13.0 …/mosaicml/streaming PEER
python tests/compat/streaming/make_pages.py PEER
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

PAGES = {
    "readme": "README.md",
    "quick_start": "docs/source/getting_started/quick_start.md",
    "dataset_conversion": "docs/source/preparing_datasets/basic_dataset_conversion.md",
    "synthetic_nlp": "examples/synthetic_nlp.ipynb",
}


def blocks(path: Path) -> list[str]:
    """Return the Python blocks of a page, or the code cells of a notebook."""
    if path.suffix == ".ipynb":
        cells = json.loads(path.read_text())["cells"]
        return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return [
        textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", path.read_text(), re.DOTALL | re.MULTILINE)
    ]


if __name__ == "__main__":
    for name, where in PAGES.items():
        found = [f"```python\n{block.strip(chr(10))}\n```\n" for block in blocks(Path(sys.argv[1]) / where)]
        head = f"Code of {where} of MosaicML Streaming 0.13.0, Apache-2.0; written by make_pages.py.\n\n"
        (Path(__file__).with_name("pages") / f"{name}.txt").write_text(head + "\n".join(found))
