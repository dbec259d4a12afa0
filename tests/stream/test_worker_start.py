"""What a DataLoader worker does before its first batch: it imports nothing that its trainer has not."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from sqlstream.testing.servers import FaultyHttpServer

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


def test_a_worker_that_downloads_and_transforms_imports_nothing(tmp_path: Path) -> None:
    with FaultyHttpServer({f"/bucket/{number}.jpg": b"photo" for number in range(4)}) as server:
        table = pa.table({"image": [f"{server.url}/bucket/{number}.jpg" for number in range(4)]})
        pq.write_table(table, tmp_path / "photos.parquet")
        command = [sys.executable, "-c", _SCRIPT, str(tmp_path / "photos.parquet"), str(tmp_path / "cache")]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr
