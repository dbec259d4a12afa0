"""Code of MosaicML Streaming's users after its imports are changed."""

from __future__ import annotations

import re


def with_our_imports(source: str) -> str:
    """Code whose imports are of the drop-in."""
    source = re.sub(r"^from streaming(?=[ .])", "from sqlstream.compat.streaming", source, flags=re.MULTILINE)
    return re.sub(r"^import streaming$", "import sqlstream.compat.streaming as streaming", source, flags=re.MULTILINE)
