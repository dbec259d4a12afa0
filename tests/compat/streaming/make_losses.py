"""Writes scripts/losses.json: the losses of the training scripts beside it, with MosaicML Streaming itself.

PEER/bin/python tests/compat/streaming/make_losses.py        PEER as make_signatures.py says, with pillow
"""

from __future__ import annotations

import contextlib
import io
import json
import runpy
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_signatures import STOOD_FOR, StandIns  # type: ignore[import-not-found]  # beside this file

SCRIPTS = Path(__file__).with_name("scripts")

if __name__ == "__main__":
    sys.meta_path.insert(0, StandIns(STOOD_FOR - {"PIL"}))
    losses = {}
    for name in ("images", "texts"):
        with tempfile.TemporaryDirectory() as place, contextlib.redirect_stdout(io.StringIO()) as printed:
            sys.argv = [name, place]
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        losses[name] = {kind: [round(loss, 6) for loss in some] for kind, some in json.loads(printed.getvalue()).items()}
    (SCRIPTS / "losses.json").write_text(json.dumps(losses) + "\n")
