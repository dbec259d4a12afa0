"""Texts as tokens: C4 and the Pile."""

from __future__ import annotations

from typing import Any, Unpack

from sqlstream.compat.streaming.base.documented import Documented, DocumentedDataset, shows_all_parameters
from sqlstream.errors import ConfigError, MissingDependencyError


class StreamingC4(DocumentedDataset):
    """The column `text` of C4, as tokens.

    Args:
        tokenizer_name: Name of a tokenizer of Hugging Face.
        max_seq_len: Tokens of a sample: longer texts are cut, shorter ones filled up.
        group_method: `'truncate'`.
        options: Parameters of `StreamingDataset`.

    Raises:
        ConfigError: `group_method` is another one.
        MissingDependencyError: `transformers` is not installed.
    """

    @shows_all_parameters
    def __init__(self, *, tokenizer_name: str, max_seq_len: int, group_method: str, **options: Unpack[Documented]) -> None:
        if group_method != "truncate":
            raise ConfigError(f"group_method={group_method!r} is unknown: give 'truncate'")
        self.tokenizer_name, self.max_seq_len, self.group_method = tokenizer_name, max_seq_len, group_method
        self.tokenizer = _tokenizer(tokenizer_name)
        super().__init__(**options)

    def get_item(self, sample_id: int, retry: int = 7) -> Any:
        """Return the tokens of a sample."""
        text = super().get_item(sample_id, retry)["text"]
        return self.tokenizer(text, truncation=True, padding="max_length", max_length=self.max_seq_len)


class StreamingPile(StreamingC4):
    """The column `text` of the Pile, as tokens; its parameters are those of `StreamingC4`."""


def _tokenizer(name: str) -> Any:
    """Return a tokenizer of Hugging Face, with a token for padding."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "tokenizers come from transformers, which is not installed: pip install transformers"
        ) from error
    tokenizer = AutoTokenizer.from_pretrained(name)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
