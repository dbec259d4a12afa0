"""sqlstream with the eviction policy that knows the order to come."""

from __future__ import annotations

from benchmarks.peers.contenders import sqlstream
from benchmarks.peers.job import Job, Stream

TITLE = "sqlstream, belady"
FORMAT = sqlstream.FORMAT
SETTINGS = "as sqlstream, with eviction_policy='belady'"


def squeeze(job: Job) -> Stream:
    """Return the photos from the server, under a limit."""
    return sqlstream.squeeze_belady(job)
