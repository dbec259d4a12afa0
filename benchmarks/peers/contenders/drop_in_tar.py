"""The script of `webdataset.py` with its imports changed, and nothing else: the drop-in of WebDataset."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.peers import contenders
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.job import Job, Stream
from tests.compat.imports import with_our_imports

exec(compile(with_our_imports(Path(__file__).with_name("webdataset.py").read_text()), __file__, "exec"))

TITLE = "WebDataset's script, drop-in"
FORMAT = SHARDS
SETTINGS = (
    "the code that runs WebDataset, its imports changed to sqlstream.compat.webdataset, nothing else; where it names no cache "
    "the user's own, which is empty at the start"
)
_of_script = globals()["_stream"]


def _stream(job: Job, *arguments: Any, **options: Any) -> Stream:
    """Give each run a cache of its own: what else is the user's environment."""
    os.environ["SQLSTREAM_CACHE"] = str(job.work_path / "cache")
    stream: Stream = _of_script(job, *arguments, **options)
    return stream


def prepare(job: Job) -> None:
    """Have WebDataset itself write its shards."""
    contenders.load("webdataset").prepare(job)


def prepare_shuffled(job: Job) -> None:
    """Have WebDataset itself write small archives."""
    contenders.load("webdataset").prepare_shuffled(job)
