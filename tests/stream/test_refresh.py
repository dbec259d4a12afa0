"""`refresh="epoch"`: each epoch has one version of the source, in all of its processes, and a run goes on with the next one."""

from __future__ import annotations

import gc
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch.utils.data import DataLoader

from sqlstream import StreamingDataLoader
from sqlstream.errors import ConfigError, StateError
from sqlstream.stream.maps import EpochBatches
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.world import World
from tests.processes import open_files, start_script
from tests.stream.growing import names, opened, write

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture
def src(tmp_path: Path) -> Path:
    return write(tmp_path / "t.csv", *"abc")


def test_an_epoch_has_the_rows_that_its_source_had_as_it_began(
    src: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "sqlstream")
    with opened(src, tmp_path) as dataset:
        assert dataset[0]["index"] == "a"
        samples = iter(dataset)
        first = next(samples)
        write(src, *"vwxyz", more=range(5))
        assert [first["index"], *names(samples)] == ["a", "b", "c"]  # an epoch under way keeps its rows
        assert (len(dataset), dataset.columns) == (3, ("index",))
        assert names(dataset) == [*"vwxyz"]
        assert (len(dataset), dataset.columns, dataset[-1]["more"]) == (5, ("index", "more"), 4)
        assert "has changed: epoch 1 has its rows of now (3 → 5)" in caplog.text
        caplog.clear()
        assert names(dataset) == [*"vwxyz"]
        assert "has changed" not in caplog.text
        assert dataset.epoch == 3
    with opened(src, tmp_path, refresh=None) as dataset:
        write(src, "a")
        assert names(dataset) == [*"vwxyz"]


def test_an_iteration_that_is_under_way_keeps_its_rows_beside_one_that_begins(src: Path, tmp_path: Path) -> None:
    with opened(src, tmp_path, prefetch=1) as dataset:
        before = iter(dataset)
        first = next(before)
        write(src, *"vwxyz")
        after = iter(dataset)
        assert next(after)["index"] == "v"
        assert [first["index"], *names(before)] == ["a", "b", "c"]
        assert names(after) == [*"wxyz"]


def test_an_access_that_is_under_way_reads_the_rows_it_began_with(src: Path, tmp_path: Path) -> None:
    class During:
        """The number of a row, of which another thread asks for an epoch, which closes the index of before."""

        def __index__(self) -> int:
            if not told:
                thread = threading.Thread(target=lambda: told.extend(names(dataset)))
                thread.start()
                thread.join()
            return 1

    told: list[str] = []
    with opened(src, tmp_path) as dataset:
        assert dataset[1]["index"] == "b"
        write(src, *"vwxyz")
        assert names([dataset[During()]]) == ["b"]
        assert (told, dataset[1]["index"]) == ([*"vwxyz"], "w")
    gc.collect()
    assert not open_files(tmp_path)


def test_the_order_is_that_of_a_dataset_made_of_the_new_rows(src: Path, tmp_path: Path) -> None:
    options = {"shuffle_seed": 5, "weights": "1 + n", "where": "n > 0", "batch_size": 2}
    write(src, *"abcd", n=range(4))
    with opened(src, tmp_path, **options) as dataset:
        names(dataset)
        write(src, *"klmnopqr", n=range(8))
        taken = names(dataset)
        with opened(src, tmp_path, refresh=None, **options) as fresh:
            fresh.set_epoch(1)
            assert names(fresh) == taken
            assert json.loads(json.dumps(fresh.state_dict())) == json.loads(json.dumps(dataset.state_dict()))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_workers_of_a_loader_have_the_rows_of_its_epoch(workers: dict[str, Any], src: Path, tmp_path: Path) -> None:
    with opened(src, tmp_path) as dataset:
        loader, other = (StreamingDataLoader(dataset, batch_size=None, **workers) for _ in range(2))
        assert (names(loader), names(other)) == ([*"abc"], [*"abc"])
        write(src, *"vwxyz")
        assert names(loader) == [*"vwxyz"]
        assert names(other) == [*"vwxyz"]  # the first one has seen it: its workers are of before
        assert len(other) == 5
        for each in (loader, other):
            if each._iterator is not None:
                each._iterator._shutdown_workers()  # type: ignore[attr-defined]  # one of torch's, with workers


def test_a_lazy_index_is_refreshed_too(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"index": [*"abcdef"], "score": range(6)}), path, row_group_size=2)
    with opened(path, tmp_path, lazy_index_chunk_size=2, where="score >= 3") as dataset:
        assert names(dataset) == [*"def"]
        pq.write_table(pa.table({"index": [*"abcdefg"], "score": [*range(6, 0, -1), 9]}), path, row_group_size=2)
        assert names(dataset) == [*"abcdg"]


def test_a_state_names_the_rows_of_its_epoch_and_they_stay_for_its_rest(src: Path, tmp_path: Path) -> None:
    with opened(src, tmp_path) as dataset:
        old = dataset.state_dict()
        write(src, *"vwxyz")
        samples = iter(dataset)
        next(samples)
        state = dataset.state_dict()
        samples.close()  # type: ignore[attr-defined]  # a generator
    with opened(src, tmp_path) as dataset:
        with pytest.raises(StateError, match="of other rows"):
            dataset.load_state_dict(old)
        dataset.load_state_dict(state)
        write(src, *"pq")
        assert names(dataset) == [*"wxyz"]
        assert names(dataset) == ["p", "q"]
        dataset.set_progress(5, 1)  # within an epoch, too
        write(src, *"ABCDEF")
        assert names(dataset) == ["q"]
        dataset.set_epoch(5)
        assert names(dataset) == [*"ABCDEF"]


