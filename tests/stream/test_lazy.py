"""A lazy index behind a dataset: chunks on demand, one order, exact resumption, a bounded disk."""

from __future__ import annotations

import functools
import io
import itertools
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import MixedDataset, StreamingDataLoader, StreamingDataset
from sqlstream.cache.session import AnyHold
from sqlstream.errors import (
    CacheFullError,
    ConfigError,
    ObjectChangedError,
    QueryError,
    SourceChangedError,
    SourceError,
    UnknownLengthError,
)
from sqlstream.index.build.lazy import ChunkRows
from sqlstream.stream.engine.lazy_rows import WINDOW_CHUNKS, LazyRows
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.processes import wait_until
from tests.stream.tables import Job, others

CHUNK_ROWS, NUM_CHUNKS = 50, 24
NUM_ROWS = CHUNK_ROWS * NUM_CHUNKS
FILTER = "score >= 0.25 AND row % 3 != 1"
PATH = "/data/rows.parquet"


def table(num_rows: int = NUM_ROWS) -> pa.Table:
    ids = range(num_rows)
    captions = [f"caption {i} " * 20 for i in ids]
    return pa.table({"index": [f"row-{i}" for i in ids], "score": [i / num_rows for i in ids], "caption": captions})


def publish(server: FaultyHttpServer, folder: Path, row_group_rows: int = CHUNK_ROWS) -> str:
    pq.write_table(table(), folder / "rows.parquet", row_group_size=row_group_rows, compression="none")
    server.objects[PATH] = (folder / "rows.parquet").read_bytes()
    return server.url + PATH


@pytest.fixture
def src(server: FaultyHttpServer, tmp_path: Path) -> str:
    return publish(server, tmp_path)


def lazily(src: str | Path | list[str | Path], cache: Path, **options: Any) -> StreamingDataset:
    defaults = {"lazy_index_chunk_size": CHUNK_ROWS, "shuffle_seed": 7, "show_progress": False}
    return StreamingDataset(src, cache, **(defaults | options))


def chunk_gets(server: FaultyHttpServer) -> list[str]:
    """The ranges of chunks that were asked for; the footer is the first range of all."""
    return [str(request.range) for request in server.requests(PATH) if request.method == "GET"][1:]


def ids(samples: Iterator[dict[str, Any]]) -> list[int]:
    return [sample["__row__"] for sample in samples]


def kept() -> list[int]:
    return [i for i in range(NUM_ROWS) if i / NUM_ROWS >= 0.25 and i % 3 != 1]


# -- on demand --------------------------------------------------------------------------------------------------------


