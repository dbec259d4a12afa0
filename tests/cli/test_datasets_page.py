"""The recipes of docs/datasets.md: each command runs, on small made data of the same layout."""

from __future__ import annotations

import gzip
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sqlstream.cli.main import main
from sqlstream.testing.servers import FaultyHttpServer
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "datasets.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL))
WRITTEN = {
    "LAION-400M": [2, 3],
    "WebVid": [2, 2],
    "C4": [3, 3],
    "The Pile": [3, 3],
    "English Wikipedia": [2, 3],
    "ImageNet": [4, 4],
    "CIFAR-10": [4, 4],
    "ADE20K": [2, 2],
    "COCO": [2, 2],
}
"""Samples of each dataset that is written of the made data: as MDS, and as tar."""


def picture(kind: str = "JPEG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), (1, 2, 3)).save(file, kind)
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def put(path: str, data: bytes) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(data)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """All datasets in the current directory, a few samples of each; of pictures and clips that URLs name, one each is dead."""
    monkeypatch.chdir(tmp_path)
    files = {f"/{n}.jpg": picture() for n in range(3)} | {f"/{n}.mp4": b"clip %d" % n for n in range(2)}
    with FaultyHttpServer(files) as server:
        laion = {
            "URL": [f"{server.url}/{n}.jpg" for n in range(4)],
            "TEXT": [f"picture {n}" for n in range(4)],
            "NSFW": ["UNLIKELY"] * 4,
            "similarity": [0.35, 0.4, 0.25, 0.5],
        }
        Path("laion400m").mkdir()
        pq.write_table(pa.table(laion), "laion400m/part-00000.parquet")
        rows = "".join(f"{n},{server.url}/{n}.mp4,PT1S,page,clip {n}\n" for n in range(3))
        put("results_10M_train.csv", f"videoid,contentUrl,duration,page_dir,name\n{rows}".encode())
        texts = [{"text": f"text {n}", "timestamp": "2019-04-25T12:57:54Z", "url": "u"} for n in range(3)]
        put("c4/c4-train.00000-of-00001.json.gz", gzip.compress(lines(texts)))
        pile = [{"text": f"text {n}", "meta": {"pile_set_name": "ArXiv" if n else "Github"}} for n in range(3)]
        Path("pile").mkdir()
        with pa.CompressedOutputStream("pile/00.jsonl.zst", "zstd") as file:
            file.write(lines(pile))
        put("enwiki/wiki_00.jsonl", lines([{"id": str(n), "title": "t", "text": "x" * 100 * n} for n in range(1, 4)]))
        for n in range(4):
            put(f"ILSVRC/train/n0144{n // 2}/n0144{n // 2}_{n}.JPEG", picture())
            put(f"cifar10/train/{('cat', 'dog')[n // 2]}/{n:04}.png", picture("PNG"))
            split = ("training", "validation")[n // 2]
            put(f"ADEChallengeData2016/images/{split}/ADE_{n:08}.jpg", picture())
            put(f"ADEChallengeData2016/annotations/{split}/ADE_{n:08}.png", picture("PNG"))
        boxes = [{"id": n, "image_id": 9, "category_id": n, "bbox": [1, 2, 3, 4]} for n in range(2)]
        images = [{"id": n, "file_name": f"{n:012}.jpg"} for n in (9, 25)]
        put("coco/annotations/instances_train2017.json", json.dumps({"images": images, "annotations": boxes}).encode())
        for image in images:
            put(f"coco/train2017/{image['file_name']}", picture())
        yield


def commands(section: str) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", section, flags=re.DOTALL)
    found = [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    assert all(words[0] == "sqlstream" for words in found)
    return [words[1:] for words in found]


def test_every_section_of_the_page_is_known() -> None:
    assert set(SECTIONS) == set(WRITTEN)


@pytest.mark.usefixtures("made")
@pytest.mark.parametrize("name", WRITTEN)
def test_the_commands_of_a_recipe_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    section = SECTIONS[name]
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        names: dict[str, Any] = {}
        exec(block, names)
        names["write_metadata"](Path("coco/annotations/instances_train2017.json"), Path("coco/train2017"))
    written = []
    for words in commands(section):
        assert main(words) == 0, capsys.readouterr().err
        if words[:2] == ["shards", "write"]:
            capsys.readouterr()
            assert main(["shards", "verify", words[3], "--json"]) == 0
            written.append(json.loads(capsys.readouterr().out)["samples"])
    assert written == WRITTEN[name]
