"""Texts, embeddings, choices by probability."""

from __future__ import annotations

import gzip
import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sqlstream.errors import ConfigError, DecodeError, TransformError
from sqlstream.transforms.rng import begin
from sqlstream.transforms.text import (
    ChooseFieldTransform,
    LoadTextTransform,
    TextEmbLoaderTransform,
    TextEmbSamplingTransform,
    TokenizeTransform,
)


def embedding(rows: int = 5, eot: int | None = 2) -> dict[str, Any]:
    mapping: dict[str, Any] = {"embeddings": torch.arange(1, rows + 1).float()[:, None].expand(rows, 4)}
    return mapping if eot is None else {**mapping, "eot_location": eot}


def column(result: torch.Tensor) -> list[float]:  # [n, d]
    return [float(v) for v in result[:, 0]]


def at(position: int, fields: dict[str, Any]) -> dict[str, Any]:
    sample = dict(fields)
    begin(sample, (0, 0, position))
    return sample


def test_text_is_loaded_and_tokenised(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(" a cat\n", encoding="utf-8")
    assert LoadTextTransform("t")({"t": str(path)}) == {"t": "a cat"}
    assert LoadTextTransform("t")({"t": b"a"}) == {"t": "a"}
    assert TokenizeTransform("t", str.split, "tokens")({"t": "a cat"})["tokens"] == ["a", "cat"]
    with pytest.raises(DecodeError, match="not UTF-8"):
        LoadTextTransform("t")({"t": b"\xff"})
    with pytest.raises(TransformError, match="expected a text, got None"):
        TokenizeTransform("t", str.split)({"t": None})
    with pytest.raises(ConfigError, match="cannot be called"):
        TokenizeTransform("t", 3)  # type: ignore[arg-type]  # wrong on purpose


def test_embeddings_are_zeroed_after_the_end_and_fitted() -> None:
    assert column(TextEmbLoaderTransform("e", 7)({"e": embedding()})["e"]) == [1, 2, 3, 0, 0, 0, 0]
    assert column(TextEmbLoaderTransform("e", 2)({"e": embedding()})["e"]) == [1, 2]
    assert column(TextEmbLoaderTransform("e", 6)({"e": embedding(eot=None)})["e"]) == [1, 2, 3, 4, 5, 0]
    batched = {"embeddings": embedding()["embeddings"][None], "eot_location": torch.tensor([2])}
    assert column(TextEmbLoaderTransform("e", 4)({"e": batched})["e"]) == [1, 2, 3, 0]


def test_embeddings_load_from_gzipped_files(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, embeddings=embedding()["embeddings"].numpy(), eot_location=np.array(2))
    path = tmp_path / "e.npz.gz"
    path.write_bytes(gzip.compress(buffer.getvalue()))
    assert column(TextEmbLoaderTransform("e", 4)({"e": str(path)})["e"]) == [1, 2, 3, 0]


@pytest.mark.parametrize("missing", [{}, {"e": None}, {"e": ""}, {"e": math.nan}])
def test_missing_embeddings_are_none_only_when_allowed(missing: dict[str, Any]) -> None:
    assert TextEmbLoaderTransform("e", 4, allow_missing=True)(dict(missing))["e"] is None
    with pytest.raises((TransformError, DecodeError), match="TextEmbLoaderTransform: field 'e'"):
        TextEmbLoaderTransform("e", 4)(dict(missing))


@pytest.mark.parametrize(
    "bad",
    [{}, {"embeddings": [1]}, {"embeddings": torch.zeros(2)}, {"embeddings": torch.zeros(2, 2), "eot_location": "x"}, [1]],
)
def test_embeddings_of_another_form_are_refused(bad: Any) -> None:
    with pytest.raises(DecodeError, match=r"TextEmbLoaderTransform: field 'e'"):
        TextEmbLoaderTransform("e", 4)({"e": bad})


FIELDS = {"short": "s", "long": "l", "short_emb": torch.zeros(1), "long_emb": torch.ones(1)}


def sampling(**options: Any) -> TextEmbSamplingTransform:
    given = {"probabilities": [0.25, 0.75], "output_text_field": "caption", "output_text_emb_field": "emb", **options}
    return TextEmbSamplingTransform(["short", "long"], ["short_emb", "long_emb"], **given)


def test_text_and_embedding_are_chosen_together_by_probability() -> None:
    samples = [sampling()(at(position, FIELDS)) for position in range(2000)]
    assert all(sample["emb"].item() == (sample["caption"] == "l") for sample in samples)
    assert abs(Counter(sample["caption"] for sample in samples)["l"] / 2000 - 0.75) < 0.04
    assert samples[0].keys() & {*FIELDS} == set()
    assert sampling(cleanup=False)(at(0, FIELDS)).keys() >= {*FIELDS, "caption", "emb"}


def test_the_output_field_may_be_one_of_the_inputs() -> None:
    for position in range(20):
        sample = sampling(output_text_field="short", output_text_emb_field="long_emb")(at(position, FIELDS))
        assert sample["long_emb"].item() == (sample["short"] == "l")


def test_only_whole_pairs_are_chosen_when_some_are_missing() -> None:
    for gone in ("short", "short_emb"):
        fields = {**FIELDS, gone: None}
        assert {sampling(allow_missing=True)(at(p, fields))["caption"] for p in range(30)} == {"l"}
        with pytest.raises(TransformError, match=f"'{gone}': 'None'"):
            sampling()(at(0, fields))
    with pytest.raises(TransformError, match="none of the fields can be chosen"):
        sampling(allow_missing=True)({})


def test_probabilities_are_checked() -> None:
    for bad in ([1.0], [-1, 2], [0, 0], [math.nan, 1]):
        with pytest.raises(ConfigError, match="probabilities="):
            sampling(probabilities=bad)
    with pytest.raises(ConfigError, match="pairs"):
        TextEmbSamplingTransform(["a"], [], [1.0], "x", "y")


def test_a_choice_before_downloads_picks_a_url_the_same_in_every_run() -> None:
    choose = ChooseFieldTransform(["url_a", "url_b"], "url", [0.5, 0.5], choice_field="which", cleanup=True)
    fields = {"url_a": "s3://a", "url_b": "s3://b"}
    chosen = [choose(at(position, fields)) for position in range(50)]
    assert [s["url"] for s in chosen] == [choose(at(position, fields))["url"] for position in range(50)]
    assert {sample["which"] for sample in chosen} == {"url_a", "url_b"}
    assert all(sample["url"] == fields[sample["which"]] and "url_a" not in sample for sample in chosen)
    assert ChooseFieldTransform(["url_a", "url_c"], "url", allow_missing=True)(at(0, fields))["url"] == "s3://a"
    with pytest.raises(TransformError, match="'url_c': 'absent'"):
        ChooseFieldTransform(["url_a", "url_c"], "url")(at(0, fields))
