"""A state goes on with the same table wherever it lies, and says what differs where it is another one (friction B8)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import StateError
from sqlstream.testing.servers import FaultyHttpServer, LocalS3
from tests.index.sources import forget_content

NUM = 24
ROWS: dict[str, list[Any]] = {
    "index": [f"row-{i}" for i in range(NUM)],
    "url": [f"images/{i}.jpg" for i in range(NUM)],
    "score": [i / NUM for i in range(NUM)],
}
LAZY: dict[str, Any] = {"lazy_index_chunk_size": 4}
WAYS: list[dict[str, Any]] = [
    {},
    {"where": "score > 0.2"},
    {"sql_query": "SELECT *, upper(index) AS name FROM dataframe"},
    {"weights": "1 + score"},
    {"weights": [1.0, 2.0] * (NUM // 2)},
    LAZY,
    {**LAZY, "where": "score > 0.2", "max_size": 12},
]


def write(path: Path, **columns: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({**ROWS, **columns}), path, row_group_size=4)
    return path


def opened(src: Path | str, folder: Path, **options: Any) -> StreamingDataset:
    own = {"columns_to_download": [], "shuffle_seed": 3, "show_progress": False, "cache_limit": None}
    return StreamingDataset(str(src), folder / "cache", **{**own, **options})


def begun(src: Path, folder: Path, **options: Any) -> tuple[dict[str, Any], list[object]]:
    """A state after some samples, and what comes then."""
    with opened(src, folder, **options) as dataset:
        samples = iter(dataset)
        for _ in range(3):
            next(samples)
        state: dict[str, Any] = json.loads(json.dumps(dataset.state_dict()))
        return state, [sample["index"] for sample in samples]


def rest(src: Path | str, folder: Path, state: dict[str, Any], **options: Any) -> list[object]:
    with opened(src, folder, **options) as dataset:
        dataset.load_state_dict(state)
        return [sample["index"] for sample in dataset]


@pytest.mark.parametrize("options", [{}, LAZY], ids=["built", "lazy"])
def test_a_state_goes_on_however_the_table_is_spelled(
    options: dict[str, Any], tmp_path: Path, server: FaultyHttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "data/t.parquet")
    state, expected = begun(path, tmp_path, **options)
    assert state["version"] == 3
    server.objects["/mirror/t.parquet"] = path.read_bytes()
    monkeypatch.chdir(tmp_path)
    spellings: Iterator[str] = iter(
        ("data/t.parquet", "./data/../data/t.parquet", f"file://{path}", f"{server.url}/mirror/t.parquet")
    )
    for spelling in spellings:
        assert rest(spelling, tmp_path, state, **options) == expected, spelling
    os.utime(path, ns=(1, 1))
    assert rest(path, tmp_path, state, **options) == expected


@pytest.mark.parametrize("options", WAYS)
def test_a_copy_on_another_machine_goes_on_with_filters_and_weights(options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "here/t.parquet")
    state, expected = begun(path, tmp_path, **options)
    copy = tmp_path / "there/t.parquet"
    copy.parent.mkdir()
    shutil.copy(path, copy)
    assert rest(copy, tmp_path / "other", state, **options) == expected


def test_friction_b8_a_run_over_photos_goes_on_however_they_are_spelled_mounted_or_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The six ways of the report, with pictures that are downloaded; then the same pictures as a folder without a table."""
    photos, given = tmp_path / "data/photos", {"columns_to_download": ["url"]}
    path = write(photos / "index.parquet")
    (photos / "images").mkdir()
    for n in range(NUM):
        (photos / f"images/{n}.jpg").write_bytes(b"picture %d" % n)
    (tmp_path / "mount").symlink_to(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "data2")
    monkeypatch.chdir(tmp_path)
    state, expected = begun(path, tmp_path, **given)
    folder_state, of_folder = begun(photos / "images", tmp_path, data_type="image")
    with LocalS3() as s3:
        for file in [path, *(photos / "images").iterdir()]:
            s3.put(f"bucket/{file.relative_to(tmp_path / 'data')}", file.read_bytes())
        remote = {"storage_options": s3.storage_options}
        for place in ("data/photos", "data/./photos", f"file://{photos}", "data2/photos", "mount/photos"):
            assert rest(f"{place}/index.parquet", tmp_path, state, **given) == expected, place
        assert rest("s3://bucket/photos/index.parquet", tmp_path, state, **given, **remote) == expected
        os.utime(path, ns=(1, 1))
        assert rest(path, tmp_path, state, **given) == expected
        assert rest("data2/photos/images", tmp_path, folder_state, data_type="image") == of_folder
        assert rest("s3://bucket/photos/images/", tmp_path, folder_state, data_type="image", **remote) == of_folder
    with opened(write(path, score=[0.5] * NUM), tmp_path, **given) as dataset, pytest.raises(StateError) as raised:
        dataset.load_state_dict(state)
    assert "What differs: the values of the rows" in str(raised.value)


