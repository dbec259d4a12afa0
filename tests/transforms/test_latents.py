"""Latents: every file format, the Gaussian of a VAE, framerates."""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.latents import (
    LoadLatentFromDiskTransform,
    SampleImageVAELatentTransform,
    SampleVideoVAELatentTransform,
)
from sqlstream.transforms.rng import begin

MEAN = torch.arange(24, dtype=torch.float32).reshape(2, 3, 4)  # [c, h, w]


def saved(save: Callable[[io.BytesIO], object]) -> bytes:
    buffer = io.BytesIO()
    save(buffer)
    return buffer.getvalue()


MAPPINGS = {
    "npz": saved(lambda f: np.savez(f, mean=MEAN.numpy(), input_framerate=np.float32(24))),
    "npz compressed": saved(lambda f: np.savez_compressed(f, mean=MEAN.numpy(), input_framerate=np.float32(24))),
    "pt": saved(lambda f: torch.save({"mean": MEAN, "input_framerate": 24.0}, f)),
    "pt legacy": saved(lambda f: torch.save({"mean": MEAN, "input_framerate": 24.0}, f, _use_new_zipfile_serialization=False)),
}


class Evil:
    """Runs code when unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return (pytest.fail, ("the pickle was executed",))


@pytest.mark.parametrize("name", MAPPINGS)
@pytest.mark.parametrize("zipped", [False, True])
def test_mappings_of_every_format_load_with_numbers_as_numbers(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / ("latent.gz" if zipped else "latent")
    path.write_bytes(gzip.compress(MAPPINGS[name]) if zipped else MAPPINGS[name])
    latent = LoadLatentFromDiskTransform("x")({"x": str(path)})["x"]
    assert torch.equal(latent["mean"], MEAN)
    assert latent["input_framerate"] == 24.0
    assert isinstance(latent["input_framerate"], float)


def test_single_arrays_and_safetensors_load() -> None:
    def load(data: bytes) -> Any:
        return LoadLatentFromDiskTransform("x")({"x": data})["x"]

    npy = saved(lambda f: np.save(f, MEAN.numpy()))
    assert torch.equal(load(npy), MEAN)
    assert torch.equal(load(gzip.compress(npy)), MEAN)
    assert torch.equal(load(saved(lambda f: np.save(f, MEAN.numpy().astype(">f4")))), MEAN), "another byte order"
    assert torch.equal(load(saved(lambda f: np.save(f, np.asfortranarray(MEAN.numpy())))), MEAN)
    half = {"mean": MEAN.to(torch.bfloat16)}
    assert load(safetensors.torch.save(half))["mean"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Evil()),
        pickle.dumps({"mean": MEAN.numpy()}),
        saved(lambda f: torch.save(Evil(), f)),
        saved(lambda f: torch.save(Evil(), f, _use_new_zipfile_serialization=False)),
        saved(lambda f: np.save(f, np.array([Evil()], dtype=object))),
        gzip.compress(pickle.dumps(Evil())),
    ],
    ids=["pickle", "pickle of arrays", "pt", "pt legacy", "npy of objects", "gzip of a pickle"],
)
def test_pickles_are_refused_unexecuted_and_the_error_says_how_to_allow_them(data: bytes) -> None:
    with pytest.raises(DecodeError, match="allow_pickle=True"):
        LoadLatentFromDiskTransform("x")({"x": data})


def test_pickles_load_when_it_is_spelled_out() -> None:
    for data in (pickle.dumps({"mean": MEAN.numpy()}), pickle.dumps({"mean": MEAN}), MAPPINGS["pt"], MAPPINGS["pt legacy"]):
        assert torch.equal(LoadLatentFromDiskTransform("x", allow_pickle=True)({"x": data})["x"]["mean"], MEAN)
    data = saved(lambda f: np.save(f, np.array({"mean": MEAN.numpy()}, dtype=object)))
    assert torch.equal(LoadLatentFromDiskTransform("x", allow_pickle=True)({"x": data})["x"]["mean"], MEAN)


@pytest.mark.parametrize("name", MAPPINGS)
def test_damaged_files_give_decode_errors(name: str) -> None:
    whole = MAPPINGS[name]
    for data in (
        whole[:-40],
        whole[: len(whole) // 2],
        whole[:9],
        b"",
        b"text",
        b"\x89HDF\r\n\x1a\n",
        gzip.compress(whole)[:-9],
    ):
        with pytest.raises(DecodeError, match=r"LoadLatentFromDiskTransform: field 'x'"):
            LoadLatentFromDiskTransform("x")({"x": data})


def keyed(**fields: Any) -> dict[str, Any]:
    begin(fields, (1, 0, 0))
    return fields


def test_image_latents_are_drawn_from_their_gaussian() -> None:
    mean, logvar = torch.full((4, 64, 64), 3.0), torch.full((4, 64, 64), 2.0 * np.log(0.5))
    transform = SampleImageVAELatentTransform("x", "z")
    latent = transform(keyed(x={"mean": mean, "logvar": logvar}))["z"]
    assert abs(latent.mean() - 3.0) < 0.02
    assert abs(latent.std() - 0.5) < 0.02
    assert torch.equal(latent, transform(keyed(x={"mean": mean, "logvar": logvar}))["z"]), "same key, same draw"
    sharp = transform(keyed(x={"mean": mean.to(torch.bfloat16), "logvar": torch.full_like(logvar, -80.0)}))["z"]
    assert sharp.dtype == torch.bfloat16
    assert bool((sharp == 3).all())


def video(frames: int = 13, fps: float = 24.0) -> dict[str, Any]:
    mean = torch.arange(frames, dtype=torch.float32).reshape(frames, 1, 1, 1).expand(frames, 2, 3, 3)  # [t, c, h, w]
    return {"mean": mean, "logvar": torch.full_like(mean, -80), "input_shape": (frames, 3, 24, 24), "input_framerate": fps}


def kept(**options: Any) -> list[float]:
    latent = SampleVideoVAELatentTransform("x", **options)(keyed(x=video()))["x"]
    return [round(float(v)) for v in latent[:, 0, 0, 0]]


def test_video_latents_keep_every_kth_frame_of_the_framerate() -> None:
    assert kept() == list(range(13))
    assert kept(framerate=12.0) == list(range(0, 13, 2))
    assert kept(framerate=8.0, random_offset=True) in ([0, 3, 6, 9, 12], [1, 4, 7, 10], [2, 5, 8, 11])
    assert kept(framerate=24.0001) == list(range(13))
    starts = set()
    for position in range(40):
        sample: dict[str, Any] = {"x": video()}
        begin(sample, (0, 0, position))
        transform = SampleVideoVAELatentTransform("x", framerate=8.0, random_offset=True)
        starts.add(round(float(transform(sample)["x"][0, 0, 0, 0])))
    assert starts == {0, 1, 2}


def test_framerates_that_do_not_divide_and_missing_facts_are_errors() -> None:
    with pytest.raises(TransformError, match=r"framerate=7 does not divide the video's 24 frames per second"):
        kept(framerate=7)
    with pytest.raises(TransformError, match="framerate=48"):
        kept(framerate=48)
    with pytest.raises(DecodeError, match="needs 'input_framerate' and 'input_shape'"):
        SampleVideoVAELatentTransform("x", framerate=8)(
            {"x": {"mean": torch.zeros(1, 2, 3, 4), "logvar": torch.zeros(1, 2, 3, 4)}}
        )
    with pytest.raises(ConfigError, match="framerate=0"):
        SampleVideoVAELatentTransform("x", framerate=0)
    with pytest.raises(DecodeError, match="no 'logvar': the mapping has 'mean'"):
        SampleImageVAELatentTransform("x")({"x": {"mean": MEAN}})
    with pytest.raises(DecodeError, match="expected 4 axes"):
        SampleVideoVAELatentTransform("x")({"x": {"mean": MEAN, "logvar": MEAN}})
    with pytest.raises(TransformError, match="must be equal"):
        SampleImageVAELatentTransform("x")({"x": {"mean": MEAN, "logvar": MEAN[:1]}})
