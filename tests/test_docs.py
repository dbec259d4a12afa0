"""Every Python example of README and docs/ runs, page by page, against a real local S3 server."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sqlstream.testing.servers import LocalS3

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "```python" in path.read_text()
)
NUM_PHOTOS = 64


def examples(page: Path) -> str:
    """All Python blocks of a page, as one script."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalS3]:
    """`s3://my-bucket/photos`: an index with image, caption and score, and the images."""
    rng = np.random.default_rng(0)
    with LocalS3() as s3:
        for number in range(NUM_PHOTOS):
            image = io.BytesIO()
            Image.fromarray(rng.integers(0, 255, (48, 64, 3), dtype=np.uint8)).save(image, "JPEG")
            s3.put(f"my-bucket/photos/images/{number:04d}.jpg", image.getvalue())
        table = pa.table(
            {
                "index": [f"photo-{number}" for number in range(NUM_PHOTOS)],
                "image": [f"images/{number:04d}.jpg" for number in range(NUM_PHOTOS)],
                "caption": [f"photo number {number}" for number in range(NUM_PHOTOS)],
                "score": [number / NUM_PHOTOS for number in range(NUM_PHOTOS)],
            }
        )
        buffer = io.BytesIO()
        pq.write_table(table, buffer)
        s3.put("my-bucket/photos/index.parquet", buffer.getvalue())
        yield s3


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_examples_of_a_page_run(page: Path, bucket: LocalS3, tmp_path: Path) -> None:
    options = bucket.storage_options
    environment = {
        **os.environ,
        "AWS_ENDPOINT_URL": bucket.endpoint_url,
        "AWS_ACCESS_KEY_ID": options["key"],
        "AWS_SECRET_ACCESS_KEY": options["secret"],
        "AWS_REGION": "us-east-1",
    }
    script = tmp_path / "page.py"
    script.write_text(f"if __name__ == '__main__':\n{_indented(examples(page))}")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ERROR" not in done.stderr, done.stderr


def test_every_link_between_the_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_file_that_the_page_of_the_architecture_names_is_there() -> None:
    """Paths are below the package, or begin with another folder; a bare name is that of some file."""
    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/.]+\.(?:py|md|toml|txt))`", page))
    files = {
        str(path.relative_to(ROOT))
        for folder in ("sqlstream", "tests", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*.*")
    }
    files |= {path.name for path in ROOT.glob("*.*")}
    missing = {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in files)}
    assert {name.rpartition("/")[2] for name in missing} == {"orc.py", "delta.py", "tar.py", "webdav.py"}, "all others exist"


def _indented(text: str) -> str:
    return "".join(f"    {line}\n" if line.strip() else "\n" for line in text.splitlines())
