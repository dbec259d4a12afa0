"""Builds an index from its source, whole or lazy; selects rows; computes weights."""

from sqlstream.index.build.build import open_index

__all__ = ["open_index"]
