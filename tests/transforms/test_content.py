"""Content as a path, as bytes, or in a struct of both: every transform that reads files takes each of them, with one result."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile
import torch

from sqlstream import StreamingDataset
from sqlstream.errors import DecodeError
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms import Transform, apply
from sqlstream.transforms.content import source_of
from sqlstream.transforms.presets import (
    DecodeImageTransform,
    InitVideoDecoderTransform,
    LoadFromDiskTransform,
    LoadJsonMetadataTransform,
    LoadLatentFromDiskTransform,
    LoadTextTransform,
    TextEmbLoaderTransform,
    create_standard_audio_pipeline,
    create_standard_image_pipeline,
    create_standard_joint_video_audio_pipeline,
    create_standard_video_pipeline,
)
from sqlstream.transforms.rng import begin

from .clips import chirp, video
from .media import encode, photo

FORMS: dict[str, Callable[[Path], Any]] = {
    "path": str,
    "Path": lambda path: path,
    "bytes": Path.read_bytes,
    "memoryview": lambda path: memoryview(path.read_bytes()),
    "struct with bytes": lambda path: {"bytes": path.read_bytes(), "path": "elsewhere/a.bin"},
    "struct without path": lambda path: {"bytes": path.read_bytes(), "path": None},
    "struct without bytes": lambda path: {"path": str(path), "bytes": None},
}
TRANSFORMS: dict[str, tuple[str, Callable[[], Sequence[Transform]]]] = {
    "image": ("jpg", lambda: create_standard_image_pipeline("x", (16, 24))),
    "DecodeImage": ("jpg", lambda: [DecodeImageTransform("x", "image")]),
    "video": ("mp4", lambda: create_standard_video_pipeline("x", 3, (8, 8))),
    "joint": ("mp4", lambda: create_standard_joint_video_audio_pipeline("x", 3, (8, 8), normalize_audio=False)),
    "audio": ("wav", lambda: create_standard_audio_pipeline("x", 0.25, target_audio_sr=8000)),
    "bytes": ("txt", lambda: [LoadFromDiskTransform(["x"])]),
    "text": ("txt", lambda: [LoadFromDiskTransform(["x"], mode="r")]),
    "LoadText": ("txt", lambda: [LoadTextTransform("x", "text")]),
    "LoadJson": ("json", lambda: [LoadJsonMetadataTransform("x", "meta")]),
    "LoadLatent": ("npz", lambda: [LoadLatentFromDiskTransform("x", "latent")]),
    "TextEmb": ("npz", lambda: [TextEmbLoaderTransform("x", 3, "embedding")]),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("content")
    (folder / "a.jpg").write_bytes(encode(photo(40, 60), "JPEG"))
    (folder / "a.mp4").write_bytes(video(sound=True))
    sound = io.BytesIO()
    soundfile.write(sound, chirp(0.5, 8000), 8000, format="WAV")
    (folder / "a.wav").write_bytes(sound.getvalue())
    (folder / "a.txt").write_bytes("  é\r\nb ".encode())
    (folder / "a.json").write_text(json.dumps({"label": 3}))
    np.savez(folder / "a.npz", embeddings=np.ones((5, 4), np.float32), mean=np.zeros((1, 2, 3), np.float32))
    return folder


def shown(value: Any) -> Any:
    """A value that can be compared."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.tolist())
    if isinstance(value, dict):
        return {name: shown(item) for name, item in value.items()}
    return value.tobytes() if hasattr(value, "tobytes") else value


def made_of(transforms: Sequence[Transform], value: Any) -> dict[str, Any]:
    sample = {"x": value, "__sample_key__": "k"}
    begin(sample, (0, 0, 0))
    outcome = apply(transforms, sample)
    assert isinstance(outcome, dict)
    changes_x = type(transforms[0]) is LoadFromDiskTransform
    return {name: shown(value) for name, value in outcome.items() if name[:2] != "__" and (name != "x" or changes_x)}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_content_reads_the_same_in_every_form(files: Path, kind: str, form: str) -> None:
    extension, make = TRANSFORMS[kind]
    path = files / f"a.{extension}"
    found = made_of(make(), FORMS[form](path))
    assert found
    assert found == made_of(make(), str(path))


