"""The dataset classes of MosaicML's documentation, the writers and `merge_index`."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.compat.streaming import CSVWriter, JSONWriter, MDSWriter, StreamingDataset, TSVWriter, XSVWriter
from sqlstream.compat.streaming.base.util import merge_index
from sqlstream.compat.streaming.multimodal import StreamingInsideWebVid, StreamingOutsideGIWebVid
from sqlstream.compat.streaming.text import StreamingC4, StreamingEnWiki, StreamingPile
from sqlstream.compat.streaming.vision import StreamingADE20K, StreamingCIFAR10, StreamingCOCO
from sqlstream.errors import ConfigError, MissingDependencyError, OutputExistsError, SourceError
from sqlstream.testing.servers import LocalS3
from tests.compat.streaming.kit import MDS, golden
from tests.goldens import as_json


def written(directory: Path, columns: dict[str, str], samples: list[dict[str, Any]]) -> str:
    with MDSWriter(out=str(directory), columns=columns) as writer:
        for sample in samples:
            writer.write(sample)
    return str(directory)


def picture(value: int) -> Image.Image:
    return Image.fromarray(np.full((2, 3, 3), value, np.uint8))  # [h, w, c]


def test_pictures_with_a_label_become_tensors_or_what_transforms_make(tmp_path: Path) -> None:
    local = written(tmp_path / "cifar", {"x": "png", "y": "int"}, [{"x": picture(51 * n), "y": n} for n in range(6)])
    items: list[Any] = list(StreamingCIFAR10(local=local, batch_size=2))
    assert [label for _, label in items] == list(range(6))
    assert [tuple(tensor.shape) for tensor, _ in items] == [(3, 2, 3)] * 6
    assert torch.equal(items[1][0], torch.full((3, 2, 3), 0.2))  # [c, h, w]
    made = StreamingCIFAR10(local=local, batch_size=2, transform=lambda x: x.size, target_transform=str)
    assert made[2] == ((3, 2), "2")
    both = StreamingCIFAR10(local=local, batch_size=2, transforms=lambda x, y: (y, x.mode))
    assert next(iter(both)) == (0, "RGB")
    with pytest.raises(ConfigError, match="leave transform="):
        StreamingCIFAR10(local=local, batch_size=2, transforms=len, transform=len)


def test_segments_and_boxes(tmp_path: Path) -> None:
    segments = written(tmp_path / "ade", {"x": "png", "y": "png"}, [{"x": picture(1), "y": picture(2)}])
    made = StreamingADE20K(local=segments, joint_transform=lambda pair: pair[::-1], transform=lambda x: x.getpixel((0, 0)))
    assert made[0][0] == (2, 2, 2)
    columns = {"img": "jpeg", "img_id": "int", "htot": "int", "wtot": "int", "bbox_sizes": "ndarray", "bbox_labels": "ndarray"}
    numbers = np.ones((1, 4), np.float32)  # [n, 4]
    sample = {"img": picture(9), "img_id": 5, "htot": 2, "wtot": 3, "bbox_sizes": numbers, "bbox_labels": numbers[0]}
    coco = StreamingCOCO(
        local=written(tmp_path / "coco", columns, [sample]), transform=lambda x, size, b, y: (x.mode, size, b, y)
    )
    found = coco[0]
    assert found[:3] == ("RGB", 5, (2, 3))
    assert found[3].tolist() == [[1.0] * 4]


class Tokenizer:
    """Stands in for one of Hugging Face."""

    pad_token, eos_token = None, "<end>"

    def __call__(self, text: str, *, truncation: bool, padding: str, max_length: int) -> dict[str, Any]:
        assert (truncation, padding) == (True, "max_length")
        return {"input_ids": [len(word) for word in text.split()][:max_length]}


def test_texts_become_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = written(tmp_path / "c4", {"text": "str"}, [{"text": "one three fourteen"}])
    options = {"local": local, "tokenizer_name": "any", "max_seq_len": 2, "group_method": "truncate"}
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="transformers"):
        StreamingC4(**options)
    module: Any = ModuleType("transformers")
    module.AutoTokenizer = type("AutoTokenizer", (), {"from_pretrained": staticmethod(lambda name: Tokenizer())})
    monkeypatch.setitem(sys.modules, "transformers", module)
    for kind in (StreamingC4, StreamingPile):
        dataset = kind(**options)
        assert list(dataset) == [{"input_ids": [3, 5]}]
        assert dataset.tokenizer.pad_token == "<end>"
    with pytest.raises(ConfigError, match="group_method='concat'"):
        StreamingC4(**options | {"group_method": "concat"})


def test_wikipedia_has_labels_for_masked_tokens(tmp_path: Path) -> None:
    names = ("input_ids", "input_mask", "segment_ids", "masked_lm_positions", "masked_lm_ids", "next_sentence_labels")
    values = ([7, 8, 9], [1, 1, 0], [0, 0, 1], [1], [4], [1])
    stored = {name: np.array(value, np.int32).tobytes() for name, value in zip(names, values, strict=True)}
    stored["masked_lm_weights"] = np.ones(1, np.float32).tobytes()
    (found,) = StreamingEnWiki(local=written(tmp_path / "wiki", dict.fromkeys(stored, "bytes"), [stored]))
    assert {name: value.tolist() for name, value in found.items()} == {
        "input_ids": [7, 8, 9],
        "token_type_ids": [0, 0, 1],
        "attention_mask": [1, 1, 0],
        "labels": [-100, 4, -100],
    }


def test_videos_within_samples_and_beside_them(tmp_path: Path) -> None:
    inside = written(tmp_path / "inside", {"content": "bytes"}, [{"content": b"video"}])
    assert StreamingInsideWebVid(local=inside)[0] == {"content": b"video"}
    outside = written(tmp_path / "outside", {"content_path": "str"}, [{"content_path": "a/1.mp4"}])
    (tmp_path / "there/a").mkdir(parents=True)
    (tmp_path / "there/a/1.mp4").write_bytes(b"1")
    found = StreamingOutsideGIWebVid(local=outside, extra_local=str(tmp_path / "here"), extra_remote=str(tmp_path / "there"))
    assert list(found) == [{"content_path": "a/1.mp4", "content": b"1"}]
    with pytest.raises(ConfigError, match="is a URL"):
        StreamingOutsideGIWebVid(local=outside, extra_remote="s3://bucket/videos")


@pytest.mark.parametrize(
    ("name", "writer"), [("csv", CSVWriter), ("tsv", TSVWriter), ("jsonl", JSONWriter), ("xsv", XSVWriter)]
)
def test_writers_write_the_bytes_of_theirs(name: str, writer: Any, tmp_path: Path) -> None:
    index = json.loads((MDS / name / "index.json").read_text())
    first = index["shards"][0]
    columns = first.get("columns") or dict(zip(first["column_names"], first["column_encodings"], strict=True))
    options = {"separator": first["separator"]} if "separator" in first else {}
    options |= {"size_limit": first["size_limit"], "hashes": first["hashes"], "newline": first["newline"]}
    samples = [{key: value for key, value in sample.items() if key in columns} for sample in golden(name)]
    with writer(out=str(tmp_path / name), columns=columns, **options) as out:
        for sample in samples:
            out.write(sample)
    for path in (MDS / name).iterdir():
        assert (tmp_path / name / path.name).read_bytes() == path.read_bytes(), path.name


def test_writers_take_their_parameters_and_no_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with MDSWriter(out=str(out), columns={"a": "pkl"}, progress_bar=False, max_workers=2, retry=3) as writer:
        writer.write({"a": {1, 2}})
    assert StreamingDataset(local=str(out), allow_unsafe_types=True)[0] == {"a": {1, 2}}
    with pytest.raises(OutputExistsError, match="out"):
        MDSWriter(out=str(out), columns={"a": "int"})
    with MDSWriter(out=str(out), columns={"a": "int"}, exist_ok=True) as writer:
        writer.write({"a": 5})
    assert StreamingDataset(local=str(out))[0] == {"a": 5}
    with pytest.raises(ConfigError, match="workers is no parameter of a writer"):
        MDSWriter(out=str(tmp_path / "other"), columns={"a": "int"}, workers=1)
    with pytest.raises(ConfigError, match="hashes='sha1': give a sorted list of names"):
        MDSWriter(out=str(tmp_path / "other"), columns={"a": "int"}, hashes="sha1")


@pytest.mark.parametrize(("limit", "num_shards"), [("1kb", 4), ("1024b", 4), (1024, 4), ("0.5kb", 10), (None, 1), (0, 1)])
def test_a_limit_is_said_as_theirs_is(limit: Any, num_shards: int, tmp_path: Path) -> None:
    with MDSWriter(
        out=str(tmp_path), columns={"b": "bytes"}, size_limit=limit, hashes=[], compression="", max_workers=None
    ) as writer:
        for number in range(30):
            writer.write({"b": bytes([number]) * 90})
    dataset = StreamingDataset(local=str(tmp_path), batch_size=1)
    assert (dataset.size, dataset.num_shards) == (30, num_shards)


def test_indexes_of_parts_are_merged_by_list_and_by_directory(tmp_path: Path) -> None:
    for part in range(3):
        written(tmp_path / f"parts/{part}", {"n": "int"}, [{"n": 10 * part + number} for number in range(3)])
    parts = [str(tmp_path / f"parts/{part}/index.json") for part in (2, 0)]
    merge_index(parts, str(tmp_path / "parts"))
    assert [sample["n"] for sample in StreamingDataset(local=str(tmp_path / "parts"))] == [20, 21, 22, 0, 1, 2]
    merge_index(str(tmp_path / "parts"), keep_local=True)
    assert [sample["n"] for sample in StreamingDataset(local=str(tmp_path / "parts"))] == [0, 1, 2, 10, 11, 12, 20, 21, 22]
    with pytest.raises(SourceError, match="is not there"):
        merge_index([str(tmp_path / "gone/index.json")], str(tmp_path / "parts"))
    with pytest.raises(ConfigError, match="no part to merge"):
        merge_index(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="merge_index takes out"):
        merge_index(str(tmp_path), other=1)


def test_a_golden_index_that_was_merged_by_theirs_is_the_same(tmp_path: Path) -> None:
    shutil.copytree(MDS / "merged", tmp_path / "merged")
    theirs = json.loads((tmp_path / "merged/index.json").read_text())
    (tmp_path / "merged/index.json").unlink()
    merge_index(str(tmp_path / "merged"))
    assert json.loads((tmp_path / "merged/index.json").read_text()) == theirs


def test_parts_in_a_store_are_merged_and_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalS3() as s3:
        monkeypatch.setenv("S3_ENDPOINT_URL", s3.endpoint_url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.storage_options["key"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.storage_options["secret"])
        s3.put("box/empty", b"")
        for part in range(2):
            with MDSWriter(out=f"s3://box/data/{part}", columns={"n": "int"}, hashes=["sha1"]) as writer:
                writer.write({"n": part})
        merge_index("s3://box/data")
        with StreamingDataset(remote="s3://box/data", local=str(tmp_path / "local"), batch_size=1) as dataset:
            assert [as_json(sample) for sample in dataset] == [{"n": 0}, {"n": 1}]
