from __future__ import annotations

import hashlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.config import SourceOptions
from sqlstream.errors import (
    AccessDeniedError,
    CacheDirectoryError,
    CacheFullError,
    ConfigError,
    MissingFieldError,
    ObjectNotFoundError,
    SchemaError,
    StateError,
    TooManyFailuresError,
    TransformError,
)
from sqlstream.order import Plan
from sqlstream.stream.options import default_name
from sqlstream.testing.servers import Fault, FaultyAnswer
from sqlstream.world import World
from tests.stream.kit import rows_in_order
from tests.stream.sources import Photos, check_bytes

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def open_photos(photos: Photos, dst: Path, **options: Any) -> StreamingDataset:
    options.setdefault("columns_to_download", ["image"])
    return StreamingDataset(photos.src, dst, **options)


def rows(samples: Iterator[dict[str, Any]] | StreamingDataset) -> list[int]:
    return [sample["__row__"] for sample in samples]


def test_a_sample_is_its_row_with_a_local_path_for_the_downloaded_column(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", data_type="image") as dataset:
        sample = dataset[3]
        assert Path(sample.pop("image")).read_bytes() == photos.data(3)
        assert sample == {
            "index": "photo-3",
            "caption": "caption 3",
            "score": 3 / photos.num,
            "sha256": hashlib.sha256(photos.data(3)).hexdigest(),
            "__sample_key__": "photo-3",
            "__row__": 3,
            "__epoch__": 0,
            "__data_type__": "image",
        }


def test_iteration_without_a_seed_is_the_order_of_the_index(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", transforms=[check_bytes]) as dataset:
        samples = list(dataset)
    assert rows(iter(samples)) == list(range(photos.num))
    assert all(sample["is_right"] for sample in samples)


def test_a_seed_shuffles_each_epoch_anew_as_the_plan_says(photos: Photos, tmp_path: Path) -> None:
    plan = Plan(num_samples=photos.num, seed=7, batch_size=None)
    with open_photos(photos, tmp_path / "cache", shuffle_seed=7, columns_to_download=[]) as dataset:
        for epoch in range(2):
            assert dataset.epoch == epoch
            assert rows(dataset) == plan.rows(epoch, 0, photos.num).tolist()


class OpensWhen(threading.Event):
    """A gate that opens by itself once a condition holds, or after so long that it never will."""

    def __init__(self, condition: Callable[[], bool]) -> None:
        super().__init__()
        self.has_held = False
        self._condition, self._deadline = condition, time.monotonic() + 20

    def wait(self, timeout: float | None = None) -> bool:
        self.has_held = self.has_held or self._condition()
        return self.has_held or time.monotonic() > self._deadline or super().wait(timeout)


@pytest.mark.parametrize("prefetch", [None, pytest.param(1, marks=pytest.mark.slow)], ids=["ahead", "one at a time"])
def test_samples_come_in_order_while_their_downloads_do_not(photos: Photos, tmp_path: Path, prefetch: int | None) -> None:
    """The first object arrives when five others are whole; with `prefetch=1` none of these is asked for before it is there."""
    others = OpensWhen(lambda: len(list((tmp_path / "cache" / "data").glob("*/*.jpg"))) >= 5)
    photos.server.script(photos.path(0), FaultyAnswer(fault=Fault.HOLD, after_bytes=100, gate=others))
    with open_photos(photos, tmp_path / "cache", prefetch=prefetch) as dataset:
        assert rows(dataset) == list(range(photos.num))
    assert others.has_held == (prefetch is None)
    assert photos.num_gets() == {photos.path(number): 1 for number in range(photos.num)}


def test_length_is_the_number_of_selected_rows(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", sql_query="SELECT * FROM dataframe WHERE score >= 0.5") as dataset:
        assert len(dataset) == 60
        assert rows(dataset) == list(range(60, 120))
        assert dataset[0]["__sample_key__"] == "photo-60"
    with open_photos(photos, tmp_path / "cache", max_size=5) as dataset:
        assert len(dataset) == 5


def test_negative_and_several_indices_work_and_wrong_ones_raise(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:
        assert dataset[-1]["__row__"] == photos.num - 1
        assert [sample["__row__"] for sample in dataset.__getitems__([5, 5, -2])] == [5, 5, photos.num - 2]
        for index in (photos.num, -photos.num - 1):
            with pytest.raises(IndexError, match=str(index)):
                dataset[index]


def test_metadata_alone_needs_no_download(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", columns_to_download=[], index_cols_to_keep=["score"]) as dataset:
        samples = list(dataset)
        assert set(samples[0]) == {"index", "score", "__sample_key__", "__row__", "__epoch__"}
    assert photos.num_gets() == {}


def test_a_transform_may_yield_several_samples_or_none(photos: Photos, tmp_path: Path) -> None:
    def twice(sample: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number in range(sample["__row__"] % 3):
            yield {"row": sample["__row__"], "number": number}

    with open_photos(photos, tmp_path / "cache", transforms=[twice, lambda sample: [sample]], max_size=6) as dataset:
        pairs = [(sample["row"], sample["number"]) for sample in dataset]
        assert pairs == [(1, 0), (2, 0), (2, 1), (4, 0), (5, 0), (5, 1)]
        assert dataset[2] == [{"row": 2, "number": 0}, {"row": 2, "number": 1}]


def test_predownload_transforms_choose_the_url(photos: Photos, tmp_path: Path) -> None:
    def other(row: dict[str, Any]) -> dict[str, Any]:
        row["image"] = f"images/{119 - row['__row__']:04d}.jpg"
        return row

    with open_photos(photos, tmp_path / "cache", predownload_transforms=[other]) as dataset:
        assert Path(dataset[0]["image"]).read_bytes() == photos.data(119)


def test_paths_of_accessed_samples_stay_valid_for_the_next_accesses(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", cache_limit=photos.total_bytes // 2) as dataset:
        paths = [Path(dataset[number]["image"]) for number in range(30)]
        assert [path.read_bytes() for path in paths] == [photos.data(number) for number in range(30)]
        assert dataset.cache.statistics().pinned_entries == 30


def test_local_files_are_read_in_place_and_never_deleted(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(20):
        (source / f"{number:02d}.txt").write_text("text " * 2000)
        (source / f"{number:02d}.json").write_text(json.dumps({"number": number}))
    with StreamingDataset(
        source, tmp_path / "cache", data_type="text", columns_to_download=["txt", "json"], cache_limit="20kb"
    ) as dataset:
        samples = list(dataset)
        assert [sample["__sample_key__"] for sample in samples] == [f"{number:02d}" for number in range(20)]
        assert samples[4]["txt"] == str(source / "04.txt")
        assert dataset.cache.statistics().entries == 0
        dataset.cache.clear()
    assert len(list(source.iterdir())) == 40


def test_a_second_run_downloads_nothing_and_builds_no_index(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", cache_limit=None) as dataset:
        list(dataset)
        built = [(path, path.stat().st_ino) for path in (tmp_path / "cache/index").glob("*.sqlite")]
    gets_before = len([r for r in photos.server.requests() if r.method == "GET"])
    with open_photos(photos, tmp_path / "cache", cache_limit=None) as dataset:
        assert rows(dataset) == list(range(photos.num))
        assert dataset.cache.statistics().requests == photos.num
    assert [(path, path.stat().st_ino) for path in (tmp_path / "cache/index").glob("*.sqlite")] == built
    assert len([r for r in photos.server.requests() if r.method == "GET"]) == gets_before


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_failing_sample_is_replaced_by_another_and_ranks_keep_their_steps(photos: Photos, tmp_path: Path) -> None:
    del photos.server.objects[photos.path(5)]
    with open_photos(photos, tmp_path / "cache", num_downloading_retries=0) as dataset:
        samples = list(dataset)
        assert len(samples) == photos.num
        assert samples[5]["__row__"] != 5
        assert rows(iter(samples[:5] + samples[6:])) == [row for row in range(photos.num) if row != 5]
        assert dataset.cache.statistics().failures == 1
    with open_photos(photos, tmp_path / "other", num_downloading_retries=0) as dataset:
        assert rows(dataset)[5] == samples[5]["__row__"]  # the choice depends on (seed, epoch, position) alone


def test_a_failing_sample_is_raised_or_skipped_on_request(photos: Photos, tmp_path: Path) -> None:
    del photos.server.objects[photos.path(5)]
    with open_photos(photos, tmp_path / "cache", on_error="skip") as dataset:
        assert rows(dataset) == [row for row in range(photos.num) if row != 5]
    with (
        open_photos(photos, tmp_path / "cache", on_error="raise") as dataset,
        pytest.raises(ObjectNotFoundError, match=r"0005\.jpg"),
    ):
        list(dataset)


def test_random_access_raises_and_never_gives_another_row(photos: Photos, tmp_path: Path) -> None:
    del photos.server.objects[photos.path(5)]
    with open_photos(photos, tmp_path / "cache") as dataset, pytest.raises(ObjectNotFoundError, match=r"0005\.jpg"):
        dataset[5]


def test_failures_are_reported_with_what_failed_and_how_often(photos: Photos, tmp_path: Path) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] == 7:
            raise ValueError("no such picture")
        return sample

    del photos.server.objects[photos.path(5)]
    with open_photos(photos, tmp_path / "cache", transforms=[broken], name="photos", num_downloading_retries=0) as dataset:
        assert dataset.failures() == []
        for _ in range(2):
            list(dataset)
        reported = {record.url: record for record in dataset.failures()}
    url = photos.server.url + photos.path(5)
    assert set(reported) == {url, "photos row 7"}
    assert (reported[url].row, reported[url].step) == (5, 5)
    assert (reported["photos row 7"].row, reported["photos row 7"].step) == (7, 7)
    assert reported["photos row 7"].count == 2
    assert "TransformError" in reported["photos row 7"].error
    assert "no such picture" in reported["photos row 7"].error


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_the_trainer_reads_what_failed_in_its_workers_and_at_which_step(photos: Photos, tmp_path: Path) -> None:
    for number in (5, 41):
        del photos.server.objects[photos.path(number)]
    with open_photos(photos, tmp_path / "cache", shuffle_seed=3, num_downloading_retries=0) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=4, num_workers=2, collate_fn=len)
        list(loader)
        order = rows_in_order(dataset, 0, 0, photos.num).tolist()
        found = {(record.row, record.url): record for record in dataset.failures()}
    assert set(found) == {(number, photos.server.url + photos.path(number)) for number in (5, 41)}
    for (row, _), record in found.items():
        assert record.step == order.index(row) // 4
        assert record.count >= 1
        assert record.last_at > 0


def test_too_many_failures_stop_the_run(photos: Photos, tmp_path: Path) -> None:
    for number in range(0, photos.num, 4):
        del photos.server.objects[photos.path(number)]
    with open_photos(photos, tmp_path / "cache") as dataset, pytest.raises(TooManyFailuresError, match="max_failure_ratio"):
        list(dataset)


def test_a_failing_transform_is_named_with_its_sample(photos: Photos, tmp_path: Path) -> None:
    def broken(sample: dict[str, Any]) -> dict[str, Any]:
        raise KeyError("no such thing")

    with (
        open_photos(photos, tmp_path / "cache", transforms=[broken], on_error="raise") as dataset,
        pytest.raises(TransformError, match=r"broken.*photo-0.*KeyError"),
    ):
        next(iter(dataset))


def test_a_transform_that_returns_no_sample_is_named(photos: Photos, tmp_path: Path) -> None:
    with (
        open_photos(photos, tmp_path / "cache", transforms=[lambda sample: 3], on_error="raise") as dataset,
        pytest.raises(TransformError, match="returned int"),
    ):
        next(iter(dataset))


def test_a_row_without_a_url_fails_unless_missing_columns_are_allowed(tmp_path: Path) -> None:
    index = tmp_path / "index.jsonl"
    (tmp_path / "a.txt").write_text("a")
    index.write_text('{"index": "a", "file": "a.txt"}\n{"index": "b", "file": null}\n')
    options: dict[str, Any] = {"columns_to_download": ["file"], "on_error": "raise"}
    with (
        StreamingDataset(index, tmp_path / "cache", **options) as dataset,
        pytest.raises(MissingFieldError, match=r"row 1 .*'b'.*'file'"),
    ):
        list(dataset)
    with StreamingDataset(index, tmp_path / "cache", allow_missing_columns=True, **options) as dataset:
        assert [sample["file"] for sample in dataset] == [str(tmp_path / "a.txt"), None]


def test_a_limit_smaller_than_one_sample_says_so(photos: Photos, tmp_path: Path) -> None:
    with (
        open_photos(photos, tmp_path / "cache", cache_limit=16_384) as dataset,
        pytest.raises(CacheFullError, match=r"needs .* bytes on disk, the cache limit is 16384 bytes"),
    ):
        list(dataset)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"columns_to_download": ["picture"]}, SchemaError, "picture"),
        ({"index_col_name": "id"}, SchemaError, "id"),
        ({"cache_limit": "many"}, ConfigError, "^cache_limit='many' is not a size"),
        ({"shuffle_seed": -2}, ConfigError, "shuffle_seed"),
        ({"on_error": "ignore"}, ConfigError, "on_error"),
        ({"prefetch": 0}, ConfigError, "prefetch"),
        ({"num_downloading_workers": 0}, ConfigError, "num_downloading_workers"),
        ({"data_type": "smell"}, ConfigError, "data_type"),
        ({"batch_size": 0}, ConfigError, "batch_size"),
        ({"max_failure_ratio": 2.0}, ConfigError, "max_failure_ratio"),
        ({"columns_to_download": "image"}, ConfigError, r"columns_to_download='image'.*list"),
        (
            {"storage_options": {"regionn": "x"}},
            ConfigError,
            r"storage_options\['regionn'\] is not known: did you mean 'region'\?",
        ),
        ({"transforms": [check_bytes, 3]}, ConfigError, r"transforms\[1\]=3 is not callable"),
        ({"transforms": 3}, ConfigError, "transforms=3 is no list"),
        ({"world": (0, 2)}, ConfigError, r"world=\(0, 2\) is no World: give World\(rank="),
        ({"storage_options": "region"}, ConfigError, "storage_options are a str, and no dict"),
    ],
)
def test_wrong_options_are_named_before_the_first_batch(
    photos: Photos, tmp_path: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        open_photos(photos, tmp_path / "cache", **options)


@pytest.mark.parametrize("name", [b"photos", float("nan"), ["photos"], "\ud800"])
def test_a_name_that_is_no_text_is_refused_and_leaves_the_cache_as_it_is(photos: Photos, tmp_path: Path, name: Any) -> None:
    with open_photos(photos, tmp_path / "cache") as dataset:
        before = [sample["__sample_key__"] for sample in dataset]
    with pytest.raises(ConfigError, match=r"^name=.* is no text: give one"):
        open_photos(photos, tmp_path / "cache", name=name)
    with open_photos(photos, tmp_path / "cache") as dataset:
        assert dataset.cache.statistics().entries == len(before)
    assert not [*(tmp_path / "cache").glob("ledger.sqlite.bad*")]


def test_a_source_that_is_not_there_is_named(photos: Photos, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"nothing\.parquet"):
        StreamingDataset(f"{photos.server.url}/nothing.parquet", tmp_path / "cache")


def test_a_directory_that_is_not_ours_is_refused(photos: Photos, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home/thesis.tex").write_text("years of work")
    with pytest.raises(CacheDirectoryError, match=r"thesis\.tex"):
        open_photos(photos, tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["thesis.tex"]


# -- order over ranks -------------------------------------------------------------------------------------------------


def test_ranks_share_an_epoch_without_overlap(photos: Photos, tmp_path: Path) -> None:
    seen: list[int] = []
    for rank in range(3):
        world = World(rank=rank, world_size=3, local_rank=rank, local_world_size=3)
        with open_photos(
            photos, tmp_path / "cache", shuffle_seed=1, batch_size=4, columns_to_download=[], world=world
        ) as dataset:
            seen += rows(dataset)
    assert sorted(seen) == list(range(photos.num))


def test_an_infinite_iteration_goes_on_with_the_next_epoch(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", columns_to_download=[], infinite_iteration=True, batch_size=8) as dataset:
        samples = dataset.__iter__()
        epochs = [next(samples)["__epoch__"] for _ in range(2 * photos.num + 1)]
    assert (epochs[0], epochs[photos.num], epochs[-1]) == (0, 1, 2)


def test_missing_texts_read_as_empty_on_request(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", columns_to_download=[]) as dataset:
        assert dataset[9]["caption"] is None
    with open_photos(photos, tmp_path / "cache", columns_to_download=[], none_to_empty_str=True) as dataset:
        assert dataset[9]["caption"] == ""


def test_a_state_goes_on_where_it_was_taken(photos: Photos, tmp_path: Path) -> None:
    with open_photos(photos, tmp_path / "cache", shuffle_seed=3, columns_to_download=[]) as dataset:
        reference = rows(dataset) + rows(dataset)
        dataset.set_epoch(0)
        samples = dataset.__iter__()
        begun = [next(samples)["__row__"] for _ in range(50)]
        state = json.loads(json.dumps(dataset.state_dict()))
        del samples
    with open_photos(photos, tmp_path / "cache", shuffle_seed=3, columns_to_download=[]) as dataset:
        dataset.load_state_dict(state)
        assert begun + rows(dataset) + rows(dataset) == reference
    with (
        open_photos(photos, tmp_path / "cache", shuffle_seed=4, columns_to_download=[]) as dataset,
        pytest.raises(StateError, match="shuffle_seed=3"),
    ):
        dataset.load_state_dict(state)


@pytest.mark.parametrize(
    ("src", "name"),
    [
        ("s3://bucket/sets/photos/index.parquet", "sets-photos-index"),
        ("/data/photos", "data-photos"),
        ("https://me:secret@host/a.csv?sig=1", "host-a"),
        ("photos.csv", "photos"),
    ],
)
def test_the_default_name_is_the_end_of_the_source(src: str, name: str) -> None:
    assert default_name(src) == name


def test_clearing_indexes_leaves_those_in_use(photos: Photos, tmp_path: Path) -> None:
    query = "SELECT * FROM dataframe WHERE score >= 0.5"
    with open_photos(photos, tmp_path / "cache", columns_to_download=[], sql_query=query) as dataset:
        assert dataset.cache.clear(index=True).removed_index_files == 0
        assert dataset[0]["__row__"] == 60
        cache = pickle.loads(pickle.dumps(dataset.cache))
    with cache:
        assert cache.clear(index=True).removed_index_files == 3  # the table, the positions, and what they are


def test_a_remote_index_may_not_name_local_files_unless_their_root_is_allowed(photos: Photos, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("mine")
    row = json.dumps({"index": "a", "file": f"file://{tmp_path}/secret.txt"})
    photos.server.objects["/hostile.jsonl"] = row.encode()
    photos.server.objects["/cluster.jsonl"] = row.replace("file://", "").encode()
    options: dict[str, Any] = {"columns_to_download": ["file"], "on_error": "raise"}
    src = f"{photos.server.url}/hostile.jsonl"
    with StreamingDataset(src, tmp_path / "cache", **options) as dataset:
        with pytest.raises(AccessDeniedError, match=r"secret\.txt"):
            list(dataset)
        with pytest.raises(AccessDeniedError, match=r"secret\.txt"):
            dataset[0]
    with StreamingDataset(src, tmp_path / "cache", allowed_roots=[str(tmp_path)], **options) as dataset:
        assert Path(dataset[0]["file"]).read_text() == "mine"
    src = f"{photos.server.url}/cluster.jsonl"
    with StreamingDataset(src, tmp_path / "cache", allowed_roots=[str(tmp_path)], **options) as dataset:
        assert Path(dataset[0]["file"]).read_text() == "mine"


def test_how_a_source_is_read_is_passed_on_and_unknown_options_are_named(tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    table.write_text("index;score\na;1\nb;2\n")
    with StreamingDataset(table, tmp_path / "cache", source_options={"delimiter": ";"}, where="score > 1") as dataset:
        assert [sample["index"] for sample in dataset] == ["b"]
    with StreamingDataset([{"index": "a", "score": 1}], tmp_path / "cache") as dataset:
        assert dataset[0]["score"] == 1
    with StreamingDataset(table, tmp_path / "cache", source_options=SourceOptions(delimiter=";")) as dataset:
        assert [sample["index"] for sample in dataset] == ["a", "b"]
    with pytest.raises(ConfigError, match=r"source_options\['separator'\] is unknown: give one of path_prefix, delimiter, "):
        StreamingDataset(table, tmp_path / "cache", source_options={"separator": ";"})
    with pytest.raises(ConfigError, match=r"source_options=\['delimiter'\] is no dict"):
        StreamingDataset(table, tmp_path / "cache", source_options=["delimiter"])  # type: ignore[arg-type]  # as a user might
    with pytest.raises(ConfigError, match=r"sql_engine='postgres' is unknown: give one of sqlite, duckdb"):
        SourceOptions(sql_engine="postgres")
