"""The code of their own documentation runs with its imports changed, on small data of a local server."""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sqlstream.testing.servers import FaultyHttpServer
from tests.processes import start_script
from tests.stream.shards import tar_of

PAGES = dict(
    re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", (Path(__file__).parent / "pages.md").read_text(), re.DOTALL | re.MULTILINE)
)
REPLACED = {
    r"import webdataset as wds": "import sqlstream.compat.webdataset as wds",
    r"import wids$": "from sqlstream.compat import wids",
    r"https://storage.googleapis.com/webdataset": "URL",
    r"^(\s*)[%!].*$": r"\1pass  # a line for the shell, or for the notebook",
    r"\{000000\.\.001281\}": "{000000..000003}",  # 1282 shards
    r"\{000000\.\.000009\}": "{000000..000003}",
    r"dataset\[1900\]": "dataset[19]",
    r"1282 \* 100 // 64": "3",  # batches of an epoch
    r"batched\(64\)": "batched(8)",
    r"\b(224|256)\b": "32",  # pixels
    r"num_workers=4": "num_workers=2",
    r"enumerate_report\(trainloader, 5\)": "enumerate_report(trainloader, 0)",
    r"epochs = 3": "epochs = 2",
    r"chunksize=1000": "chunksize=10",
}
"""What a page is changed in, and nothing else. No block is left out."""
STAND_INS = {
    "matplotlib/pyplot.py": "def imshow(image):\n    assert image is not None\n\n\nplot = imshow\n",
    "torchvision/__init__.py": "",
    "torchvision/transforms.py": """
import numpy as np
import torch


class Compose:
    def __init__(self, functions):
        self.functions = functions

    def __call__(self, image):
        for function in self.functions:
            image = function(image)
        return image


class Resize:
    def __init__(self, size):
        self.size = size if isinstance(size, tuple) else (size, size)

    def __call__(self, image):
        return image.resize(self.size)


RandomResizedCrop = CenterCrop = Resize


class RandomHorizontalFlip:
    def __call__(self, image):
        return image


class ToTensor:
    def __call__(self, image):
        return torch.from_numpy(np.array(image, np.float32) / 255).permute(2, 0, 1)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, image):
        return (image - self.mean) / self.std
""",
    "torchvision/models.py": """
from torch import nn


def resnet50(pretrained):
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))
""",
}
"""Packages that the pages use and that are not ours."""
CHECKS = {
    "webdataset 1.0.2, README.md": """
assert batch[0].shape == (16, 3, 32, 32) and batch[1].shape == (16,)
assert sorted(label for _, labels in dataset for label in labels.tolist()) == list(range(32))
assert sorted(json["annotations"][0]["category_id"] for _, json in pil_dataset) == list(range(32))
""",
    "wids 0.1.11, README.md": """
assert (sample["__index__"], sample[".txt"], sample[".cls"], sample[".jpg"].size) == (19, "a photo of 19", 19 % 10, (12, 8))
""",
    "webdataset e0953f9, docs/column-store.md": """
import itertools
taken = list(itertools.islice(trainset, 8))
assert {sample["__key__"] for sample in taken} <= {f"{number:04}" for number in range(32)}
assert [sample["cls"] for sample in taken] == [b"%d" % (int(sample["__key__"]) % 10) for sample in taken]
""",
    "webdataset e0953f9, examples/train-resnet50-wds.ipynb": """
assert steps == 24, "three batches of eight"
assert "→ the loader makes batches" in trainloader.explain() and "·" not in trainloader.explain()
""",
    "webdataset a52927f^, examples/train-resnet50-wids.ipynb": """
assert (len(trainset), len(valset), steps) == (32, 16, 64)
trainsampler.set_epoch(1)
assert sorted(trainsampler) == list(range(32)) != list(trainsampler)
assert images.shape == (32, 3, 32, 32) and sorted(classes.tolist()) == sorted(number % 10 for number in range(32))
""",
}


def picture(extension: str) -> bytes:
    data = io.BytesIO()
    Image.fromarray(np.full((8, 12, 3), 7, np.uint8)).save(data, extension)
    return data.getvalue()


@pytest.fixture(scope="module")
def server() -> Iterator[FaultyHttpServer]:
    png, jpeg = picture("PNG"), picture("JPEG")
    shards = []
    with FaultyHttpServer() as server:
        for shard in range(4):
            numbers = range(shard * 8, shard * 8 + 8)
            layouts = [
                (f"{number:04}", {"png": png, "json": json.dumps({"annotations": [{"category_id": number}]}).encode()})
                for number in numbers
            ]
            photos = [
                (f"{number:04}", {"jpg": jpeg, "cls": b"%d" % (number % 10), "txt": b"a photo of %d" % number})
                for number in numbers
            ]
            server.objects[f"/testdata/publaynet-train-{shard:06}.tar"] = tar_of(layouts)
            server.objects[f"/fake-imagenet/imagenet-train-{shard:06}.tar"] = tar_of(photos)
            shards.append({"url": f"imagenet-train-{shard:06}.tar", "nsamples": 8})
        for name, some in {"train": shards, "val": shards[:2]}.items():
            server.objects[f"/fake-imagenet/imagenet-{name}.json"] = json.dumps({"wids_version": 1, "shardlist": some}).encode()
        yield server


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_of_theirs_runs_with_its_imports_changed(
    page: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE))
    for written, here in REPLACED.items():
        code = re.sub(written, here.replace("URL", server.url), code, flags=re.MULTILINE)
    for name, stand_in in STAND_INS.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(stand_in)
    script = tmp_path / "page.py"
    script.write_text(code + CHECKS[page])
    done = start_script(script, environment={**os.environ, "SQLSTREAM_CACHE": str(tmp_path / "cache")}).finish()
    assert done.returncode == 0, done.stdout + done.stderr