def test_a_reader_is_opened_on_content_in_a_struct(files: Path) -> None:
    sample = InitVideoDecoderTransform("x")({"x": FORMS["struct with bytes"](files / "a.mp4")})
    assert sample["x"].source == (files / "a.mp4").read_bytes()
    sample["x"].close()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"bytes": None, "path": None}, "got a struct without bytes and path"),
        ({"bytes": None, "path": ""}, "got a struct without bytes and path"),
        ({"bytes": b"", "path": "a", "more": 1}, "got dict of 3"),
        ({"bytes": 3, "path": None}, "got dict of 2"),
        (None, "got None"),
        ("", "got str ''"),
        (3, "got int 3"),
    ],
    ids=str,
)
def test_what_is_no_content_is_named_with_its_sample(value: Any, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        source_of(value)
    with pytest.raises(DecodeError, match=rf"LoadFromDiskTransform: field 'x': expected the path .*{says}; sample 'k' holds"):
        made_of([LoadFromDiskTransform(["x"])], value)


@pytest.mark.parametrize("value", ["images/0000.jpg", "s3://bucket/0000.jpg", {"bytes": None, "path": "images/0000.jpg"}])
@pytest.mark.parametrize("kind", ["image", "video", "audio", "text", "LoadText"])
def test_a_path_of_the_table_that_was_not_downloaded_names_the_cure(kind: str, value: Any) -> None:
    with pytest.raises(DecodeError, match=r"field 'x': '.*0000.jpg' cannot be read: .* columns_to_download.*sample 'k'"):
        made_of(TRANSFORMS[kind][1](), value)


def test_a_file_that_has_gone_is_named_as_before(tmp_path: Path) -> None:
    with pytest.raises(DecodeError, match=r"cannot be read: \[Errno 2\] No such file") as raised:
        made_of([LoadFromDiskTransform(["x"])], str(tmp_path / "gone"))
    assert "columns_to_download" not in str(raised.value)


# -- from a table -------------------------------------------------------------------------------------------------------


def test_columns_of_content_go_through_the_image_preset(files: Path, tmp_path: Path) -> None:
    data = (files / "a.jpg").read_bytes()
    struct = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    column = pa.array([{"bytes": data, "path": "a.jpg"}, {"bytes": data, "path": None}], struct)
    pq.write_table(pa.table({"index": [0, 1], "image": column, "plain": [data, data]}), tmp_path / "rows.parquet")
    for field, downloaded in (("image", None), ("plain", []), ("image", ["image"]), ("plain", ["plain", "image"])):
        with StreamingDataset(
            tmp_path / "rows.parquet",
            tmp_path / "cache",
            columns_to_download=downloaded,
            transforms=create_standard_image_pipeline(field, (16, 24), output_field="pixels"),
            show_progress=False,
            on_error="raise",
        ) as dataset:
            expected = made_of(create_standard_image_pipeline("x", (16, 24)), data)["image"]
            assert [shown(sample["pixels"]) for sample in dataset] == [expected, expected]
            assert shown(dataset[1]["pixels"]) == expected


def test_a_struct_without_bytes_is_downloaded_by_its_path(files: Path, tmp_path: Path) -> None:
    data = (files / "a.jpg").read_bytes()
    with FaultyHttpServer({"/a.jpg": data}) as server:
        rows = [
            {"index": 0, "image": {"bytes": None, "path": f"{server.url}/a.jpg"}},
            {"index": 1, "image": {"bytes": data, "path": "nowhere.jpg"}},
            {"index": 2, "image": {"bytes": None, "path": str(files / "a.jpg")}},
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        with StreamingDataset(
            tmp_path / "rows.parquet",
            tmp_path / "cache",
            columns_to_download=["image"],
            transforms=[LoadFromDiskTransform(["image"])],
            show_progress=False,
            on_error="raise",
        ) as dataset:
            assert [sample["image"] for sample in dataset] == [data, data, data]
            assert dataset.cache.statistics().entries == 1
