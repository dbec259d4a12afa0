"""Transforms of latents: load them, and sample from what a VAE's encoder gave (mean and log variance)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import is_struct, read_bytes
from sqlstream.transforms.field import BaseTransform
from sqlstream.transforms.rng import rng
from sqlstream.transforms.tensor_files import load_tensors, mapping_of, tensor_in

_WHOLE = 1e-3
"""A ratio of framerates this near to a whole number is one: 23.976 / 11.988 must be 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How files of tensors are read."""

    allow_pickle: bool = False
    """Unpickle, which runs whatever code the file names."""


class LoadLatentFromDiskTransform(BaseTransform):
    """An npy, npz, pt or safetensors file, gzipped or not (path, bytes, or struct of both) → its tensors.

    Args:
        input_field: The file.
        output_field: None: into the input field.
        transform_kwargs: `allow_pickle=True`: unpickle too, which runs whatever code the file names.
    """

    options_type = LoadOptions
    options: LoadOptions
    optional_modules = ("safetensors.torch",)

    def transform(self, value: Any, sample: Sample) -> Any:  # noqa: ARG002
        """Return the tensors; a mapping or tensor is taken as loaded already."""
        if isinstance(value, Mapping | torch.Tensor) and not is_struct(value):
            return value
        return load_tensors(read_bytes(value), allow_pickle=self.options.allow_pickle)


def sample_gaussian(mean: torch.Tensor, logvar: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:  # [...] each
    """Return mean + noise · exp(logvar / 2), in the dtype of the mean.

    Raises:
        TransformError: The shapes differ.
    """
    if mean.shape != logvar.shape:
        raise TransformError(f"mean has shape {list(mean.shape)} and logvar {list(logvar.shape)}: they must be equal")
    noise = torch.from_numpy(generator.standard_normal(tuple(mean.shape), dtype=np.float32))  # [...]
    return (mean.to(torch.float32) + noise * torch.exp(logvar.to(torch.float32) / 2)).to(mean.dtype)


class SampleImageVAELatentTransform(BaseTransform):
    """Mapping with mean and log variance `[lc, lh, lw]` → a sample of that Gaussian `[lc, lh, lw]`.

    Args:
        input_field: The mapping.
        output_field: None: into the input field.
        mean_field: Name of the mean in the mapping.
        logvar_field: Name of the log variance.
    """

    num_dimensions = 3

    def __init__(
        self, input_field: str, output_field: str | None = None, mean_field: str = "mean", logvar_field: str = "logvar"
    ) -> None:
        super().__init__(input_field, output_field)
        self.mean_field = mean_field
        self.logvar_field = logvar_field

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the sampled latent. # [lc, lh, lw]."""
        mean, logvar = self.read(value)
        return sample_gaussian(mean, logvar, rng(sample))

    def read(self, value: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and log variance. # [lc, lh, lw] each, with [lt] before for videos."""
        latents = mapping_of(value, "mean and logvar")
        mean = tensor_in(latents, self.mean_field)  # [...]
        if mean.ndim != self.num_dimensions:
            raise DecodeError(f"{self.mean_field!r} has shape {list(mean.shape)}: expected {self.num_dimensions} axes")
        return mean, tensor_in(latents, self.logvar_field)


class SampleVideoVAELatentTransform(SampleImageVAELatentTransform):
    """Mapping with mean and log variance `[lt, lc, lh, lw]` → a sample of that Gaussian, at another framerate if asked.

    Args:
        input_field: The mapping; with `framerate` it must also have `input_shape` (frames first) and `input_framerate`.
        output_field: None: into the input field.
        mean_field: Name of the mean in the mapping.
        logvar_field: Name of the log variance.
        framerate: Keep every k-th latent frame, k = input_framerate / framerate, a whole number. None: keep all.
        random_offset: Start at a random one of the first k latent frames.
    """

    num_dimensions = 4

    def __init__(
        self,
        input_field: str,
        output_field: str | None = None,
        mean_field: str = "mean",
        logvar_field: str = "logvar",
        framerate: float | None = None,
        random_offset: bool = False,
    ) -> None:
        super().__init__(input_field, output_field, mean_field, logvar_field)
        if framerate is not None and not framerate > 0:
            raise ConfigError(
                f"SampleVideoVAELatentTransform: framerate={framerate!r} is out of range: give more than 0, or None"
            )
        self.framerate = framerate
        self.random_offset = random_offset

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:
        """Return the sampled latent. # [lt, lc, lh, lw]."""
        mean, logvar = self.read(value)
        skip = 1 if self.framerate is None else frame_skip(value, mean.shape[0], self.framerate)
        offset = int(rng(sample).integers(min(skip, mean.shape[0]))) if self.random_offset and mean.shape[0] else 0
        return sample_gaussian(mean[offset::skip], logvar[offset::skip], rng(sample))


def frame_skip(latents: Mapping[str, Any], num_latent_frames: int, framerate: float) -> int:
    """Return the step over latent frames that makes the video's framerate `framerate`.

    Raises:
        TransformError: The ratio of the framerates is no whole number.
        DecodeError: The mapping lacks what is needed.
    """
    if "input_framerate" not in latents or "input_shape" not in latents:
        raise DecodeError(f"framerate={framerate} needs 'input_framerate' and 'input_shape': the mapping has {list(latents)}")
    try:
        input_framerate = float(latents["input_framerate"])
        num_frames = int(latents["input_shape"][0])
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise DecodeError(f"'input_framerate' or 'input_shape' cannot be read: {error}") from error
    ratio = input_framerate / framerate
    if not math.isfinite(ratio) or round(ratio) < 1 or abs(ratio - round(ratio)) > _WHOLE:
        each = math.ceil(num_frames / num_latent_frames) if num_latent_frames else 0
        raise TransformError(
            f"framerate={framerate} does not divide the video's {input_framerate:g} frames per second ({num_frames} frames in "
            f"{num_latent_frames} latent frames of {each}): give {input_framerate:g} divided by a whole number"
        )
    return round(ratio)