def test_the_first_batch_comes_after_a_few_row_groups(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache") as dataset:
        batches = iter(StreamingDataLoader(dataset, batch_size=16))
        next(batches)
        assert len(chunk_gets(server)) <= WINDOW_CHUNKS + 1 <= 5
        assert sum(1 for _ in batches) == NUM_ROWS // 16 - 1
        assert len(chunk_gets(server)) == len(set(chunk_gets(server))) == NUM_CHUNKS, "each chunk came once"


def test_samples_are_those_of_a_built_index(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache") as lazy, lazily(src, tmp_path / "cache", lazy_index_chunk_size=None) as built:
        by_row = {sample["__row__"]: sample for sample in built}
        got = list(lazy)
        assert len(got) == NUM_ROWS
        assert all(sample == by_row[sample["__row__"]] for sample in got)
        assert len(lazy) == len(built) == NUM_ROWS


@pytest.mark.parametrize("where", [None, "score IS NULL"])
def test_files_that_have_none_of_the_columns_have_rows_all_the_same_and_are_not_read(
    where: str | None, server: FaultyHttpServer, src: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({"other": range(NUM_ROWS)}), tmp_path / "other.parquet", row_group_size=CHUNK_ROWS)
    server.objects["/data/other.parquet"] = (tmp_path / "other.parquet").read_bytes()
    keep: dict[str, Any] = {"columns_to_download": [], "index_cols_to_keep": ["score"], "where": where, "shuffle_seed": None}
    for of_table, other in ((src, f"{server.url}/data/other.parquet"), (tmp_path / "rows.parquet", tmp_path / "other.parquet")):
        with lazily([of_table, other], tmp_path / "cache", **keep) as lazy:
            scores = [sample["score"] for sample in lazy]
        assert scores == ([] if where else table()["score"].to_pylist()) + [None] * NUM_ROWS
    assert len([request for request in server.requests("/data/other.parquet") if request.method == "GET"]) == 1, "its footer"


def test_random_access_fetches_the_one_chunk_that_it_needs(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache") as dataset:
        assert dataset[3 * CHUNK_ROWS + 5]["index"] == f"row-{3 * CHUNK_ROWS + 5}"
        assert len(chunk_gets(server)) == 1
        assert dataset[3 * CHUNK_ROWS + 6]["index"] == f"row-{3 * CHUNK_ROWS + 6}"
        assert len(chunk_gets(server)) == 1
        assert dataset[-1]["index"] == f"row-{NUM_ROWS - 1}"
        assert len(chunk_gets(server)) == 2
        with pytest.raises(IndexError):
            dataset[NUM_ROWS]


def test_the_disk_stays_within_the_limit_and_evicted_chunks_come_again(
    server: FaultyHttpServer, src: str, tmp_path: Path
) -> None:
    limit = len(server.objects[PATH]) // 3
    with lazily(src, tmp_path / "cache", cache_limit=limit) as dataset:
        for _ in range(2):
            for number, _sample in enumerate(dataset):
                if number % 50 == 0:
                    account = dataset.cache.statistics()
                    assert 0 < account.used_bytes + account.filling_bytes <= limit
        assert dataset.cache.statistics().evictions > 0
        assert NUM_CHUNKS < len(chunk_gets(server)) <= 2 * NUM_CHUNKS


def test_a_chunk_larger_than_the_limit_says_what_it_needs(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", cache_limit=8192) as dataset, pytest.raises(CacheFullError, match="raise cache_limit"):
        next(iter(dataset))


def test_an_error_about_a_chunk_whose_copy_is_damaged_says_how_to_have_it_fetched_again(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=CHUNK_ROWS, compression="zstd")
    server.objects[PATH] = (tmp_path / "rows.parquet").read_bytes()
    with lazily(server.url + PATH, tmp_path / "cache") as dataset:
        wanted = ids(iter(dataset))
    for path in (tmp_path / "cache" / "data").rglob("*.parquet"):
        path.write_bytes(bytes(path.stat().st_size))
    with lazily(server.url + PATH, tmp_path / "cache") as dataset:
        with pytest.raises(SourceError, match=r"rows\.parquet cannot be read: .*its copy is not: `sqlstream cache clear`"):
            list(dataset)
        dataset.cache.clear()
    with lazily(server.url + PATH, tmp_path / "cache") as dataset:
        assert ids(iter(dataset)) == wanted


def test_small_row_groups_come_together(server: FaultyHttpServer, tmp_path: Path) -> None:
    src = publish(server, tmp_path, row_group_rows=10)
    with lazily(src, tmp_path / "cache") as dataset:
        assert sorted(ids(iter(dataset))) == list(range(NUM_ROWS))
        assert len(chunk_gets(server)) == NUM_CHUNKS


# -- one order --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [None, FILTER])
def test_global_batches_are_the_same_on_every_layout_whatever_is_known_of_the_filter(where: str | None, tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=CHUNK_ROWS)
    options = {"where": where, "lazy_index_chunk_size": CHUNK_ROWS}
    num_rows = len(kept()) if where else NUM_ROWS
    num_steps = 2 * -(-num_rows // 32) + 3
    found = []
    for number, (num_ranks, num_workers) in enumerate([(1, 0), (2, 0), (4, 0), (1, 2)]):
        # The first two runs find the filter's counts themselves, the others know them.
        cache = tmp_path / f"cache{min(number, 1)}"
        job = Job(tmp_path / "rows.parquet", cache, num_ranks, num_workers, 32, dataset_options=options)
        found.append([{(epoch, row) for epoch, row in step} for step in job.steps(num_steps)])
        job.close()
    assert found[1:] == found[:1] * 3
    epoch = set().union(*found[0][: -(-num_rows // 32)])
    assert {row for _, row in epoch} == (set(kept()) if where else set(range(NUM_ROWS)))
    assert len(epoch) == num_rows


@pytest.mark.parametrize("where", [None, FILTER])
def test_a_run_goes_on_exactly_after_every_step_on_another_layout_and_another_node(where: str | None, tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=CHUNK_ROWS)
    options = {"where": where, "lazy_index_chunk_size": CHUNK_ROWS}
    batch_size = 192
    num_rows = len(kept()) if where else NUM_ROWS
    num_steps = -(-num_rows // batch_size)
    caches = itertools.count()

    def job(layout: tuple[int, int]) -> Job:
        cache = tmp_path / f"cache{next(caches)}"  # a node that knows nothing of the filter
        return Job(tmp_path / "rows.parquet", cache, *layout, batch_size, dataset_options=options)

    whole = job((1, 0))
    wanted = [set(step) for step in whole.steps(num_steps + 4)]
    whole.close()
    for first, second in others([(1, 0), (2, 0)]):
        before = job(first)
        steps = before.steps(num_steps)
        for done in range(num_steps):
            assert set(next(steps)) == wanted[done]
            after = job(second)
            after.load(before.state())
            rest = [set(step) for step in after.steps(3)]
            after.close()
            assert rest == wanted[done + 1 : done + 4], f"after step {done}"
        before.close()


def test_rows_as_written_need_no_window(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", shuffle_seed=None, where=FILTER) as dataset:
        assert ids(iter(dataset)) == kept()


def test_epochs_differ_and_stay_within_windows(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=CHUNK_ROWS)
    with lazily(tmp_path / "rows.parquet", tmp_path / "cache") as dataset:
        epochs = [ids(iter(dataset)) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        size = WINDOW_CHUNKS * CHUNK_ROWS
        windows = [{row // CHUNK_ROWS for row in epoch[start : start + size]} for start in range(0, NUM_ROWS, size)]
        assert [len(window) for window in windows] == [WINDOW_CHUNKS] * (NUM_CHUNKS // WINDOW_CHUNKS)


# -- a filter ---------------------------------------------------------------------------------------------------------


def test_the_length_says_that_it_is_not_known_until_one_pass_is_over(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", where=FILTER) as dataset:
        loader = StreamingDataLoader(dataset, batch_size=32)
        for sized in (dataset, loader):
            with pytest.raises(UnknownLengthError, match="One whole pass"):
                len(sized)
        with pytest.raises(UnknownLengthError, match="One whole pass"):
            dataset.num_steps(32)
        assert "an unknown number of samples" in dataset.get_identifier_desc()
        assert len(list(dataset)) == len(kept()) == len(dataset), "list() asks for a length, and goes on without"
        assert len(loader) == dataset.num_steps(32) == -(-len(kept()) // 32)
    with lazily(src, tmp_path / "cache", where=FILTER) as later:
        assert len(later) == later.epoch_size == len(kept())


def test_a_mixture_knows_its_steps_where_a_stream_does_not_know_its_length(src: str, tmp_path: Path) -> None:
    with MixedDataset([lazily(src, tmp_path / "cache", where=FILTER)], [1], epoch_size=100) as mixed:
        loader = StreamingDataLoader(mixed, batch_size=32)
        assert len(loader) == mixed.num_steps(32) == 4
        with pytest.raises(UnknownLengthError, match="One whole pass"):
            len(mixed)
        assert sum(1 for _ in loader) == 4


def test_random_access_with_a_filter_counts_no_further_than_it_must(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", where=FILTER) as dataset:
        with pytest.raises(UnknownLengthError):
            dataset[-1]
        assert dataset[40]["__row__"] == kept()[40]
        assert len(chunk_gets(server)) == next(i for i in range(NUM_CHUNKS) if kept()[40] < (i + 1) * CHUNK_ROWS) + 1
        with pytest.raises(IndexError, match=f"the dataset has {len(kept())} samples"):
            dataset[len(kept())]
        assert dataset[-1]["__row__"] == kept()[-1]


def test_a_state_from_before_the_length_was_known_fits_a_run_that_knows_it(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", where=FILTER, batch_size=32) as dataset:
        samples = iter(dataset)
        before = ids(itertools.islice(samples, 64))
        state = dataset.state_dict()
        wanted = ids(samples)
    with lazily(src, tmp_path / "cache", where=FILTER, batch_size=32) as later:
        assert len(later) == len(kept())
        later.load_state_dict(state)
        assert ids(iter(later)) == wanted
    assert sorted(before + wanted) == kept()


def test_a_filter_that_keeps_nothing_says_so(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", where="score > 2") as dataset, pytest.raises(QueryError, match="keeps no row"):
        next(iter(dataset))


def test_an_endless_iteration_goes_on_over_the_end_of_an_epoch_that_it_found(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache", where=FILTER, infinite_iteration=True, batch_size=10) as dataset:
        endless = ids(itertools.islice(iter(dataset), 2 * len(kept())))
    with lazily(src, tmp_path / "again", where=FILTER, batch_size=10) as dataset:
        one_by_one = [ids(iter(dataset)) for _ in range(2)]
    num_filled = -(-len(kept()) // 10) * 10
    assert endless[: len(kept())] == one_by_one[0]
    assert endless[num_filled:] == one_by_one[1][: 2 * len(kept()) - num_filled]


def test_a_row_that_fails_is_replaced_by_one_of_its_window(src: str, tmp_path: Path) -> None:
    def fail_on_some(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__row__"] % 40 == 2:
            raise ValueError("ill")
        return sample

    for where in (None, FILTER):
        with lazily(src, tmp_path / "cache", where=where, transforms=[fail_on_some]) as dataset:
            got = ids(iter(dataset))
        assert len(got) == (NUM_ROWS if where is None else len(kept()))
        assert not [row for row in got if row % 40 == 2]


# -- what it cannot do ------------------------------------------------------------------------------------------------


def test_what_needs_all_rows_is_refused(src: str, tmp_path: Path) -> None:
    for options in ({"weights": "score"}, {"epoch_size": 7}, {"where": FILTER, "num_canonical_nodes": 2}):
        with pytest.raises(ConfigError, match="lazy"):
            lazily(src, tmp_path / "cache", **options)
    with lazily(src, tmp_path / "cache") as dataset, pytest.raises(ConfigError, match="lazy_index_chunk_size"):
        dataset.reweight("score")
    with pytest.raises(ConfigError, match="lazy_index_chunk_size=0"):
        lazily(src, tmp_path / "cache", lazy_index_chunk_size=0)


@functools.cache
def versions_of_one_size() -> tuple[bytes, bytes]:
    """Two Parquet files of one size whose every row differs."""
    bodies = []
    for base in (1000, 5000):
        sink = io.BytesIO()
        values = pa.table({"index": [str(base + i) for i in range(3200)], "value": [base + i for i in range(3200)]})
        pq.write_table(values, sink, row_group_size=100, compression="none", use_dictionary=False)
        bodies.append(sink.getvalue())
    assert len(bodies[0]) == len(bodies[1])
    return bodies[0], bodies[1]


@pytest.mark.parametrize("last_modified", ["Mon, 01 Jan 2024 00:00:00 GMT", None], ids=["same time", "no time"])
class TestASourceWithoutETags:
    @pytest.fixture(autouse=True)
    def _plain(self, server: FaultyHttpServer, last_modified: str | None) -> None:
        server.names_versions, server.last_modified = False, last_modified
        server.objects[PATH] = versions_of_one_size()[0]

    def test_one_that_is_replaced_at_its_size_is_an_error_and_never_another_row(
        self, server: FaultyHttpServer, tmp_path: Path
    ) -> None:
        dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100, shuffle_seed=None)
        seen = []
        samples = iter(dataset)
        with dataset.cache:
            seen.append(next(samples)["value"])
            server.objects[PATH] = versions_of_one_size()[1]
            with pytest.raises(SourceChangedError, match="changed since its footer was read"):
                seen.extend(sample["value"] for sample in samples)
        assert all(value < 5000 for value in seen)

    def test_the_next_dataset_reads_the_new_version_and_then_the_old_one_again(
        self, server: FaultyHttpServer, tmp_path: Path
    ) -> None:
        for number in (0, 1, 0):
            server.objects[PATH] = versions_of_one_size()[number]
            for _ in range(2):
                dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
                with dataset.cache:
                    assert [dataset[row]["value"] for row in (0, 3199)] == [1000 + 4000 * number, 4199 + 4000 * number]

    def test_bytes_of_the_other_version_do_not_stay_in_the_cache(self, server: FaultyHttpServer, tmp_path: Path) -> None:
        dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
        with dataset.cache:
            server.objects[PATH] = versions_of_one_size()[1]
            with pytest.raises(SourceChangedError):
                dataset[0]
            server.objects[PATH] = versions_of_one_size()[0]
            assert dataset[0]["value"] == 1000

    @pytest.mark.parametrize("num_answered", [0, 1], ids=["its chunk", "the end that tells versions"])
    def test_an_access_goes_on_when_an_iteration_of_another_thread_ends(
        self, server: FaultyHttpServer, tmp_path: Path, num_answered: int
    ) -> None:
        dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
        gate, values = threading.Event(), []
        fine = FaultyAnswer(fault=Fault.DRIP)
        num_before = len(server.requests(PATH))
        server.script(PATH, *[fine] * num_answered, FaultyAnswer(fault=Fault.HOLD, gate=gate))
        with dataset.cache:
            access = threading.Thread(target=lambda: values.append(dataset[2000]["value"]))
            access.start()
            wait_until(lambda: len(server.requests(PATH)) > num_before + num_answered)
            dataset.cache.rest()
            access.join(300)
            gate.set()
        assert values == [3000]


LATER = "Tue, 02 Jan 2024 00:00:00 GMT"


def test_a_later_time_of_change_is_another_version(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.names_versions = False
    server.objects[PATH] = versions_of_one_size()[0]
    dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
    with dataset.cache:
        assert dataset[0]["value"] == 1000
        server.last_modified = LATER
        with pytest.raises(ObjectChangedError, match="Tue, 02 Jan 2024"):
            dataset[3000]


def test_another_size_is_another_version_before_a_byte_of_it_is_taken(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.names_versions = False
    server.objects[PATH] = whole = versions_of_one_size()[0]
    dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
    with dataset.cache:
        assert dataset[0]["value"] == 1000
        server.objects[PATH] = whole + b"more"
        with pytest.raises(ObjectChangedError, match=f"has {len(whole) + 4} bytes, {len(whole)} were expected"):
            dataset[3000]


@pytest.mark.parametrize(("etag", "later"), [('""', LATER), ('W/""', None), ("*", LATER), ("", None)])
def test_an_etag_that_names_nothing_is_none(etag: str, later: str | None, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.etag = etag
    server.last_modified = None if later is None else "Mon, 01 Jan 2024 00:00:00 GMT"
    server.objects[PATH] = versions_of_one_size()[0]
    dataset = lazily(server.url + PATH, tmp_path / "cache", lazy_index_chunk_size=100)
    with dataset.cache:
        assert dataset[0]["value"] == 1000
        server.objects[PATH], server.last_modified = versions_of_one_size()[1], later
        with pytest.raises((ObjectChangedError, SourceChangedError)):
            dataset[3000]


def test_a_source_with_etags_costs_no_further_request(server: FaultyHttpServer, src: str, tmp_path: Path) -> None:
    dataset = lazily(src, tmp_path / "cache", shuffle_seed=None)
    with dataset.cache:
        assert len(ids(iter(dataset))) == NUM_ROWS
    assert len(set(chunk_gets(server))) == len(chunk_gets(server)) == NUM_CHUNKS


# -- threads that access rows -----------------------------------------------------------------------------------------


class Forgetful(OrderedDict[int, ChunkRows]):
    """Another thread drops what is put into it at once."""

    def __setitem__(self, chunk: int, rows: ChunkRows) -> None:
        super().__setitem__(chunk, rows)
        del self[chunk]


class Watched:
    """A hold; as one thread looks at it, another one takes the next chunk."""

    def __init__(self, ahead: dict[int, AnyHold]) -> None:
        self._ahead = ahead

    @property
    def is_settled(self) -> bool:
        self._ahead.pop(NUM_CHUNKS, None)
        return True


def accessed_rows(dataset: StreamingDataset) -> LazyRows:
    """What threads share that access rows of a dataset."""
    assert dataset[0]["__row__"] == 0
    assert dataset._pipeline.access_engine is not None
    rows = dataset._pipeline.access_engine._recipes[0].rows
    assert isinstance(rows, LazyRows)
    return rows


def test_chunks_that_another_thread_drops_while_rows_of_them_are_accessed(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache") as dataset:
        accessed_rows(dataset)._loaded = Forgetful()
        wanted = list(range(0, NUM_ROWS, CHUNK_ROWS + 1))
        assert ids(iter(dataset.__getitems__(wanted))) == wanted


def test_chunks_that_another_thread_takes_while_one_looks_how_many_are_under_way(src: str, tmp_path: Path) -> None:
    with lazily(src, tmp_path / "cache") as dataset:
        rows = accessed_rows(dataset)
        watched: Any = Watched(rows._ahead)
        rows._ahead |= {NUM_CHUNKS + 1: watched, NUM_CHUNKS: watched}
        assert ids(iter(dataset.__getitems__([60, 160]))) == [60, 160]
        assert NUM_CHUNKS not in rows._ahead
        del rows._ahead[NUM_CHUNKS + 1]
