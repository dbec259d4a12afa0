"""Files that other programs wrote (tests/fixtures), and how their README writes values as JSON."""

from __future__ import annotations

import hashlib
import io
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).resolve().parent / "fixtures"
_SHOWN_BYTES, _SHOWN_VALUES = 64, 24
_EXACT = 2**53


def expected(name: str) -> Any:
    """Return what a file of expected values holds."""
    return json.loads((FIXTURES / name).read_text(encoding="utf-8"))


def as_json(value: Any) -> Any:
    """Return a value as JSON, with its type where JSON has none."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, np.generic):
        number = _float(float(value)) if value.dtype.kind == "f" else int(value)
        return {"$": "scalar", "dtype": str(value.dtype), "value": number}
    if isinstance(value, int):
        return value if abs(value) < _EXACT else {"$": "int", "text": str(value)}
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, Decimal):
        return {"$": "decimal", "text": str(value)}
    if isinstance(value, dict):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    return _content(value)


def _content(value: Any) -> dict[str, Any]:
    found: dict[str, Any]
    if isinstance(value, io.BytesIO):
        return _content(value.getvalue())
    if isinstance(value, bytes):
        found = {"$": "bytes", "len": len(value), "sha256": _digest(value)}
        return found | ({"hex": value.hex()} if len(value) <= _SHOWN_BYTES else {})
    if isinstance(value, np.ndarray):
        found = {"$": "ndarray", "dtype": str(value.dtype), "shape": list(value.shape), "sha256": _digest(value.tobytes())}
        return found | ({"data": as_json(value.ravel().tolist())} if value.size <= _SHOWN_VALUES else {})
    if type(value).__module__.startswith("torch"):
        return _content(value.numpy()) | {"$": "tensor", "torch_dtype": str(value.dtype)}
    return {
        "$": "pil",
        "mode": value.mode,
        "size": list(value.size),
        "sha256": _digest(value.tobytes()),
        "format": value.format,
    }


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _float(value: float) -> Any:
    is_plain = math.isfinite(value) and not (value == 0 and math.copysign(1, value) < 0)
    return value if is_plain else {"$": "float", "text": repr(value)}
