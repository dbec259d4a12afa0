"""obstore in threads, writing files: what the network floor can do without any dataset above it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import obstore
from obstore.store import HTTPStore, S3Store

from benchmarks.peers.contenders import LOOSE
from benchmarks.peers.job import Job, Stream, names

TITLE = "raw obstore"
FORMAT = LOOSE
SETTINGS = (
    "not a dataset: 32 threads that get objects and write files, in order, without account, order or batches for a trainer"
)
NUM_THREADS = 32


def open_store(job: Job) -> S3Store | HTTPStore:
    """Return a client for the server."""
    if job.scheme == "http":
        return HTTPStore.from_url(f"{job.endpoint}/bench", client_options={"allow_http": True})
    config = {"endpoint": job.endpoint, "skip_signature": True, "region": "us-east-1"}
    return S3Store("bench", config=config, client_options={"allow_http": True})  # type: ignore[arg-type]


class Objects:
    """One pass over all objects."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._store = open_store(job)
        (job.work_path / "files").mkdir()

    def _bring(self, name: str) -> memoryview:
        data = memoryview(obstore.get(self._store, f"photos/{name}").bytes())
        path = self._job.work_path / "files" / name
        with open(f"{path}.part", "wb", buffering=0) as file:
            file.write(data)
        os.rename(f"{path}.part", path)
        return data

    def __iter__(self) -> Iterator[list[memoryview]]:
        with ThreadPoolExecutor(self._job.num_threads or NUM_THREADS) as pool:
            yield from ([data] for data in pool.map(self._bring, names(self._job.num_samples)))


def cold_loose(job: Job) -> Stream:
    """Return the photos from the server."""
    return Stream(batches=Objects(job), payload=lambda batch: batch)
