"""Shards without any index, as chunks: the first samples after the first shards, one order, exact resumption, tables kept."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader
from sqlstream.errors import (
    ConfigError,
    EmptySelectionError,
    MissingFieldError,
    ObjectNotFoundError,
    SchemaError,
    SourceChangedError,
    SourceError,
    UnknownLengthError,
)
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.lazy_shards import NAMED, NUM_ROWS, NUM_SAMPLES, NUM_SHARDS, WINDOW, asked, by_key, lazily, written
from tests.stream.shards import content, opened, samples, serve, tar_of
from tests.stream.tables import Job, others


@pytest.fixture
def expected(server: FaultyHttpServer) -> list[dict[str, bytes]]:
    return serve(server, NUM_SHARDS, NUM_SAMPLES, num_bytes=700)


@pytest.fixture
def src(server: FaultyHttpServer, expected: list[dict[str, bytes]]) -> str:
    assert len(expected) == NUM_ROWS
    return f"{server.url}/data/{NAMED}"


@pytest.fixture
def local(tmp_path: Path) -> str:
    return written(tmp_path / "shards")


# -- the first batch --------------------------------------------------------------------------------------------------


def test_the_first_batch_in_order_comes_after_the_requests_of_one_shard(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 30, 100, num_bytes=200)
    with lazily(f"{server.url}/data/s-{{000..029}}.tar", tmp_path, columns_to_download=["jpg", "cls"]) as dataset:
        batches = iter(StreamingDataLoader(dataset, batch_size=16))
        assert len(next(batches)["jpg"]) == 16
        assert asked(server) == asked(server, "HEAD") == ["/data/s-000.tar"]
        assert sum(len(batch["jpg"]) for batch in batches) == 30 * 100 - 16
    assert sorted(asked(server)) == sorted(asked(server, "HEAD")) == [f"/data/s-{shard:03}.tar" for shard in range(30)]


def test_the_first_batch_of_a_shuffle_comes_after_the_requests_of_a_window(server: FaultyHttpServer, tmp_path: Path) -> None:
    serve(server, 30, 100, num_bytes=200)
    options: dict[str, Any] = {"columns_to_download": ["jpg"], "shuffle_seed": 3}
    with lazily(f"{server.url}/data/s-{{000..029}}.tar", tmp_path, **options) as dataset:
        batches = iter(StreamingDataLoader(dataset, batch_size=16))
        next(batches)
        assert len(asked(server)) <= WINDOW + 1, "those of a window, and the first shard, whose columns all have"
        assert len(asked(server, "HEAD")) <= WINDOW + 1
        assert sum(len(batch["jpg"]) for batch in batches) == 30 * 100 - 16
    assert len(asked(server)) == len(set(asked(server))) == 30, "each shard came once, for its table and its content"


def test_a_later_run_reads_nothing_to_know_the_samples(
    server: FaultyHttpServer, src: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    with lazily(src, tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected
    num_asked = len(server.requests())
    with lazily(src, tmp_path, shuffle_seed=1) as dataset:
        assert len(dataset) == NUM_ROWS
        assert by_key([content(sample) for sample in dataset]) == by_key(expected)
    assert [(request.method, request.path) for request in server.requests()[num_asked:]] == [("HEAD", "/data/s-000.tar")]
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_wildcard_names_versions_and_nothing_more_is_asked(tmp_path: Path, local: str) -> None:
    with lazily(local.replace(NAMED, "*.tar"), tmp_path) as dataset:
        assert len(list(dataset)) == NUM_ROWS


# -- the same samples -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["whole", "members", "auto"])
@pytest.mark.parametrize("kind", ["remote", "local"])
def test_samples_are_those_of_a_built_index(kind: str, unit: str, src: str, local: str, tmp_path: Path) -> None:
    where = src if kind == "remote" else local
    with lazily(where, tmp_path, shards=unit) as lazy, opened(where, tmp_path / "built", shards=unit) as built:
        own = ("__row__", "__epoch__")
        wanted = [{name: value for name, value in sample.items() if name not in own} for sample in built]
        got = list(lazy)
        assert [{name: value for name, value in sample.items() if name not in own} for sample in got] == wanted
        assert len({sample["__row__"] for sample in got}) == len(lazy) == len(built) == NUM_ROWS
        assert lazy.columns == built.columns
        assert lazy.head(3).to_pylist() == built.head(3).to_pylist()


@pytest.mark.parametrize("kind", ["remote", "local"])
def test_parts_come_as_paths_of_files(
    kind: str, src: str, local: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"members": "path", "columns_to_download": ["jpg"]}
    with lazily(src if kind == "remote" else local, tmp_path, **options) as dataset:
        assert [Path(sample["jpg"]).read_bytes() for sample in dataset] == [sample["jpg"] for sample in expected]


@pytest.mark.parametrize("unit", ["whole", "members"])
@pytest.mark.parametrize("seed", [None, 3])
def test_values_of_members_are_columns_of_sql(
    seed: int | None, unit: str, src: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    options: dict[str, Any] = {"source_options": {"index_members": ["cls"]}, "where": "cls >= 5", "shuffle_seed": seed}
    with lazily(src, tmp_path, shards=unit, columns_to_download=["jpg"], **options) as dataset:
        got = {(sample["cls"], sample["jpg"]) for sample in dataset}
        assert got == {(int(sample["cls"]), sample["jpg"]) for sample in expected if int(sample["cls"]) >= 5}


def test_several_sources_have_their_column(src: str, expected: list[dict[str, bytes]], tmp_path: Path) -> None:
    base = src.removesuffix(NAMED)
    named = [f"{base}s-{{000..002}}.tar", f"{base}s-003.tar"]
    with lazily(named, tmp_path, where="jpg > 705") as dataset:
        got = list(dataset)
        wanted = [sample for sample in expected[: 4 * NUM_SAMPLES] if len(sample["jpg"]) > 705]
        assert [content(sample) for sample in got] == wanted
        assert {sample["__source__"] for sample in got} == set(named)


# -- what is known ----------------------------------------------------------------------------------------------------


def test_the_length_is_not_known_until_all_shards_were_seen(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path, columns_to_download=["jpg"]) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=32)
        for sized in (dataset, loader):
            with pytest.raises(UnknownLengthError):
                len(sized)
        with pytest.raises(UnknownLengthError):
            dataset[-1]
        assert "an unknown number of samples" in dataset.get_identifier_desc()
        assert sum(len(batch["jpg"]) for batch in loader) == NUM_ROWS == len(dataset)
        assert len(loader) == -(-NUM_ROWS // 32)
        with pytest.raises(IndexError):
            dataset[NUM_ROWS]


def test_random_access_reads_no_further_than_it_must(
    server: FaultyHttpServer, src: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    with lazily(src, tmp_path) as dataset:
        assert content(dataset[2 * NUM_SAMPLES + 5]) == expected[2 * NUM_SAMPLES + 5]
        assert set(asked(server)) == {f"/data/s-{shard:03}.tar" for shard in range(3)}
        assert [content(sample) for sample in dataset[0:3]] == expected[:3]


def test_accesses_that_alternate_between_shards_read_the_table_of_each_once(
    local: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lazily(local, tmp_path, shuffle_seed=None) as dataset:
        assert len(list(dataset)) == NUM_ROWS
        read, chunks = dataset.index.read, list[int]()  # type: ignore[attr-defined]  # of a lazy index

        def counted(number: int, files: Any) -> Any:
            chunks.append(number)
            return read(number, files)

        monkeypatch.setattr(dataset.index, "read", counted)
        for number in [*range(0, NUM_ROWS, 7), *range(NUM_ROWS - 1, -1, -7)]:
            shard, place = divmod(number, NUM_SAMPLES)
            assert dataset[number]["__key__"] == samples(shard, NUM_SAMPLES, 700)[place][0]
        assert sorted(chunks) == list(range(NUM_SHARDS))


@pytest.mark.parametrize("seed", [None, 5])
@pytest.mark.parametrize("unit", ["whole", "members"])
def test_a_filter_judges_samples_as_shards_come(
    seed: int | None, unit: str, src: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    wanted = [sample for sample in expected if "txt" in sample and len(sample["jpg"]) > 705]
    with lazily(src, tmp_path, where="jpg > 705 AND txt IS NOT NULL", shuffle_seed=seed, shards=unit) as dataset:
        with pytest.raises(UnknownLengthError, match="the filter"):
            len(dataset)
        for _ in range(2):
            assert by_key([content(sample) for sample in dataset]) == by_key(wanted)
        assert len(dataset) == len(wanted)
    with lazily(src, tmp_path, where="jpg > 705 AND txt IS NOT NULL", shuffle_seed=seed, shards=unit) as later:
        assert len(later) == len(wanted)
        part = later.select("__key__ LIKE 'dir3/%'")
        assert by_key([content(sample) for sample in part]) == by_key([w for w in wanted if w["__key__"].startswith(b"dir3/")])
        part.close()


def test_a_filter_that_keeps_nothing_says_so(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path, where="jpg > 100000") as dataset, pytest.raises(EmptySelectionError, match="keeps no row"):
        next(iter(dataset))


def test_the_first_samples_alone(server: FaultyHttpServer, src: str, expected: list[dict[str, bytes]], tmp_path: Path) -> None:
    with lazily(src, tmp_path, max_size=NUM_SAMPLES + 3) as dataset:
        assert [content(sample) for sample in dataset] == expected[: NUM_SAMPLES + 3]
        assert len(dataset) == NUM_SAMPLES + 3
    assert set(asked(server)) == {f"/data/s-{shard:03}.tar" for shard in range(2)}


# -- one order --------------------------------------------------------------------------------------------------------


def test_every_sample_comes_once_an_epoch_in_windows_of_shards(local: str, tmp_path: Path) -> None:
    with lazily(local, tmp_path, shuffle_seed=2) as dataset:
        epochs = [[(sample["__shard__"], sample["__key__"]) for sample in dataset] for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert len(set(epoch)) == NUM_ROWS
        size = WINDOW * NUM_SAMPLES
        windows = [{shard for shard, _ in epoch[start : start + size]} for start in range(0, NUM_ROWS, size)]
        assert [len(window) for window in windows] == [WINDOW] * (NUM_SHARDS // WINDOW)


@pytest.mark.parametrize("where", [None, "txt IS NULL"])
def test_global_batches_are_the_same_on_every_layout_whatever_is_known(where: str | None, local: str, tmp_path: Path) -> None:
    options = {"where": where, "lazy_index_chunk_size": 1, "shuffle_window": WINDOW, "columns_to_download": ["cls"]}
    num_rows = NUM_ROWS if where is None else NUM_SHARDS * (NUM_SAMPLES - 7)
    num_steps = 2 * -(-num_rows // 16) + 3
    found = []
    for number, (num_ranks, num_workers) in enumerate([(1, 0), (2, 0), (1, 2)]):
        # The first two runs find the tables themselves, the other one knows them.
        job = Job(Path(local), tmp_path / f"cache{min(number, 1)}", num_ranks, num_workers, 16, dataset_options=options)
        found.append([{(epoch, row) for epoch, row in step} for step in job.steps(num_steps)])
        job.close()
    assert found[1:] == found[:1] * 2
    assert len(set().union(*found[0][: -(-num_rows // 16)])) == num_rows


@pytest.mark.parametrize("seed", [None, 5])
def test_a_run_goes_on_exactly_after_every_step_on_another_layout_and_another_node(
    seed: int | None, local: str, tmp_path: Path
) -> None:
    options = {
        "lazy_index_chunk_size": 1,
        "shuffle_window": WINDOW,
        "columns_to_download": ["cls"],
        "shuffle_seed": seed,
    }
    batch_size = 24
    num_steps = -(-NUM_ROWS // batch_size)
    caches = itertools.count()

    def job(layout: tuple[int, int]) -> Job:
        cache = tmp_path / f"cache{next(caches)}"  # a node that has seen no shard
        return Job(Path(local), cache, *layout, batch_size, dataset_options=options)

    whole = job((1, 0))
    wanted = [set(step) for step in whole.steps(num_steps + 4)]
    whole.close()
    for first, second in others([(1, 0), (2, 0)]):
        before = job(first)
        steps = before.steps(num_steps)
        for done in range(num_steps):
            assert set(next(steps)) == wanted[done]
            after = job(second)
            after.load(json.loads(json.dumps(before.state())))
            rest = [set(step) for step in after.steps(3)]
            after.close()
            assert rest == wanted[done + 1 : done + 4], f"after step {done}"
        before.close()


def test_a_state_of_another_window_or_of_other_shards_is_refused(local: str, tmp_path: Path) -> None:
    with lazily(local, tmp_path, shuffle_seed=1, batch_size=8) as dataset:
        next(iter(dataset))
        state = dataset.state_dict()
    for changed in ({"shuffle_window": 5}, {"max_index_files_to_use": 11}):
        with lazily(local, tmp_path, **{"shuffle_seed": 1, "batch_size": 8, **changed}) as other, pytest.raises(ValueError):
            other.load_state_dict(state)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_persistent_workers_share_what_they_find(
    method: str, server: FaultyHttpServer, src: str, expected: list[dict[str, bytes]], tmp_path: Path
) -> None:
    with lazily(src, tmp_path, shuffle_seed=1, columns_to_download=["jpg"]) as dataset:
        loader = StreamingDataLoader(
            dataset, batch_size=16, num_workers=2, persistent_workers=True, multiprocessing_context=method
        )
        for _ in range(2):
            got = [data for batch in loader for data in batch["jpg"]]
            assert sorted(got) == sorted(sample["jpg"] for sample in expected)
        assert len(dataset) == NUM_ROWS, "the trainer knows what its workers found"
    assert len(asked(server)) == len(set(asked(server))) == NUM_SHARDS


@pytest.mark.parametrize("unit", ["whole", "auto"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_window_that_is_larger_than_the_limit_comes_through(
    unit: str, num_workers: int, server: FaultyHttpServer, tmp_path: Path
) -> None:
    expected = serve(server, 6, 20, num_bytes=4000)
    size = len(server.objects["/data/s-000.tar"])
    limit = 3 * size
    options: dict[str, Any] = {"shuffle_seed": 1, "cache_limit": limit, "shards": unit, "columns_to_download": ["jpg"]}
    with lazily(f"{server.url}/data/s-{{000..005}}.tar", tmp_path, **options, shuffle_window=6) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=8, num_workers=num_workers)
        got = []
        for batch in loader:
            got += batch["jpg"]
            account = dataset.cache.statistics()
            assert account.used_bytes + account.filling_bytes <= limit
        assert sorted(got) == sorted(sample["jpg"] for sample in expected)


# -- columns ----------------------------------------------------------------------------------------------------------


def test_columns_are_those_of_the_first_shard_and_others_are_named_once(
    local: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(local).parent
    made = samples(0, 4)
    (folder / "s-000.tar").write_bytes(tar_of([(key, {"jpg": parts["jpg"], "cls": parts["cls"]}) for key, parts in made]))
    (folder / "s-001.tar").write_bytes(tar_of([(key, {"jpg": parts["jpg"]}) for key, parts in samples(1, 4)]))
    src = f"{folder}/s-{{000..003}}.tar"
    with caplog.at_level(logging.WARNING), lazily(src, tmp_path) as dataset:
        got = list(dataset)
        assert all("txt" not in sample for sample in got)
        assert [sample["cls"] is None for sample in got] == [False] * 4 + [True] * 4 + [False] * 2 * NUM_SAMPLES
    assert caplog.text.count("has parts 'txt'") == 1
    with pytest.raises(SchemaError, match="txt"):
        lazily(src, tmp_path, columns_to_download=["jpg", "txt"])
    caplog.clear()
    with lazily(src, tmp_path, source_options={"new_parts": "take"}) as dataset:
        texts = [sample.get("txt") for sample in dataset]
        assert texts[:10] == [None] * 8 + [b"sample 0 of 2", None]
    assert "has parts" not in caplog.text, "none is left out"
    with lazily(src, tmp_path, columns_to_download=["txt"], allow_missing_columns=True) as dataset:
        texts = [sample["txt"] for sample in dataset]
        assert texts[:8] == [None] * 8
        assert texts[8:10] == [b"sample 0 of 2", None]
    with (
        lazily(src, tmp_path, columns_to_download=["cls"], on_error="raise") as dataset,
        pytest.raises(MissingFieldError, match="no part 'cls'"),
    ):
        list(dataset)


def test_shards_without_samples_are_passed_over(local: str, tmp_path: Path) -> None:
    empty = tar_of([])
    for shard in (0, 1, 5):
        (Path(local).parent / f"s-{shard:03}.tar").write_bytes(empty)
    for seed in (None, 1):
        with lazily(local, tmp_path, shuffle_seed=seed) as dataset:
            assert len(list(dataset)) == len(dataset) == NUM_ROWS - 3 * NUM_SAMPLES
    with pytest.raises(SourceError, match="has no rows"):
        lazily(local.replace(NAMED, "s-{000..001}.tar"), tmp_path)


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_damaged_shard_is_an_error_where_its_samples_would_come(
    num_workers: int, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/data/s-004.tar"] = server.objects["/data/s-004.tar"][:9000]
    with lazily(src, tmp_path, columns_to_download=["jpg"]) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=NUM_SAMPLES, num_workers=num_workers)
        batches = (batch["__shard__"].tolist() for batch in loader)
        got = [shard for batch in itertools.islice(batches, 4) for shard in batch]
        with pytest.raises(SourceError, match="s-004"):
            next(batches)
        assert got == [shard for shard in range(4) for _ in range(NUM_SAMPLES)]
        with pytest.raises(SourceError, match="s-004"):
            dataset[NUM_ROWS - 1]
        assert dataset[3]["__shard__"] == 0


@pytest.mark.parametrize(("rule", "num_kept"), [("skip", 0), ("until_damage", 2)])
def test_damaged_shards_are_left_out_as_they_come(
    rule: str, num_kept: int, local: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = Path(local).parent / "s-004.tar"
    path.write_bytes(path.read_bytes()[:9000])
    options: dict[str, Any] = {"source_options": {"damaged_shards": rule}}
    with lazily(local, tmp_path, **options) as lazy, opened(local, tmp_path / "built", **options) as built:
        got = [content(sample) for sample in lazy]
        assert got == [content(sample) for sample in built]
        assert len(lazy) == len(got) == NUM_ROWS - NUM_SAMPLES + num_kept
    assert "s-004.tar is damaged" in caplog.text


def test_a_shard_that_is_not_there_is_named(src: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    del server.objects["/data/s-004.tar"]
    with lazily(src, tmp_path) as dataset, pytest.raises(ObjectNotFoundError, match="s-004"):
        list(dataset)
    del server.objects["/data/s-000.tar"]
    with pytest.raises(ObjectNotFoundError, match="s-000"):
        lazily(src, tmp_path / "other")


def test_a_shard_that_changed_is_an_error_and_is_found_anew_by_the_next_opening(
    src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    with lazily(src, tmp_path, cache_limit="100kb") as dataset:
        assert len(list(dataset)) == NUM_ROWS
    made = samples(99, NUM_SAMPLES + 1, 700)
    server.objects["/data/s-003.tar"] = tar_of(made)
    shutil.rmtree(tmp_path / "cache" / "data")
    with (
        lazily(src, tmp_path, cache_limit="100kb", on_error="raise") as dataset,
        pytest.raises(SourceChangedError, match="s-003"),
    ):
        list(dataset)
    with lazily(src, tmp_path, cache_limit="100kb") as dataset:
        got = [content(sample) for sample in dataset]
        assert len(got) == len(dataset) == NUM_ROWS + 1
        assert {sample["jpg"] for sample in got} > {parts["jpg"] for _, parts in made}


def test_a_local_shard_that_changed_is_an_error(local: str, tmp_path: Path) -> None:
    with lazily(local, tmp_path) as dataset:
        (Path(local).parent / "s-003.tar").write_bytes(tar_of(samples(99, NUM_SAMPLES, 700)))
        with pytest.raises(SourceChangedError, match="s-003"):
            list(dataset)
    with lazily(local, tmp_path) as dataset:
        assert len(list(dataset)) == NUM_ROWS


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_tables_that_are_damaged_are_found_again(damage: str, src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path) as dataset:
        rows = [sample["__row__"] for sample in dataset]
    (path,) = (tmp_path / "cache" / "index").glob("*.members")
    data = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(data[: len(data) // 2] if damage == "cut" else data[:-200] + bytes(200))
    shutil.rmtree(tmp_path / "cache" / "data")
    with lazily(src, tmp_path) as dataset:
        assert [sample["__row__"] for sample in dataset] == rows


@pytest.mark.parametrize("damage", ["gone", "cut"])
@pytest.mark.parametrize("what", ["sqlite", "members"])
def test_what_a_filter_keeps_goes_with_the_tables_that_it_was_found_by(
    what: str, damage: str, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    """The shard is another one when its table is found again: other samples of it have a text."""
    options: dict[str, Any] = {"where": "txt IS NOT NULL"}
    with lazily(src, tmp_path, **options) as dataset:
        assert all("txt" in sample for sample in dataset)
    server.objects["/data/s-003.tar"] = tar_of(samples(3, NUM_SAMPLES, 700)[1:])
    (path,) = (tmp_path / "cache" / "index").glob(f"*.{what}")
    path.unlink() if damage == "gone" else path.write_bytes(path.read_bytes()[:100])
    with lazily(src, tmp_path, **options) as dataset:
        got = [content(sample) for sample in dataset]
        assert len(got) == len(dataset) == NUM_SHARDS * 7 - 1
        assert all("txt" in sample for sample in got)


@pytest.mark.parametrize("what", ["members", "kept"])
@pytest.mark.parametrize("number", range(4), ids=["offset", "size", "checksum", "count"])
def test_numbers_of_what_was_found_of_a_shard_that_are_damaged_count_for_nothing(
    what: str, number: int, src: str, tmp_path: Path
) -> None:
    """A bit of any of them, low or high: rows come as before, and the dataset knows how many there are."""
    where = "jpg > 0"
    with lazily(src, tmp_path, where=where) as dataset:
        rows = [sample["__row__"] for sample in dataset]
    (path,) = (tmp_path / "cache" / "index").glob(f"*.{what}")
    whole = path.read_bytes()
    for shard, at in ((0, 0), (0, 7), (3, 0), (3, 7)):
        data = bytearray(whole)
        data[32 * shard + 8 * number + at] ^= 2
        path.write_bytes(data)
        with lazily(src, tmp_path, where=where) as dataset:
            assert [sample["__row__"] for sample in dataset] == rows
            assert len(dataset) == len(rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_canonical_nodes": 2, "shuffle_seed": 1}, "num_canonical_nodes"),
        ({"weights": "jpg", "shuffle_seed": 1}, "weights"),
        ({"epoch_size": 5, "shuffle_seed": 1}, "epoch_size"),
        ({"shuffle_block_size": 7, "shuffle_seed": 1}, "shuffle_block_size"),
    ],
)
def test_what_needs_all_samples_is_refused(options: dict[str, Any], text: str, local: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        lazily(local, tmp_path, **options)
