"""Every Python example of README and docs/ runs, page by page, against a real local S3 server."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import LocalS3
from tests.pages import examples, indented, photo_bucket
from tests.processes import ROOT, start_script

PAGES = sorted(
    path.relative_to(ROOT) for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")] if "```python" in path.read_text()
)


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalS3]:
    with photo_bucket() as bucket:
        yield bucket


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
    script.write_text(f"if __name__ == '__main__':\n{indented(examples(page))}")
    done = start_script(script, environment=environment).finish()
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
    to_be_written = {"orc.py", "delta.py", "lit.py", "lit_shard.py", "webdav.py"}
    assert {name.rpartition("/")[2] for name in missing} == to_be_written, "all others exist"
