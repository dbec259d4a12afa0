"""Every script of examples/ runs on the small data that it makes."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXPECTED = {
    "image": "torch.Size([4, 3, 64, 64]) torch.uint8",
    "image_to_image": "torch.Size([3, 3, 64, 64]) torch.float32",
    "video": "torch.Size([3, 8, 3, 64, 64]) torch.uint8",
    "video_to_video": "torch.Size([2, 4, 3, 64, 64]) from",
    "audio": "torch.Size([4, 1, 16000])",
    "audio_video_text": "torch.Size([2, 12, 3, 64, 64]) torch.Size([2, 1, 16000]) torch.Size([2, 8, 16])",
    "caption_folder": "torch.Size([3, 3, 64, 64])",
    "multi_stream": "photos, torch.Size([2, 3, 64, 64])",
    "latents": "torch.Size([3, 8, 4, 8, 8])",
    "tar_shards": "torch.Size([3, 3, 240, 320])",
    "mds_shards": "torch.Size([4, 8])",
    "wids_index": "3 captions: ",
    "compressed_tars": "4 files: (320, 240) .jpg",
    "json_lines_shards": "4 texts: ",
    "records": "torch.Size([4, 8])",
    "zip_archive": "torch.Size([3, 3, 64, 64])",
    "chained_urls": "torch.Size([3, 3, 64, 64])",
    "mixing": "2 x 1, resumed",
    "aspect_ratio": ": (4, 3, ",
    "packing": "4 x 512, ",
}


def test_every_example_is_listed() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} - {"small_data"} == {*EXPECTED}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("name", EXPECTED)
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert capsys.readouterr().out.count(EXPECTED[name]) >= 2, "two batches at least"
