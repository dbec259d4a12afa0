"""`python -m sqlstream`: the same as the command `sqlstream`."""

from __future__ import annotations

import sys

from sqlstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
