"""The code of MosaicML Streaming's pages runs with its imports changed, block after block, on local places and less data."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.compat.imports import with_our_imports

PAGES = sorted(Path(__file__).with_name("pages").glob("*.txt"))
MOST_SKIPPED = 0.1


class Page(NamedTuple):
    """What is done to a page before it runs."""

    places: dict[str, str]
    """Texts that are replaced: places by local ones, dots by what they stand for, numbers by smaller ones."""
    skipped: dict[str, str]
    """Blocks that do not run, by a text in them, and why."""
    check: Callable[[dict[str, Any]], None]
    """Checks what the page has made."""


def _check_readme(made: dict[str, Any]) -> None:
    assert len(made["dataset"]) == 150
    assert made["img"].size == (32, 32)
    assert made["cls"] == made["dataset"][137]["class"]
    assert len(list(made["dl"])) == 150


def _check_quick_start(made: dict[str, Any]) -> None:
    assert sorted(sample["uuid"] for sample in made["samples"]) == sorted(sample["uuid"] for sample in made["dataset"])
    assert len(list(made["dataloader_of_page"])) == 100


def _check_conversion(made: dict[str, Any]) -> None:
    from sqlstream.compat.streaming import StreamingDataset
    from sqlstream.compat.streaming.base.format.mds.encodings import _encodings, mds_decode, mds_encode

    assert mds_decode("complex128", mds_encode("complex128", 3j)) == 3j, "an encoding of the page's own"
    del _encodings["complex128"]
    assert not Path("my_dataset1").exists(), "the page cleans up"
    dataset = StreamingDataset(local=made["output_dir"], allow_unsafe_types=True, validate_hash="sha1")
    written = made["RandomClassificationDataset"]
    assert dataset.size == 200
    assert written(size=1)[0][0].shape == dataset[0]["x"].shape


def _check_nlp(made: dict[str, Any]) -> None:
    assert made["total_samples"] == 1536, "of 2000 samples, the whole batches of 512"
    assert (made["train_dataset"].size, made["val_dataset"].size) == (2000, 400)
    assert not Path("sds").exists()


CASES = {
    "readme": Page(
        {
            "range(10000)": "range(150)",
            "dataset[1337]": "dataset[137]",
            "'s3://my-bucket/path-to-dataset'": "'path-to-dataset'",
            "'/tmp/path-to-dataset'": "'local'",
            "StreamingDataset(...)": "StreamingDataset(local=local, remote=remote)",
            "num_workers=...": "num_workers=2, collate_fn=list",
            "dataset[19543]": "dataset[120]",
            "DataLoader(dataset)": "DataLoader(dataset, collate_fn=list)",
        },
        {"samples_per_epoch=1e8": "their StreamingDataset has no such parameter in this version, nor `gcs://`"},
        _check_readme,
    ),
    "quick_start": Page(
        {
            "range(1000)": "range(100)",
            "'s3://path/to/dataset'": "'dirname'",
            "'/local/cache/path'": "'cache'",
            "dataloader = DataLoader(dataset, batch_size=1)": (
                "dataloader_of_page = DataLoader(dataset, batch_size=1, collate_fn=list)\nlocal, remote = local_dir, remote_dir"
            ),
        },
        {},
        _check_quick_start,
    ),
    "dataset_conversion": Page(
        {"size=10000": "size=200"},
        {},
        _check_conversion,
    ),
    "synthetic_nlp": Page(
        {"10_000 #": "2_000 #", "2000    #": "400 #", "num_workers=8": "num_workers=2"},
        {"%pip": "installs packages"},
        _check_nlp,
    ),
}


def blocks_of(page: Path) -> list[str]:
    """The blocks of a page, as their authors wrote them."""
    return re.findall(r"^```python\n(.*?)\n```$", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_after_its_imports_are_changed(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    case, made = CASES[page.stem], dict[str, Any]()
    np.random.seed(0)
    used = set()
    for block in blocks_of(page):
        if any(text in block for text in case.skipped):
            continue
        source = with_our_imports(block)
        for text, local in case.places.items():
            used |= {text} if text in source else set()
            source = source.replace(text, local)
        exec(compile(source, page.name, "exec"), made)
    assert used == set(case.places)
    case.check(made)


def test_few_blocks_are_skipped_and_each_is_there() -> None:
    found = {page.stem: blocks_of(page) for page in PAGES}
    skipped = {name: [block for block in found[name] if any(text in block for text in CASES[name].skipped)] for name in found}
    assert {name: len(blocks) for name, blocks in skipped.items()} == {name: len(case.skipped) for name, case in CASES.items()}
    assert sum(map(len, skipped.values())) <= MOST_SKIPPED * sum(map(len, found.values()))
