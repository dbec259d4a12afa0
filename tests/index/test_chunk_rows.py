"""The rows of a chunk of a lazy index: as a built index gives them, however they are asked for."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from sqlstream.errors import SourceError
from sqlstream.index.build.lazy import ChunkRows
from sqlstream.index.types.models import Column
from sqlstream.index.types.values import encoder

FIRST = 10
"""Id of the first row."""


def column(name: str, kind: pa.DataType, position: int) -> Column:
    field = pa.schema([pa.field(name, kind)]).serialize().to_pybytes()
    return Column(name=name, physical=name, position=position, arrow_field=field, type=str(kind), declared="")


def chunk(num_rows: int, moments: list[int] | None = None) -> ChunkRows:
    arrays: dict[str, pa.Array[Any]] = {
        "number": pa.array([None if i % 7 == 3 else i for i in range(num_rows)], pa.int64()),
        "text": pa.array([f"t{i}" for i in range(num_rows)]),
        "moments": pa.array([[ns] for ns in moments or range(0, 1000 * num_rows, 1000)]).cast(pa.list_(pa.duration("ns"))),
    }
    columns = [column(name, array.type, position) for position, (name, array) in enumerate(arrays.items())]
    columns.append(column("later", pa.string(), len(columns)))
    return ChunkRows(columns, pa.record_batch(arrays), np.arange(FIRST, FIRST + num_rows), "a file")


@pytest.mark.parametrize("num_rows", [20, 5000], ids=["few rows, which are kept", "many"])
def test_rows_are_the_same_one_by_one_and_together(num_rows: int) -> None:
    wanted = np.array([FIRST + 3, FIRST + 19, FIRST + 3, FIRST])  # [4]
    together = chunk(num_rows).rows(wanted)
    rows = chunk(num_rows)
    assert [row for row_id in wanted for row in rows.rows(np.array([row_id]))] == together
    assert [(row["number"], row["text"], row["later"]) for row in together] == [
        (None, "t3", None),
        (19, "t19", None),
        (None, "t3", None),
        (0, "t0", None),
    ]
    assert rows.stored_rows(wanted) == chunk(num_rows).stored_rows(wanted)


def test_rows_that_are_asked_for_one_by_one_are_read_out_of_arrow_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Mock] = []

    def counted(*given: Any) -> Mock:
        reads.append(Mock(wraps=encoder(*given)))
        return reads[-1]

    monkeypatch.setattr("sqlstream.index.build.lazy.encoder", counted)
    rows = chunk(20)
    for row_id in range(FIRST, FIRST + 20):
        rows.rows([row_id])
    assert [read.call_count for read in reads] == [1, 1, 1, 0], "once for each column of the file"


def test_the_values_that_are_kept_count_into_the_size_of_a_chunk() -> None:
    few, many = chunk(20), chunk(5000)
    assert few.nbytes / 20 > 2 * many.nbytes / 5000


def test_a_value_without_an_exact_form_is_an_error_of_its_row_alone() -> None:
    rows = chunk(3, [0, 1001, 2000])
    assert [rows.rows(np.array([FIRST + at]))[0]["text"] for at in (0, 2)] == ["t0", "t2"]
    with pytest.raises(SourceError, match="moments"):
        rows.rows(np.array([FIRST + 1]))
