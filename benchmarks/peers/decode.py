"""The decoders: the one that torchvision's ImageFolder takes by default, and one that is the same for all."""

from __future__ import annotations

import io

import numpy as np
import torch
from PIL import Image

SIDE = 256


def decode_with_pillow(data: bytes) -> torch.Tensor:
    """Return a JPEG as uint8 tensor `[c, 256, 256]`, by Pillow alone."""
    with Image.open(io.BytesIO(data)) as image:
        pixels = np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR))  # [h, w, c]
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1).contiguous()  # [c, h, w]
