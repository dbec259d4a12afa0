"""How these tests run the command line."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sqlstream.cli.main import main
from tests.processes import COMMANDS, ROOT


def run(*words: str | Path, timeout_seconds: float = 500, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run `sqlstream WORDS` in a process of its own, off a terminal."""
    return COMMANDS.run(main, *map(str, words), stdin=stdin or "", timeout_seconds=timeout_seconds)


def run_python(*words: str, timeout_seconds: float = 500, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run this interpreter in the checkout."""
    command = [sys.executable, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_seconds, env=environment, input=stdin or "", check=False
    )


def run_json(*words: str | Path) -> Any:
    """Run `sqlstream WORDS --json`, which must succeed, and return its document."""
    result = run(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def in_process(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, Any]:
    """Run `sqlstream WORDS` in this process; return its exit code, and its text or the document of `--json`."""
    code = main([str(word) for word in words])
    text = capsys.readouterr().out
    return code, json.loads(text) if "--json" in words else text


# -- shards -----------------------------------------------------------------------------------------------------------


def picture(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (2, 2), (number, 0, 0)).save(file, "JPEG")
    return file.getvalue()


def write_pictures(directory: Path) -> Path:
    """Write eight pictures, and a table of rows that name them; return the table."""
    (directory / "img").mkdir()
    for n in range(8):
        (directory / "img" / f"{n}.jpg").write_bytes(picture(n))
    lines = [f"img/{n}.jpg,a cat {n},{n}.5\n" for n in range(8)]
    table = directory / "t.csv"
    table.write_text("image,caption,score\n" + "".join(lines))
    return table


def write(capsys: pytest.CaptureFixture[str], src: Path, out: Path, *words: str) -> tuple[int, Any]:
    cache = str(src.parent / "cache") if src.suffix == ".csv" else str(out.parent / "cache")
    return shards(capsys, "write", src, out, "--cache", cache, *words)


def shards(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, Any]:
    """Run `sqlstream shards WORDS` in this process; return its exit code, and the document of `--json` or all that it wrote."""
    code = main(["shards", *map(str, words)])
    written = capsys.readouterr()
    return code, json.loads(written.out) if "--json" in words else written.out + written.err
