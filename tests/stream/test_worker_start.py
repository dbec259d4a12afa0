"""What a DataLoader worker does before its first batch: it imports nothing that its trainer has not, and ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sqlstream.testing.servers import FaultyHttpServer
from tests.goldens import FIXTURES
from tests.processes import is_alive, wait_until

_SCRIPT = """
import sys
from sqlstream import StreamingDataLoader, StreamingDataset

class Read:
    def __call__(self, sample):
        with open(sample["image"], "rb") as file:
            return {"data": file.read()}

def collate(samples):
    assert [sample["data"] for sample in samples] == [b"photo"] * len(samples)
    return sorted(sys.modules)

dataset = StreamingDataset(sys.argv[1], sys.argv[2], columns_to_download=["image"], transforms=[Read()], show_progress=False,
                           shuffle_seed=1)
loader = StreamingDataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context="fork", collate_fn=collate)
batches = iter(loader)
before = set(sys.modules)
print(sorted({name for names in batches for name in names} - before))
dataset.close()
"""


_ORDERS_SCRIPT = """
import sys
from pathlib import Path
from sqlstream import Buckets, MixedDataset, Packs, StreamingDataLoader, StreamingDataset
from sqlstream.transforms.presets import create_standard_image_pipeline

def modules(samples):
    return sorted(sys.modules)

def pack(rows):
    return {"rows": len(rows["parts"])}

table, photos, tar, mds, work = sys.argv[1:]

def made(src=table, *, name="", **options):
    dst = f"{work}/{name or len(list(Path(work).iterdir()))}"
    return StreamingDataset(src, dst, shuffle_seed=1, show_progress=False, **options)

makers = {
    "a shuffle": lambda: made(),
    "weights": lambda: made(weights="w"),
    "a query": lambda: made(sql_query="SELECT * FROM dataframe WHERE w > 3"),
    "canonical nodes": lambda: made(num_canonical_nodes=2, shuffle_block_size=4),
    "lazily": lambda: made(lazy_index_chunk_size=8),
    "lazily, filtered": lambda: made(lazy_index_chunk_size=8, where="w > 3"),
    "TAR": lambda: made(tar),
    "TAR, its members": lambda: made(tar, shards="members"),
    "TAR, lazily": lambda: made(tar, lazy_index_chunk_size=1),
    "MDS": lambda: made(mds),
    "photos": lambda: made(photos, columns_to_download=["image"], transforms=create_standard_image_pipeline("image", (8, 8))),
    "buckets": lambda: made(batches=Buckets("w", global_batch_size=2)),
    "packs": lambda: made(batches=Packs("w", capacity=20, pack_fn=pack)),
    "a mixture": lambda: MixedDataset({"table": made(name="one"), "tar": made(tar, name="one")}, weights=[1, 2]),
}
for what, make in makers.items():
    dataset = make()
    size = {} if what == "buckets" else {"batch_size": 2}
    loader = StreamingDataLoader(dataset, num_workers=1, multiprocessing_context="fork", collate_fn=modules, **size)
    batches = iter(loader)
    before = set(sys.modules)
    print(what, sorted({name for names in batches for name in names} - before))
    dataset.close()
"""


def test_a_worker_imports_nothing_of_whatever_order_and_source(tmp_path: Path) -> None:
    pq.write_table(pa.table({"w": [1 + number % 7 for number in range(40)]}), tmp_path / "rows.parquet", row_group_size=8)
    work = tmp_path / "work"
    work.mkdir()
    photos = [str(tmp_path / f"photo.{extension}") for extension in ("jpg", "webp", "png")]
    for photo in photos:
        Image.new("RGB", (20, 20)).save(photo)
    pq.write_table(pa.table({"image": photos}), tmp_path / "photos.parquet")
    tables = [tmp_path / "rows.parquet", tmp_path / "photos.parquet"]
    shards = [FIXTURES / "wds" / "shard-{000000..000002}.tar", FIXTURES / "mds" / "plain"]
    command = [sys.executable, "-c", _ORDERS_SCRIPT, *map(str, [*tables, *shards, work])]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    lines = ran.stdout.splitlines()
    assert (ran.returncode, len(lines)) == (0, 14), ran.stderr
    assert [line for line in lines if not line.endswith(" []")] == []


def test_a_worker_that_downloads_and_transforms_imports_nothing(tmp_path: Path) -> None:
    with FaultyHttpServer({f"/bucket/{number}.jpg": b"photo" for number in range(4)}) as server:
        table = pa.table({"image": [f"{server.url}/bucket/{number}.jpg" for number in range(4)]})
        pq.write_table(table, tmp_path / "photos.parquet")
        command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "photos.parquet"), str(tmp_path / "cache")]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


_KILLED_SCRIPT = """
import functools, os, sys, time
import torch
from sqlstream import StreamingDataLoader, StreamingDataset

def outlast(trainer, worker):
    print(os.getpid(), flush=True)
    while True:
        time.sleep(0.01)
        try:
            os.kill(trainer, 0)
        except ProcessLookupError:
            return

if __name__ == "__main__":
    table, cache, kind, method = sys.argv[1:]
    make = {"ours": StreamingDataLoader, "torch": torch.utils.data.DataLoader}[kind]
    options = {"num_workers": 2, "multiprocessing_context": method, "worker_init_fn": functools.partial(outlast, os.getpid())}
    next(iter(make(StreamingDataset(table, cache, shuffle_seed=0), batch_size=2, **options)))
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_workers_whose_trainer_is_killed_while_they_start_end(kind: str, method: str, tmp_path: Path) -> None:
    """Torch's loop would compare with the parent that they have then, and wait for work for ever."""
    table, script = tmp_path / "rows.parquet", tmp_path / "train.py"
    pq.write_table(pa.table({"n": range(9)}), table)
    script.write_text(_KILLED_SCRIPT)
    command = [sys.executable, str(script), str(table), str(tmp_path / "cache"), kind, method]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(trainer.stdout.readline()) for _ in range(2)]
        trainer.kill()
        trainer.wait()
        try:
            assert wait_until(lambda: not any(map(is_alive, workers)), 60)
        finally:
            for worker in filter(is_alive, workers):
                os.kill(worker, signal.SIGKILL)


_MAP_SCRIPT = """
import os, sys, time
import torch
from sqlstream import StreamingDataset
from sqlstream.stream.maps import MapView

def note_pid(sample):
    return {"pid": os.getpid()}

if __name__ == "__main__":
    dataset = MapView(StreamingDataset(*sys.argv[1:], transforms=[note_pid]))
    batches = iter(torch.utils.data.DataLoader(dataset, num_workers=2, multiprocessing_context="forkserver"))
    print(*(int(next(batches)["pid"]) for _ in range(2)), flush=True)
    time.sleep(600)
"""


def test_workers_that_access_rows_end_with_a_trainer_that_is_killed(tmp_path: Path) -> None:
    """Torch's loop would look at their parent: a forkserver, which lives as long as they do."""
    table, script = tmp_path / "rows.parquet", tmp_path / "train.py"
    pq.write_table(pa.table({"n": range(9)}), table)
    script.write_text(_MAP_SCRIPT)
    with subprocess.Popen([sys.executable, script, table, tmp_path / "cache"], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        workers = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
        trainer.wait()
        try:
            assert len(set(workers)) == 2
            assert wait_until(lambda: not any(map(is_alive, workers)), 60)
        finally:
            for worker in filter(is_alive, workers):
                os.kill(worker, signal.SIGKILL)
