"""The drop-in for Paddle, with its own DataLoader and ranks of its launcher."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.compat.webdataset.kit import NUM_ROWS, NUM_SAMPLES, numbered
from tests.processes import start_script

STACKING = """
import io, json, sys
import numpy as np
import paddle
from sqlstream.compat import paddle as pp

folder, cache, out = sys.argv[1:]
with pp.ShardWriter(f"{folder}/w-%d.tar", verbose=0) as writer:
    for number in range(4):
        writer.write({"__key__": f"{number}", "npy": np.full(3, number), "x.pth": {"w": paddle.to_tensor([number])}})
saved = pp.handle_extension("pth", lambda data: paddle.load(io.BytesIO(data)))
dataset = pp.WebDataset(f"{folder}/w-0.tar", shardshuffle=False, cache_dir=cache).decode(saved)
dataset = dataset.map(lambda sample: (paddle.to_tensor(sample["npy"]), sample["x.pth"]["w"], sample["__key__"])).batched(4)
[(rows, weights, keys)] = list(dataset)
assert isinstance(rows, paddle.Tensor) and isinstance(weights, paddle.Tensor), (rows, weights)
json.dump([rows.tolist(), weights.tolist(), list(keys)], open(out, "w"))
"""
PROGRAM = """
import json, sys
import numpy as np
import paddle.io
from sqlstream.compat import paddle as pp

src, cache, out = sys.argv[1:]

def number_of(sample):
    return np.int64(sample["cls"])

dataset = pp.WebDataset(src, shardshuffle=4, cache_dir=cache).shuffle(100).decode().map(number_of)
assert isinstance(dataset, paddle.io.IterableDataset)
loader = paddle.io.DataLoader(dataset, batch_size=4, num_workers=2)
taken = [[int(number) for batch in loader for number in np.asarray(batch).ravel()] for _ in range(2)]
shards = [{"url": f"{src.rpartition('/')[0]}/s-{shard}.tar", "nsamples": 8} for shard in range(4)]
photos = pp.ShardListDataset(shards, cache_dir=cache, transformations=lambda sample: np.int64(sample[".cls"].read()))
assert isinstance(photos, paddle.io.Dataset)
sampler = pp.DistributedChunkedSampler(photos, chunksize=8)
numbers = [int(photos[number]) for number in sampler]
json.dump({"taken": taken, "numbers": numbers}, open(out, "w"))
"""


def test_tensors_of_paddle_are_stacked_and_saved_as_paddle_saves_them(tmp_path: Path) -> None:
    script, out = tmp_path / "program.py", tmp_path / "out.json"
    script.write_text(STACKING)
    done = start_script(script, str(tmp_path), str(tmp_path / "cache"), str(out)).finish()
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text()) == [[[n, n, n] for n in range(4)], [[n] for n in range(4)], [str(n) for n in range(4)]]


def taken_by_ranks(tmp_path: Path) -> Iterator[dict[str, Any]]:
    src, script = numbered(tmp_path / "s"), tmp_path / "program.py"
    script.write_text(f"if __name__ == '__main__':\n    exec({PROGRAM!r}, globals())\n")
    for rank in range(2):
        out = tmp_path / f"{rank}.json"
        environment = {**os.environ, "PADDLE_TRAINER_ID": str(rank), "PADDLE_TRAINERS_NUM": "2"}
        done = start_script(script, src, str(tmp_path / "cache"), str(out), environment=environment).finish()
        assert done.returncode == 0, done.stdout + done.stderr
        yield json.loads(out.read_text())


def test_each_sample_comes_once_with_two_workers_on_each_of_two_ranks(tmp_path: Path) -> None:
    ranks = list(taken_by_ranks(tmp_path))
    for epoch in range(2):
        taken = [number for rank in ranks for number in rank["taken"][epoch]]
        assert sorted(taken) == list(range(NUM_ROWS))
    assert ranks[0]["taken"][0] != ranks[0]["taken"][1]
    assert [len(rank["numbers"]) for rank in ranks] == [2 * NUM_SAMPLES] * 2
    assert sorted(ranks[0]["numbers"] + ranks[1]["numbers"]) == list(range(NUM_ROWS))
