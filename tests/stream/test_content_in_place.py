"""Content of Parquet files: pictures that stay in their row groups, which come through the cache like any other object."""

from __future__ import annotations

import json
import logging
import pickle
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.config import SampleOptions
from sqlstream.errors import ConfigError, MissingFieldError, SourceChangedError, StateError
from sqlstream.index.build.content import RowGroupIndex
from sqlstream.stream.engine.content.chunk_objects import ChunkObjects
from sqlstream.stream.engine.content.parquet import ContentReader
from sqlstream.stream.orders import warn_of_reading_again
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.base import Sample
from sqlstream.transforms.presets import CacheTransform

GROUP_ROWS, NUM_GROUPS, BYTES = 10, 8, 20_000
NUM_ROWS = GROUP_ROWS * NUM_GROUPS
WHOLE: dict[str, Any] = {"shuffle_seed": 1, "shuffle_block_size": None}
PATH = "/data/pictures.parquet"
PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def picture(number: int, seed: int = 0) -> bytes:
    return random.Random(seed << 32 | number).randbytes(BYTES)


def table(seed: int = 0) -> pa.Table:
    ids = range(NUM_ROWS)
    images = [{"bytes": picture(number, seed), "path": f"{number}.jpg"} for number in ids]
    sounds = [picture(number, seed)[:50] for number in ids]
    columns = {"image": pa.array(images, PICTURE), "label": [number % 5 for number in ids], "sound": sounds, "raw": sounds}
    features = {"image": {"_type": "Image"}, "label": {"_type": "Value"}, "sound": {"_type": "Audio"}}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


def write(path: Path, seed: int = 0) -> Path:
    pq.write_table(table(seed), path, row_group_size=GROUP_ROWS, compression="none")
    return path


@pytest.fixture
def src(server: FaultyHttpServer, tmp_path: Path) -> str:
    server.objects[PATH] = write(tmp_path / "pictures.parquet").read_bytes()
    return server.url + PATH


def opened(src: str | Path | list[str], folder: Path, **options: Any) -> StreamingDataset:
    return StreamingDataset(src, folder / "cache", **({"show_progress": False} | options))


def ranges(server: FaultyHttpServer) -> list[str]:
    """The ranges that were asked for, in their order."""
    return [str(request.range) for request in server.requests(PATH) if request.method == "GET" and request.range]


def are_right(samples: Iterator[Sample] | list[Sample], seed: int = 0) -> bool:
    return all(
        sample["image"] == {"bytes": picture(sample["__row__"], seed), "path": f"{sample['__row__']}.jpg"}
        and sample["sound"] == sample["raw"] == picture(sample["__row__"], seed)[:50]
        for sample in samples
    )


class Counting(RowGroupIndex):
    """An index that notes which chunks are read."""

    numbers: list[int]

    def read(self, number: int, files: Sequence[Path], names: Sequence[str]) -> pa.RecordBatch:
        self.__dict__.setdefault("numbers", []).append(number)
        return super().read(number, files, names)


# -- one way for all sources ------------------------------------------------------------------------------------------


def test_samples_of_a_local_file_are_read_in_place(tmp_path: Path) -> None:
    with opened(write(tmp_path / "t.parquet"), tmp_path) as dataset:
        assert dataset.index.path.stat().st_size < 100_000 < NUM_ROWS * BYTES
        assert dataset.columns == ("image", "label", "sound", "raw")
        assert list(dataset[3]) == ["image", "label", "sound", "raw", "__sample_key__", "__row__", "__epoch__"]
        assert are_right(list(dataset))
        assert are_right(dataset[-3:])
        assert dataset.cache.statistics().entries == 0


