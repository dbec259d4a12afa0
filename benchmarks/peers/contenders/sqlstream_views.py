"""sqlstream, whose workers' bytes come as views of shared memory."""

from __future__ import annotations

from benchmarks.peers.contenders import sqlstream
from benchmarks.peers.job import Job, Stream
from sqlstream.transforms.presets import LoadFromDiskTransform

TITLE = "sqlstream, views"
FORMAT = sqlstream.FORMAT
SETTINGS = "as sqlstream, with pack_bytes='views': no copy in the trainer, who must ask for it, and gets no `bytes`"


def warm_bytes(job: Job) -> Stream:
    """Return the bytes of cached photos."""
    dataset = sqlstream.open_dataset(job, sqlstream.warm_cache(job), transforms=[LoadFromDiskTransform(["image"])])
    return sqlstream.load(dataset, job, pack_bytes="views")
