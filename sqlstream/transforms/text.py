"""Transforms of texts and their embeddings: load, tokenise, choose one of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from sqlstream.config import check_at_least
from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.base import Sample
from sqlstream.transforms.content import is_struct, read_bytes, read_text
from sqlstream.transforms.field import BaseTransform, dummy_reason, failure, field_names, summary
from sqlstream.transforms.rng import rng
from sqlstream.transforms.tensor_files import load_tensors, mapping_of, tensor_in


class LoadTextTransform(BaseTransform):
    """A UTF-8 file (path, bytes, or struct of both) → text, without white space at its ends."""

    def transform(self, value: Any, sample: Sample) -> str:  # noqa: ARG002
        """Return the text."""
        return read_text(value).strip()


class TokenizeTransform(BaseTransform):
    """Text → what a tokenizer makes of it.

    Args:
        input_field: The text.
        tokenizer: Called with the text; it must be picklable for spawned workers.
        output_field: None: into the input field.
    """

    calls_given_code = True

    def __init__(self, input_field: str, tokenizer: Callable[[str], Any], output_field: str | None = None) -> None:
        super().__init__(input_field, output_field)
        if not callable(tokenizer):
            raise ConfigError(f"TokenizeTransform: tokenizer={tokenizer!r} cannot be called")
        self.tokenizer = tokenizer

    def transform(self, value: Any, sample: Sample) -> Any:  # noqa: ARG002
        """Return the tokens."""
        if not isinstance(value, str):
            raise TransformError(f"expected a text, got {summary(value)}")
        return self.tokenizer(value)


class TextEmbLoaderTransform(BaseTransform):
    """Path, bytes, struct of both, or mapping of a text's embedding → float tensor `[num_tokens, d]`.

    The mapping has `embeddings` `[n, d]` and may have `eot_location`: rows after the end of the text become 0.

    Args:
        input_field: npy, npz, pt, safetensors, gzipped or not; or the mapping.
        num_tokens: Rows of the result: cut, or filled up with 0.
        output_field: None: into the input field.
        allow_missing: A missing value (absent, None, '', NaN) gives None instead of an error.
        allow_pickle: Unpickle, which runs whatever code the file names.
    """

    def __init__(
        self,
        input_field: str,
        num_tokens: int,
        output_field: str | None = None,
        allow_missing: bool = False,
        *,
        allow_pickle: bool = False,
    ) -> None:
        super().__init__(input_field, output_field)
        check_at_least("TextEmbLoaderTransform: num_tokens", num_tokens, 1)
        self.num_tokens = num_tokens
        self.allow_missing = allow_missing
        self.allow_pickle = allow_pickle

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the embedding, or None for a missing one that is allowed."""
        if self.allow_missing and dummy_reason(sample, self.input_field) is not None:
            sample[self.output_field] = None
            return sample
        return super().__call__(sample)

    def transform(self, value: Any, sample: Sample) -> torch.Tensor:  # noqa: ARG002
        """Return the embedding. # [num_tokens, d]."""
        if not isinstance(value, Mapping) or is_struct(value):
            value = load_tensors(read_bytes(value), allow_pickle=self.allow_pickle)
        return fit_embedding(mapping_of(value, "'embeddings' and 'eot_location'"), self.num_tokens)