def test_bytes_of_content_come_with_their_samples_and_not_with_the_index(
    server: FaultyHttpServer, src: str, tmp_path: Path
) -> None:
    with opened(src, tmp_path) as dataset:
        asked = [tuple(map(int, text.removeprefix("bytes=").split("-"))) for text in ranges(server)]
        assert sum(stop - start + 1 for start, stop in asked) < 300_000 < NUM_ROWS * BYTES // 4, asked
        assert [request for request in server.requests(PATH) if request.method == "GET" and not request.range] == []
        assert dataset.cache.statistics().entries == 0
        assert are_right([dataset[45], dataset[41]])
        assert len(ranges(server)) == len(asked) + dataset.cache.statistics().entries == len(asked) + 1
        assert are_right(list(dataset))
        assert dataset.cache.statistics().entries == NUM_GROUPS


def test_each_row_group_comes_once_with_blocks(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with opened(src, tmp_path, shuffle_seed=1, shuffle_block_size=GROUP_ROWS, shuffle_window=2) as dataset:
        num_before = len(ranges(server))
        rows = [sample["__row__"] for batch in StreamingDataLoader(dataset, batch_size=8, collate_fn=list) for sample in batch]
        assert sorted(rows) == list(range(NUM_ROWS)) != rows
        asked = ranges(server)[num_before:]
        assert len(asked) == len(set(asked)) == NUM_GROUPS
        assert {row // GROUP_ROWS for row in rows[:20]} <= {rows[0] // GROUP_ROWS, *(row // GROUP_ROWS for row in rows[:20])}
        assert len({row // GROUP_ROWS for row in rows[:20]}) == 2


def test_workers_read_the_same(src: str, tmp_path: Path) -> None:
    with opened(src, tmp_path, shuffle_seed=1, shuffle_block_size=GROUP_ROWS) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=8, num_workers=2, collate_fn=list, multiprocessing_context="fork")
        samples = [sample for batch in loader for sample in batch]
        assert sorted(sample["__row__"] for sample in samples) == list(range(NUM_ROWS))
        assert are_right(samples)
        spawned = pickle.loads(pickle.dumps(dataset))
        assert are_right([spawned[3]])
        spawned.close()


def test_a_few_row_groups_stay_in_memory_by_their_bytes(tmp_path: Path) -> None:
    with opened(write(tmp_path / "t.parquet"), tmp_path) as dataset:
        assert isinstance(dataset.index, RowGroupIndex)
        index = Counting.of(dataset.index, dataset.index._files)
        assert isinstance(index, Counting)
        options = SampleOptions()
        reader = ContentReader(index, ChunkObjects(dataset.cache, None), options, memory_bytes=3 * GROUP_ROWS * BYTES)
        for row in (0, 5, 10, 3, 25, 0, 79):
            ((chunk, place),) = index.chunks_of([row]).tolist()
            sample: Sample = {}
            reader.fill(sample, reader._chunk(chunk), place, [])
            assert sample["image"]["bytes"] == picture(row)
        index.close()
        assert index.numbers == [0, 1, 2, 7], "two fit, beside what their other columns take"


# -- which columns ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (None, ["image", "sound"]),
        ([], []),
        (["image"], ["image"]),
        (["raw"], ["raw"]),
        (["sound", "image"], ["image", "sound"]),
    ],
)
def test_columns_to_download_chooses_content(wanted: list[str] | None, found: list[str], tmp_path: Path) -> None:
    with opened(write(tmp_path / "t.parquet"), tmp_path, columns_to_download=wanted) as dataset:
        columns = {column.name for column in dataset.index.columns if column.is_in_place}
        assert columns == {"image", "sound", *(wanted or ())}
        assert [name for name in ("image", "sound", "raw") if name in dataset[7] and name in columns] == found
        assert dataset[7].get("raw") == picture(7)[:50] or "raw" in columns


def test_a_row_without_content_is_an_error_if_the_column_is_named(tmp_path: Path) -> None:
    images = [{"bytes": b"a picture", "path": "a"}, {"bytes": None, "path": None}, None]
    pq.write_table(pa.table({"image": pa.array(images, PICTURE)}), tmp_path / "t.parquet")
    with opened(tmp_path / "t.parquet", tmp_path) as dataset:
        assert [dataset[row]["image"] for row in range(3)] == images
    with opened(tmp_path / "t.parquet", tmp_path, columns_to_download=["image"]) as dataset:
        assert dataset[0]["image"] == images[0]
        for row in (1, 2):
            with pytest.raises(MissingFieldError, match=rf"row {row} .* has no content in column 'image': mend"):
                dataset[row]
    options: dict[str, Any] = {"columns_to_download": ["image"], "allow_missing_columns": True}
    with opened(tmp_path / "t.parquet", tmp_path, **options) as dataset:
        assert [dataset[row]["image"] for row in range(3)] == [images[0], None, None]


def test_a_remote_file_without_the_content_that_is_wanted_has_none(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    other = table().select(["label", "sound"]).replace_schema_metadata(table().schema.metadata)
    pq.write_table(other, tmp_path / "other.parquet", row_group_size=GROUP_ROWS)
    server.objects["/data/other.parquet"] = (tmp_path / "other.parquet").read_bytes()
    both = [src, f"{server.url}/data/other.parquet"]
    with opened(both, tmp_path, columns_to_download=["image"], allow_missing_columns=True, on_error="raise") as dataset:
        found = [(sample["image"], sample["label"]) for sample in dataset]
    assert found[:NUM_ROWS] == [({"bytes": picture(at), "path": f"{at}.jpg"}, at % 5) for at in range(NUM_ROWS)]
    assert found[NUM_ROWS:] == [(None, at % 5) for at in range(NUM_ROWS)]
    with (
        opened(both, tmp_path, columns_to_download=["image"], on_error="raise") as dataset,
        pytest.raises(MissingFieldError, match=f"row {NUM_ROWS} .* has no content in column 'image'"),
    ):
        list(dataset)


@pytest.mark.parametrize("has_bytes", [False, True])
def test_paths_in_structs_without_bytes_are_downloaded_as_ever(
    has_bytes: bool, server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/1.jpg"] = b"a picture"
    images = [{"bytes": None, "path": f"{server.url}/1.jpg"}, *([{"bytes": b"another", "path": "2.jpg"}] if has_bytes else [])]
    pq.write_table(pa.table({"image": pa.array(images, PICTURE)}), tmp_path / "t.parquet")
    server.objects["/t.parquet"] = (tmp_path / "t.parquet").read_bytes()
    with opened(f"{server.url}/t.parquet", tmp_path, columns_to_download=["image"]) as dataset:
        assert isinstance(dataset.index, RowGroupIndex) is has_bytes
        samples = list(dataset)
        assert Path(dataset[0]["image"]).read_bytes() == b"a picture"
    assert [sample["image"] for sample in samples[1:]] == images[1:]


# -- rows that are chosen ---------------------------------------------------------------------------------------------


def test_any_choice_of_rows_keeps_its_content(tmp_path: Path) -> None:
    path = write(tmp_path / "t.parquet")
    with opened(path, tmp_path, where="label > 1", weights="label", epoch_size=20, shuffle_seed=3) as dataset:
        assert [sample["__row__"] for sample in dataset[:4]] == [2, 3, 4, 7]
        assert len(samples := list(dataset)) == 20
        assert are_right(samples)
        with dataset.select("row >= 50") as part, part.take(4) as few:
            assert [sample["__row__"] for sample in few[:]] == [52, 53, 54, 57]
            assert are_right(few[:])
        for split in dataset.split(val=0.25).values():
            with split:
                assert are_right(split[:])
    with opened(path, tmp_path, max_size=13) as dataset:
        assert len(dataset) == 13
        assert are_right(dataset[:])


def test_looking_at_rows_shows_what_sql_sees(tmp_path: Path) -> None:
    with opened(write(tmp_path / "t.parquet"), tmp_path) as dataset:
        assert dataset.head(2).to_pylist() == [{"label": n, "raw": picture(n)[:50]} for n in (0, 1)]
        assert dataset.schema.field("image").type == PICTURE
        assert dataset.query("SELECT count(*) AS n FROM dataframe WHERE label = 1").to_pylist() == [{"n": 16}]


def test_stored_samples_need_no_row_group_and_know_its_version(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    def length(sample: Sample) -> Sample:
        return {"first": sample.pop("image")["bytes"][0], "__row__": sample["__row__"]}

    options: dict[str, Any] = {"transforms": [CacheTransform("length", [length], version="1")]}
    with opened(src, tmp_path, **options) as dataset:
        assert [sample["first"] for sample in dataset] == [picture(number)[0] for number in range(NUM_ROWS)]
        num_before = len(ranges(server))
        assert [sample["first"] for sample in dataset] == [picture(number)[0] for number in range(NUM_ROWS)]
        assert len(ranges(server)) == num_before
    server.objects[PATH] = write(tmp_path / "later.parquet", seed=1).read_bytes()
    with opened(src, tmp_path, **options) as dataset:
        assert [sample["first"] for sample in dataset] == [picture(number, seed=1)[0] for number in range(NUM_ROWS)]


# -- versions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names_versions", [True, False])
def test_content_of_another_version_is_an_error(
    names_versions: bool, server: FaultyHttpServer, src: str, tmp_path: Path
) -> None:
    server.names_versions = names_versions
    with opened(src, tmp_path) as dataset:
        assert are_right([dataset[0]])
        server.objects[PATH] = write(tmp_path / "later.parquet", seed=1).read_bytes()
        with pytest.raises(SourceChangedError, match=r"changed since .* open the dataset again"):
            dataset[NUM_ROWS - 1]
        with pytest.raises(SourceChangedError):  # no other row stands in
            list(dataset)
    server.last_modified = "Tue, 02 Jan 2024 00:00:00 GMT"
    with opened(src, tmp_path) as dataset:
        assert are_right(list(dataset), seed=1)


def test_a_local_file_that_changed_is_an_error(tmp_path: Path) -> None:
    with opened(write(tmp_path / "t.parquet"), tmp_path) as dataset:
        write(tmp_path / "t.parquet", seed=1)
        with pytest.raises(SourceChangedError, match=r"t\.parquet changed since its footer was read: open the dataset again"):
            dataset[0]


def test_a_state_goes_on_with_the_same_file_at_another_place(src: str, tmp_path: Path) -> None:
    with opened(src, tmp_path, shuffle_seed=1) as dataset:
        samples = iter(dataset)
        taken = [next(samples)["__row__"] for _ in range(30)]
        state = dataset.state_dict()
        rest = [sample["__row__"] for sample in samples]
    assert sorted(taken + rest) == list(range(NUM_ROWS))
    with opened(tmp_path / "pictures.parquet", tmp_path, shuffle_seed=1) as dataset:
        dataset.load_state_dict(json.loads(json.dumps(state)))
        samples_here = list(dataset)
        assert [sample["__row__"] for sample in samples_here] == rest
        assert are_right(samples_here)


def test_refresh_takes_the_content_of_the_new_version(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with opened(src, tmp_path, refresh="epoch") as dataset:
        assert are_right(list(dataset))
        server.objects[PATH] = write(tmp_path / "later.parquet", seed=1).read_bytes()
        assert are_right(list(dataset), seed=1)


# -- orders -----------------------------------------------------------------------------------------------------------


def test_a_whole_shuffle_of_remote_content_is_said(src: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sqlstream"), opened(src, tmp_path, **WHOLE) as dataset:
        (message,) = caplog.messages
        assert "leave shuffle_block_size out" in message
        options, order = dataset._pipeline.options, dataset._pipeline.options.order
        for other in (
            replace(options, order=replace(order, shuffle_block_size=GROUP_ROWS)),
            replace(options, order=replace(order, shuffle_seed=None)),
            replace(options, samples=replace(options.samples, content_columns=())),
        ):
            warn_of_reading_again(other, dataset.index)
        assert len(caplog.messages) == 1


def test_a_whole_shuffle_of_local_content_that_no_process_keeps_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        opened(write(tmp_path / "t.parquet"), tmp_path, **WHOLE) as dataset,
        caplog.at_level(logging.WARNING, "sqlstream"),
    ):
        options = dataset._pipeline.options
        warn_of_reading_again(options, dataset.index, memory_bytes=NUM_ROWS * BYTES * 2)
        assert caplog.messages == []
        warn_of_reading_again(options, dataset.index, memory_bytes=NUM_ROWS * BYTES // 2)
        (message,) = caplog.messages
        assert "read by row groups of 10 rows: mostly one for each sample" in message


def test_a_window_of_more_row_groups_than_a_process_keeps_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "sqlstream"),
        opened(write(tmp_path / "t.parquet"), tmp_path, shuffle_seed=1) as dataset,
    ):
        options, index = dataset._pipeline.options, dataset.index
        assert isinstance(index, RowGroupIndex)
        num_groups = NUM_ROWS // GROUP_ROWS
        assert options.order.shuffle_block_size == "auto"
        warn_of_reading_again(options, index, memory_bytes=index.num_bytes)
        assert caplog.messages == []
        warn_of_reading_again(options, index, memory_bytes=index.num_bytes // 2)
        (message,) = caplog.messages
        assert message.startswith(f"the rows of {num_groups} row groups of")
        assert f"Give shuffle_window={num_groups // 2}," in message
        chosen = replace(options, order=replace(options.order, shuffle_window=num_groups // 2))
        warn_of_reading_again(chosen, index, memory_bytes=index.num_bytes // 2)
        assert len(caplog.messages) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"where": "label > 2"}, {"weights": "label", "epoch_size": 50}, {"sql_query": "SELECT *, -row AS n FROM dataframe"}],
    ids=["all", "some", "weighted", "computed"],
)
def test_row_groups_are_blocks_by_themselves(options: dict[str, Any], tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"shuffle_seed": 1, "shuffle_block_size": "auto", "shuffle_window": 2, **options}
    with opened(write(tmp_path / "t.parquet"), tmp_path, **chosen) as dataset:
        groups = [sample["__row__"] // GROUP_ROWS for sample in dataset]
        assert len(groups) == dataset.epoch_size
        come = list(dict.fromkeys(groups))
        windows = [set(come[start : start + 2]) for start in range(0, len(come), 2)]
        if "weights" not in options:  # else a block may end within a row group
            for group in range(NUM_GROUPS):
                (window,) = [window for window in windows if group in window]
                first, last = groups.index(group), len(groups) - 1 - groups[::-1].index(group)
                assert set(groups[first : last + 1]) <= window
        state = dataset.state_dict()
        dataset.load_state_dict(state)
    with opened(tmp_path / "t.parquet", tmp_path, **{**chosen, "shuffle_block_size": None}) as whole:
        assert [sample["__row__"] // GROUP_ROWS for sample in whole] != groups
        with pytest.raises(StateError, match="blocks"):
            whole.load_state_dict(state)


def test_other_tables_are_shuffled_as_a_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(40)}), tmp_path / "t.parquet", row_group_size=10)
    found = []
    for size in ("auto", None):
        with opened(tmp_path / "t.parquet", tmp_path, shuffle_seed=1, shuffle_block_size=size) as dataset:
            found.append([sample["n"] for sample in dataset])
    assert found[0] == found[1]
    with pytest.raises(ConfigError, match="shuffle_block_size='Auto' is unknown: give a number of rows, 'auto' or None"):
        opened(tmp_path / "t.parquet", tmp_path, shuffle_seed=1, shuffle_block_size="Auto")


def test_a_cache_too_small_for_a_row_group_says_what_it_needs(src: str, tmp_path: Path) -> None:
    with opened(src, tmp_path, cache_limit=8192) as dataset, pytest.raises(Exception, match="raise cache_limit"):
        dataset[0]
