"""Two ranks of a job as processes with gloo, on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_ranks(program: str, *arguments: str, num_ranks: int = 2) -> list[Any]:
    """Return what each rank of `python -c program` prints as JSON in its last line; with its error, as text, if it fails."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(num_ranks):
        variables = {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", program, *arguments],
                env=os.environ | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
        )
    answers: list[Any] = []
    for process in ranks:
        output, errors = process.communicate(timeout=300)
        answers.append(errors if process.returncode else json.loads(output.splitlines()[-1]) | {"stderr": errors})
    return answers
