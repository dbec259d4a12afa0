"""One contender in a process of its own: takes a job as its argument, prints the figures as one line of JSON.

python -m benchmarks.peers.runner '<job>' [--prepare]      # then its workload is what prepares
"""

from __future__ import annotations

import json
import sys
import time

from benchmarks.peers.contenders import MODULES, load
from benchmarks.peers.contenders.torchvision_ops import declare
from benchmarks.peers.job import Job
from benchmarks.peers.measures import MEASURES
from benchmarks.peers.processes import keep_orphans

MARK = "figures: "
"""What the line begins with: peers print things of their own."""


def main() -> None:
    """Run it."""
    job = Job.from_json(sys.argv[1])
    if job.contender in MODULES:
        declare()
    contender = load(job.contender)
    if "--prepare" in sys.argv[2:]:
        getattr(contender, job.workload)(job)
        return
    keep_orphans()
    started = time.perf_counter()
    figures = MEASURES[job.measure](job, getattr(contender, job.workload))
    figures["run_seconds"] = time.perf_counter() - started
    print(MARK + json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
