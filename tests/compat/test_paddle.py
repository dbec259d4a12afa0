"""The drop-in for Paddle where Paddle is not installed; with it: `tests/frameworks/test_paddle.py`."""

from __future__ import annotations

import importlib

import pytest

from sqlstream.errors import MissingDependencyError


def test_without_paddle_there_is_one_clear_error() -> None:
    with pytest.raises(MissingDependencyError, match="pip install paddlepaddle"):
        importlib.import_module("sqlstream.compat.paddle")
