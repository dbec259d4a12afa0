"""One process of a storm of two versions: reads objects in threads until its standard input ends, then says what went wrong.

Runs with the package of either version, so it uses nothing but what both offer: `mixed_worker.py PACKAGE DIRECTORY ORIGIN LIMIT
NUM_OBJECTS SEED`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import traceback
from pathlib import Path

NUM_THREADS = 2
BASE_BYTES, STEP_BYTES = 500, 37


def body(number: int) -> bytes:
    """Return the bytes of object `number`: no two are alike."""
    return (b"%06d" % number) * ((BASE_BYTES + number * STEP_BYTES) // 6)


def main() -> None:
    package, directory, origin, limit, num_objects, seed = sys.argv[1:]
    sys.path.insert(0, package)
    import sqlstream
    from sqlstream.cache import Cache
    from sqlstream.errors import MigrationError

    assert Path(sqlstream.__file__ or "").is_relative_to(package)
    num_reads, refusals, troubles = list[int](), list[str](), list[str]()
    is_over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        is_over.set()

    def read(cache: Cache, rng: random.Random) -> None:
        while True:
            numbers = rng.sample(range(int(num_objects)), rng.choice((1, 1, 3)))
            urls = [f"{origin}/o/{number}.bin" for number in numbers]
            try:
                paths = cache.acquire_many(urls)
                wrong = [url for url, path, n in zip(urls, paths, numbers, strict=True) if path.read_bytes() != body(n)]
                cache.release_many(urls)
            except MigrationError as error:
                refusals.append(str(error))
                is_over.set()
            except BaseException:  # of a download under way the same refusal comes within another error
                text = traceback.format_exc()
                (refusals if "newer sqlstream" in text else troubles).append(text)
                is_over.set()
            else:
                troubles.extend(f"wrong bytes of {url}" for url in wrong)
                num_reads.append(len(urls))
            if is_over.is_set():
                return

    try:
        with Cache(directory, limit=int(limit)) as cache:
            threads = [threading.Thread(target=read, args=(cache, random.Random(f"{seed} {i}"))) for i in range(NUM_THREADS)]
            for thread in threads:
                thread.start()
            threading.Thread(target=wait_for_end, daemon=True).start()
            for thread in threads:
                thread.join()
    except MigrationError as error:
        refusals.append(str(error))
    print(json.dumps({"reads": sum(num_reads), "refused": bool(refusals), "troubles": troubles}), flush=True)
    os._exit(0)  # a thread waits for standard input


if __name__ == "__main__":
    main()
