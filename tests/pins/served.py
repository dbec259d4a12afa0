"""A source under one URL in every run: its build key, and with it states and index files, hold from run to run.

`http://pins.invalid/…` is read through a proxy, which is a server of ours: no port is part of any key.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from sqlstream.testing.servers import FaultyHttpServer

ORIGIN = "http://pins.invalid"
CSV, PARQUET = f"{ORIGIN}/rows.csv", f"{ORIGIN}/rows.parquet"
NUM_ROWS = 50
NUM_OBJECTS, OBJECT_BYTES = 12, 5000
FOLDER = Path(__file__).parent
_PROXIES = ("http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY", "all_proxy", "ALL_PROXY")


def body(number: int) -> bytes:
    """Return the bytes of object `number`."""
    return bytes([number]) * (OBJECT_BYTES + number)


def url_of(number: int) -> str:
    """Return the URL of object `number`."""
    return f"{ORIGIN}/objects/{number}.bin"


def objects() -> dict[str, bytes]:
    """Return all that the server has; the Parquet file is kept, for each version of pyarrow writes another one."""
    rows = "".join(f"row-{i},{i / NUM_ROWS},objects/{i % NUM_OBJECTS}.bin\n" for i in range(NUM_ROWS))
    found = {"/rows.csv": f"index,score,object\n{rows}".encode()}
    found |= {f"/objects/{number}.bin": body(number) for number in range(NUM_OBJECTS)}
    if (FOLDER / "rows.parquet").exists():
        found["/rows.parquet"] = (FOLDER / "rows.parquet").read_bytes()
    return found


@contextlib.contextmanager
def served() -> Iterator[FaultyHttpServer]:
    """Serve them; helper processes that start within reach them under their URLs."""
    before = {name: os.environ.pop(name, None) for name in _PROXIES}
    try:
        with FaultyHttpServer(objects()) as server:
            os.environ["http_proxy"] = server.url
            yield server
    finally:
        os.environ.pop("http_proxy", None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
