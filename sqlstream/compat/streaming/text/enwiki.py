"""English Wikipedia, prepared for masked language models."""

from __future__ import annotations

from typing import Any

import numpy as np

from sqlstream.compat.streaming.base.documented import DocumentedDataset

_TYPES = {"masked_lm_weights": np.float32}
_IGNORED = -100
"""The label of a token that is not masked."""


class StreamingEnWiki(DocumentedDataset):
    """Samples of English Wikipedia: bytes of numbers in the shards, arrays here."""

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return the arrays of a sample, with labels for the masked tokens."""
        stored = super().get_item(sample_id, retry)
        found = {name: np.frombuffer(value, _TYPES.get(name, np.int32)) for name, value in stored.items()}
        labels = np.full(len(found["input_ids"]), _IGNORED)  # [n]
        labels[found["masked_lm_positions"]] = found["masked_lm_ids"]
        return {
            "input_ids": found["input_ids"].copy(),
            "token_type_ids": found["segment_ids"].copy(),
            "attention_mask": found["input_mask"].copy(),
            "labels": labels,
        }