def test_a_source_that_cannot_be_read_is_a_warning_and_the_rows_stay(
    src: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(src, tmp_path, where="index > 'a'") as dataset:
        for damage in (src.unlink, lambda: write(src, "a"), lambda: src.write_text("other\n1\n2\n")):
            damage()
            caplog.clear()
            assert names(dataset) == ["b", "c"]
            (said,) = [record.getMessage() for record in caplog.records if record.name == "sqlstream.stream.refresh"]
            assert "is not refreshed, this epoch has the rows of the one before: " in said
        write(src, *"abcd")
        assert names(dataset) == ["b", "c", "d"]


def test_what_cannot_change_with_the_rows_is_refused(src: Path, tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"refresh": "day"}, "refresh='day' is unknown: give 'epoch', or None"),
        ({"infinite_iteration": True}, "infinite_iteration=True: leave one of them out"),
        ({"source_options": {"on_source_change": "raise"}}, "on_source_change='raise' refuses: leave one of them out"),
        ({"src": [{"index": "a"}]}, "give paths or URLs, no rows and no function"),
        ({"join": {"other": lambda: [{"index": "a"}]}, "on": "index"}, "give paths or URLs, no rows and no function"),
        ({"weights": [1.0, 1.0, 1.0]}, "give an expression or a column"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigError, match=message):
            opened(options.pop("src", src), tmp_path, **options)
    with opened(src, tmp_path) as dataset:
        with pytest.raises(ConfigError, match="leave refresh='epoch' out"):
            dataset.reweight("1")
        with pytest.raises(ConfigError, match="iterate the dataset, or a StreamingDataLoader"):
            EpochBatches(dataset, 2)
        assert names(DataLoader(dataset, batch_size=None)) == [*"abc"]
        with pytest.raises(ConfigError, match=r"use StreamingDataLoader in place of the DataLoader, or num_workers=0"):
            names(DataLoader(dataset, batch_size=None, num_workers=1))
    with (
        opened(src, tmp_path, world=World(rank=0, world_size=2)) as dataset,
        pytest.raises(ConfigError, match="refresh='epoch' has 2 ranks agree on the rows of an epoch"),
    ):
        next(iter(dataset))


def test_some_of_the_rows_are_those_of_when_they_were_chosen(src: Path, tmp_path: Path) -> None:
    with opened(src, tmp_path) as dataset, dataset.select("index > 'a'") as part:
        write(src, *"vwxyz")
        assert names(dataset) == [*"vwxyz"]
        assert names(part) == ["b", "c"]


def test_nodes_that_share_a_store_read_a_new_version_once(tmp_path: Path, server: FaultyHttpServer) -> None:
    def reads() -> int:
        return sum(request.method == "GET" for request in server.requests("/t.csv"))

    server.objects["/t.csv"] = b"index\na\n"
    store, url = {"index_store": str(tmp_path / "shared")}, f"{server.url}/t.csv"
    with opened(url, tmp_path / "1", **store) as first, opened(url, tmp_path / "2", **store) as second:
        assert (names(first), names(second), reads()) == (["a"], ["a"], 1)
        server.objects["/t.csv"] = b"index\nb\nc\n"
        assert (names(first), names(second), reads()) == (["b", "c"], ["b", "c"], 2)


RANK_SCRIPT = """
import json, sys
from pathlib import Path
from unittest.mock import Mock
import torch.distributed as dist
from sqlstream.stream import refresh
from tests.stream.growing import names, opened, write
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
told = []
with opened(folder / "t.csv", folder) as shared, opened(folder / f"{rank}.csv", folder) as own:
    told.append(names(shared))
    dist.barrier()
    if rank == 0:
        write(folder / "t.csv", *"uvwxyz")
    write(folder / f"{rank}.csv", *"pqrs")
    dist.barrier()
    told += [names(shared), names(own)]
    if rank == 1:
        refresh.open_any = Mock(side_effect=RecursionError("on one rank"))
    try:
        told.append(names(shared))
    except RecursionError:
        told.append("raised")
print(json.dumps(told))
dist.destroy_process_group()
"""


@pytest.mark.timeout(600)
def test_ranks_have_the_same_rows_or_those_of_before(src: Path, tmp_path: Path) -> None:
    """Of one source all ranks see the new version; of what is another source on each, or fails on one, none takes it."""
    script = tmp_path / "rank.py"
    script.write_text(RANK_SCRIPT)
    write(src, *"abcd")
    for rank in range(2):
        write(tmp_path / f"{rank}.csv", *"abcdef")
    ranks = [start_script(script, str(tmp_path), str(rank)) for rank in range(2)]
    done = [rank.finish(300) for rank in ranks]
    assert [rank.returncode for rank in done] == [0, 0], [rank.stderr for rank in done]
    told = [json.loads(rank.stdout) for rank in done]
    assert sorted(told[0][0] + told[1][0]) == [*"abcd"]
    assert sorted(told[0][1] + told[1][1]) == [*"uvwxyz"]
    assert sorted(told[0][2] + told[1][2]) == [*"abcdef"]
    assert all("the ranks have found different versions of it" in rank.stderr for rank in done)
    assert told[1][3] == "raised"
    assert len(told[0][3]) == 3, "rank 0 goes on with the rows that it has"
