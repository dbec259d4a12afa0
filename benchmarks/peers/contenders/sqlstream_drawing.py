"""sqlstream, whose user's transform draws random numbers, so that generators are seeded for each sample."""

from __future__ import annotations

from benchmarks.peers import users
from benchmarks.peers.contenders import sqlstream
from benchmarks.peers.job import Job, Lookup, Stream

TITLE = "sqlstream, drawing"
FORMAT = sqlstream.FORMAT
SETTINGS = "as sqlstream, with a transform that also draws a number: three generators are seeded for each sample"


def warm_bytes(job: Job) -> Stream:
    """Return the bytes of cached photos."""
    return sqlstream.read_by_user(job, sqlstream.warm_cache(job), users.ReadAndDraw())


def random_access(job: Job) -> Lookup:
    """Return a cached photo by its row."""
    dataset = sqlstream.open_dataset(job, sqlstream.warm_cache(job), transforms=[users.ReadAndDraw()])
    return Lookup(get=lambda index: dataset[index]["image"])
