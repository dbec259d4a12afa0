"""Every example of docs/frameworks.md runs with the framework that it is for."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.testing.servers import LocalS3
from tests.pages import indented, photo_bucket
from tests.processes import ROOT

EXAMPLES = dict(re.findall(r"^```python (\w+)\n(.*?)^```", (ROOT / "docs/frameworks.md").read_text(), re.DOTALL | re.MULTILINE))


@pytest.fixture(scope="module")
def bucket() -> Iterator[LocalS3]:
    with photo_bucket() as bucket:
        yield bucket


@pytest.mark.parametrize("framework", EXAMPLES)
def test_the_example_of_a_framework_runs(framework: str, bucket: LocalS3, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    options = bucket.storage_options
    environment = os.environ | {
        "AWS_ENDPOINT_URL": bucket.endpoint_url,
        "AWS_ACCESS_KEY_ID": str(options["key"]),
        "AWS_SECRET_ACCESS_KEY": str(options["secret"]),
        "AWS_REGION": "us-east-1",
        "ACCELERATE_USE_CPU": "true",
    }
    script = tmp_path / "example.py"
    script.write_text(f"if __name__ == '__main__':\n{indented(EXAMPLES[framework])}")
    done = subprocess.run(
        [sys.executable, script.name], cwd=tmp_path, env=environment, text=True, capture_output=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "False" not in done.stdout, done.stdout