SWAPPED = list(range(NUM))
SWAPPED[3], SWAPPED[4] = 4, 3
CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"score": [0.0, *ROWS["score"][:-1]]}, r"differs: the values of the rows, or their order \(it has as many rows"),
    ({name: [values[at] for at in SWAPPED] for name, values in ROWS.items()}, "the values of the rows, or their order"),
    ({name: [*values, values[0]] for name, values in ROWS.items()}, r"the number of rows \(it was 24, and is 25\)"),
    ({"score": list(range(NUM))}, r"column 'score' \(it was double, and is int64\)"),
    ({"more": list(range(NUM))}, r"column 'more' \(it is new\)"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_another_table_is_refused_and_what_differs_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    state, _ = begun(write(tmp_path / "here/t.parquet"), tmp_path)
    other = write(tmp_path / "there/t.parquet", **change)
    with opened(other, tmp_path) as dataset:
        with pytest.raises(StateError, match=rf"{message}.*Resume with the table, the query and .* strict=False"):
            dataset.load_state_dict(state)
        dataset.load_state_dict(state, strict=False)


def test_what_selects_rows_is_named_too(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    state, _ = begun(path, tmp_path, where="score > 0.2")
    lazy, _ = begun(path, tmp_path, **LAZY)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        (state, {"where": "score > 0.3"}, r"differs: the query \(it was '.*0\.2.*', and is '.*0\.3"),
        (state, {"where": "score > 0.2", "max_size": 9}, r"differs: max_size \(it was None, and is 9\)"),
        (state, {"where": "score > 0.2", "index_cols_to_keep": ["score"]}, r"differs: column 'url' \(it is gone\)"),
        (lazy, {"lazy_index_chunk_size": 8}, r"differs: lazy_index_chunk_size \(it was 4, and is 8\)"),
        (lazy, {}, r"differs: lazy_index_chunk_size \(it was 4, and is None\)"),
        (lazy, {**LAZY, "where": "score > 0"}, r"differs: the query \(it was None, and is '\(score > 0\)'\)"),
    ]
    for saved, options, message in cases:
        with opened(path, tmp_path, **options) as dataset, pytest.raises(StateError, match=message):
            dataset.load_state_dict(saved)
    write(path, score=[0.5] * NUM)
    with opened(path, tmp_path, **LAZY) as dataset, pytest.raises(StateError, match="the footers of its Parquet files"):
        dataset.load_state_dict(lazy)


@pytest.mark.parametrize("options", [{}, {"weights": "1 + score"}, {"weights": [1.0, 2.0] * (NUM // 2)}])
def test_states_and_indexes_of_earlier_versions_go_by_the_place_of_the_table(options: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "here/t.parquet")
    state, expected = begun(path, tmp_path, **options)
    with opened(path, tmp_path, **options) as dataset:
        forget_content(dataset.index)
    old, _ = begun(path, tmp_path, **options)
    assert old["version"] == 1
    assert "content" not in old
    for saved in (old, state):
        assert rest(path, tmp_path, saved, **options) == expected, "by an index of an earlier version"
    assert rest(path, tmp_path / "fresh", old, **options) == expected, "by an index of this version"
    other = write(tmp_path / "there/t.parquet")
    with (
        opened(other, tmp_path, **options) as dataset,
        pytest.raises(StateError, match=r"fingerprint='.*', this dataset '.*An earlier version wrote .* at the same place"),
    ):
        dataset.load_state_dict(old)


def test_content_that_is_none_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    state, _ = begun(path, tmp_path)
    with opened(path, tmp_path) as dataset:
        for content in ("text", {**state["content"], "more": 1}, {**state["content"], "columns": [1]}):
            with pytest.raises(StateError, match="of the state is no"):
                dataset.load_state_dict({**state, "content": content})
