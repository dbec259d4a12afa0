"""sqlstream with the decoder that its peers have."""

from __future__ import annotations

from benchmarks.peers.contenders import sqlstream
from benchmarks.peers.job import Job, Stream

TITLE = "sqlstream, Pillow"
FORMAT = sqlstream.FORMAT
SETTINGS = (
    "as sqlstream, tensors by the same Pillow function as all peers; seed_transforms=False: it draws nothing, and no peer "
    "seeds generators for each sample"
)


def warm_tensors(job: Job) -> Stream:
    """Return decoded photos."""
    return sqlstream.warm_same_decoder(job)
