"""Code of the peers' users after its imports are changed, and nothing else."""

from __future__ import annotations

import re

CHANGES = {
    r"^from streaming(?=[ .])": "from sqlstream.compat.streaming",
    r"^import streaming$": "import sqlstream.compat.streaming as streaming",
    r"^import webdataset as wds$": "import sqlstream.compat.webdataset as wds",
    r"^from wids(?= )": "from sqlstream.compat.wids",
    r"^import wids$": "from sqlstream.compat import wids",
}
"""Lines of MosaicML Streaming, WebDataset and wids, and what stands in their place."""


def with_our_imports(source: str) -> str:
    """Code whose imports are of the drop-ins."""
    for theirs, ours in CHANGES.items():
        source = re.sub(theirs, ours, source, flags=re.MULTILINE)
    return source