def fit_embedding(mapping: Mapping[str, Any], num_tokens: int) -> torch.Tensor:  # [num_tokens, d]
    """Return the embeddings of a text with rows after `eot_location` zeroed, cut or filled to `num_tokens`.

    Raises:
        DecodeError: The mapping has no matrix of embeddings.
    """
    embeddings = tensor_in(mapping, "embeddings")  # [n, d]
    if embeddings.ndim == 3 and embeddings.shape[0] == 1:
        embeddings = embeddings[0]  # [n, d]
    if embeddings.ndim != 2 or not embeddings.is_floating_point():
        raise DecodeError(f"'embeddings' is {summary(embeddings)}: expected floats of shape [n, d]")
    num_kept = min(num_tokens, embeddings.shape[0])
    if mapping.get("eot_location") is not None:
        try:
            num_kept = max(0, min(num_kept, int(mapping["eot_location"]) + 1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise DecodeError(f"'eot_location' is no number but {summary(mapping['eot_location'])}") from error
    fitted = torch.zeros((num_tokens, embeddings.shape[1]), dtype=embeddings.dtype)  # [num_tokens, d]
    fitted[:num_kept] = embeddings[:num_kept]
    return fitted


def checked_probabilities(probabilities: Sequence[float] | None, number: int, owner: str) -> tuple[float, ...]:
    """Return one probability for each of `number` fields; None: all equal.

    Raises:
        ConfigError: Another number of them, one below 0, or all 0.
    """
    if number < 1:
        raise ConfigError(f"{owner}: give at least one field to choose from")
    given = tuple(float(p) for p in probabilities) if probabilities is not None else (1.0 / number,) * number
    if len(given) != number or any(not p >= 0 for p in given) or not 0 < sum(given) < float("inf"):
        raise ConfigError(f"{owner}: probabilities={probabilities!r} must be {number} numbers of at least 0, not all 0")
    return given


def choose(generator: np.random.Generator, probabilities: Sequence[float], is_possible: Sequence[bool]) -> int | None:
    """Return one of the possible choices, drawn by their probabilities among themselves; None if there is none."""
    weights = np.array(probabilities) * np.array(is_possible)  # [n]
    if not weights.sum() > 0:
        return None
    return int(generator.choice(len(weights), p=weights / weights.sum()))


class Chooser(Protocol):
    """A transform that chooses among fields of a sample."""

    probabilities: tuple[float, ...]
    allow_missing: bool


def choose_fields(transform: Chooser, sample: Sample, groups: Sequence[Sequence[str]]) -> Sequence[str]:
    """Return one of several groups of fields, drawn by the transform's probabilities.

    Raises:
        TransformError: A field holds no value and `allow_missing` is off, or no group has values in all of its fields.
    """
    fields = [field for group in groups for field in group]
    missing = {field: reason for field in fields if (reason := dummy_reason(sample, field)) is not None}
    if missing and not transform.allow_missing:
        raise failure(transform, sample, f"fields hold no value: {missing!r} (allow_missing=True chooses among the others)")
    chosen = choose(rng(sample), transform.probabilities, [not missing.keys() & set(group) for group in groups])
    if chosen is None:
        raise failure(transform, sample, f"none of the fields can be chosen: {missing!r} hold no value")
    return groups[chosen]


class TextEmbSamplingTransform:
    """Chooses one of several texts, with its embedding.

    Args:
        input_text_fields: The texts.
        input_text_emb_fields: Their embeddings, in the same order.
        probabilities: Probability of each pair.
        output_text_field: Gets the chosen text.
        output_text_emb_field: Gets its embedding.
        cleanup: Remove the input fields.
        allow_missing: Choose only among pairs of which neither is missing (absent, None, '', NaN); False: that is an error.
    """

    def __init__(
        self,
        input_text_fields: Sequence[str],
        input_text_emb_fields: Sequence[str],
        probabilities: Sequence[float],
        output_text_field: str,
        output_text_emb_field: str,
        cleanup: bool = True,
        allow_missing: bool = False,
    ) -> None:
        if len(input_text_fields) != len(input_text_emb_fields):
            raise ConfigError(
                f"TextEmbSamplingTransform: {len(input_text_fields)} text fields and {len(input_text_emb_fields)} embedding "
                "fields: they are pairs"
            )
        owner = type(self).__name__
        self.input_text_fields = field_names(owner, "input_text_fields", input_text_fields)
        self.input_text_emb_fields = field_names(owner, "input_text_emb_fields", input_text_emb_fields)
        self.probabilities = checked_probabilities(probabilities, len(input_text_fields), owner)
        self.output_text_field = output_text_field
        self.output_text_emb_field = output_text_emb_field
        self.cleanup = cleanup
        self.allow_missing = allow_missing

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the chosen pair.

        Raises:
            TransformError: A field is missing, or all pairs are.
        """
        pairs = list(zip(self.input_text_fields, self.input_text_emb_fields, strict=True))
        text, embedding = (sample[field] for field in choose_fields(self, sample, pairs))
        if self.cleanup:
            for field in (*self.input_text_fields, *self.input_text_emb_fields):
                sample.pop(field, None)
        sample[self.output_text_field] = text
        sample[self.output_text_emb_field] = embedding
        return sample


class ChooseFieldTransform:
    """Copies one of several fields, chosen by probability: a caption, or (before downloads) the URL to fetch.

    Args:
        input_fields: The fields.
        output_field: Gets the chosen value.
        probabilities: Probability of each field; None: all equal.
        allow_missing: Choose only among fields that hold a value; False: a missing one is an error.
        choice_field: Gets the name of the chosen field; None: no field gets it.
        cleanup: Remove the input fields.
    """

    def __init__(
        self,
        input_fields: Sequence[str],
        output_field: str,
        probabilities: Sequence[float] | None = None,
        *,
        allow_missing: bool = False,
        choice_field: str | None = None,
        cleanup: bool = False,
    ) -> None:
        self.input_fields = field_names(type(self).__name__, "input_fields", input_fields)
        self.output_field = output_field
        self.probabilities = checked_probabilities(probabilities, len(self.input_fields), type(self).__name__)
        self.allow_missing = allow_missing
        self.choice_field = choice_field
        self.cleanup = cleanup

    def __call__(self, sample: Sample) -> Sample:
        """Return the sample with the chosen value.

        Raises:
            TransformError: A field is missing, or all are.
        """
        (chosen,) = choose_fields(self, sample, [(field,) for field in self.input_fields])
        value = sample[chosen]
        if self.cleanup:
            for field in self.input_fields:
                sample.pop(field, None)
        sample[self.output_field] = value
        if self.choice_field is not None:
            sample[self.choice_field] = chosen
        return sample
