"""The script of `mosaicml.py` with its imports changed, and nothing else: the drop-in of MosaicML Streaming."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peers import contenders
from benchmarks.peers.contenders import SHARDS
from benchmarks.peers.job import Job
from tests.compat.imports import with_our_imports

exec(compile(with_our_imports(Path(__file__).with_name("mosaicml.py").read_text()), __file__, "exec"))

TITLE = "MosaicML's script, drop-in"
FORMAT = SHARDS
SETTINGS = "the code that runs MosaicML, its imports changed to sqlstream.compat.streaming, nothing else; local shards in place"


def prepare(job: Job) -> None:
    """Have MosaicML itself write its shards."""
    contenders.load("mosaicml").prepare(job)


def prepare_shuffled(job: Job) -> None:
    """Have MosaicML itself write small shards."""
    contenders.load("mosaicml").prepare_shuffled(job)
