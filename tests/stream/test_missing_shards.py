"""Shards that are not there, or do not come: an error, or left out (`missing_shards`); what comes again is never left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, UnknownLengthError
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.stream.shards import opened, serve, tar_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NUM_SHARDS, NUM_SAMPLES = 6, 4
DENIED = FaultyAnswer(fault=Fault.STATUS, status=403)


@pytest.fixture
def src(server: FaultyHttpServer) -> str:
    serve(server, NUM_SHARDS, NUM_SAMPLES, 200)
    return f"{server.url}/data/s-{{000..{NUM_SHARDS - 1:03}}}.tar"


def path_of(shard: int) -> str:
    return f"/data/s-{shard:03}.tar"


def without(src: str, folder: Path, rule: str = "skip_unreadable", **options: Any) -> StreamingDataset:
    given: dict[str, Any] = {"lazy_index_chunk_size": 1, "shuffle_window": 2, "source_options": {"missing_shards": rule}}
    return opened(src, folder, **(given | options))


def shards_of(samples: Any) -> list[int]:
    """The shards of samples, each as often as it has some."""
    return sorted(int(sample["__shard__"]) for sample in samples)


def all_but(missing: Sequence[int]) -> list[int]:
    return [shard for shard in range(NUM_SHARDS) if shard not in missing for _ in range(NUM_SAMPLES)]


@pytest.mark.parametrize("shuffle_seed", [None, 1])
@pytest.mark.parametrize("shards", ["whole", "members"])
@pytest.mark.parametrize("missing", [[2], [0], [5], [0, 1, 5]], ids=str)
def test_shards_that_are_not_there_are_left_out(
    missing: list[int], shards: str, shuffle_seed: int | None, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    for shard in missing:
        del server.objects[path_of(shard)]
    with without(src, tmp_path, shards=shards, shuffle_seed=shuffle_seed) as dataset:
        epochs = [[sample["__key__"] for sample in dataset] for _ in range(2)]
        assert shards_of(dataset) == all_but(missing)
        assert len(dataset) == len(all_but(missing))
        dataset.set_epoch(0)
        assert [sample["__key__"] for sample in dataset] == epochs[0]
    with without(src, tmp_path, shards=shards, shuffle_seed=shuffle_seed) as dataset:  # what was noted says the same
        assert [[sample["__key__"] for sample in dataset] for _ in range(2)] == epochs


def test_each_shard_that_is_left_out_is_said_and_counted_once(
    src: str, server: FaultyHttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for shard in (0, 3):
        del server.objects[path_of(shard)]
    with without(src, tmp_path) as dataset, caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert shards_of(dataset) == all_but([0, 3])
    with without(src, tmp_path) as dataset:
        list(dataset)
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert [text.split(" is left out")[0][-9:] for text in said[:-1]] == ["s-000.tar", "s-003.tar"]
    assert "2 of 6 shards are not there, and left out: " in said[-1]
    with Cache(tmp_path / "cache") as cache:
        assert sorted((failure.url[-9:], failure.count) for failure in cache.failures()) == [("s-000.tar", 1), ("s-003.tar", 1)]


@pytest.mark.parametrize("rule", ["raise", "skip", "skip_unreadable"])
def test_no_shard_at_all_is_an_error_that_names_the_first(
    rule: str, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects.clear()
    with pytest.raises(ObjectNotFoundError, match="s-000"):
        without(src, tmp_path, rule)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_goes_on_behind_and_before_shards_that_are_left_out(
    num_workers: int, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    for shard in (1, 4):
        del server.objects[path_of(shard)]

    def keys(batch: list[dict[str, Any]]) -> list[str]:
        return [sample["__key__"] for sample in batch]

    def loader_of(folder: Path) -> StreamingDataLoader:
        dataset = without(src, folder, shuffle_seed=3, batch_size=3)
        return StreamingDataLoader(dataset, batch_size=3, num_workers=num_workers, collate_fn=keys)

    loader, states = loader_of(tmp_path / "a"), list[dict[str, Any]]()
    wanted = list[list[str]]()
    for batch in loader:
        wanted.append(batch)
        states.append(loader.state_dict())
    assert sorted(key for batch in wanted for key in batch) == sorted({key for batch in wanted for key in batch})
    assert len(wanted) * 3 >= 4 * NUM_SAMPLES
    for number in (0, 2, len(wanted) - 2):
        again = loader_of(tmp_path / f"b{number}")  # another node, that has seen nothing
        again.load_state_dict(states[number])
        assert list(again) == wanted[number + 1 :]


def test_a_shard_that_comes_later_is_taken_by_the_next_opening(src: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    data = server.objects.pop(path_of(3))
    with without(src, tmp_path) as dataset:
        assert shards_of(dataset) == all_but([3])
        server.objects[path_of(3)] = data
        assert shards_of(dataset) == all_but([3])  # one run has one answer
        assert len(dataset) == 5 * NUM_SAMPLES
    with without(src, tmp_path) as dataset:
        assert shards_of(dataset) == all_but([])


@pytest.mark.parametrize("shards", ["whole", "members"])
@pytest.mark.parametrize("shard", [0, 2, 5])
def test_a_shard_that_may_not_be_read_is_left_out_of_this_epoch_alone(
    shard: int, shards: str, src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.script(path_of(shard), always=DENIED)
    with pytest.raises(AccessDeniedError, match=f"s-00{shard}"), without(src, tmp_path, "skip", shards=shards) as dataset:
        list(dataset)
    with without(src, tmp_path, shards=shards) as dataset:
        assert shards_of(dataset) == all_but([shard])
        with pytest.raises(UnknownLengthError):
            len(dataset)
        server.script(path_of(shard))
        assert shards_of(dataset) == all_but([])
        assert len(dataset) == NUM_SHARDS * NUM_SAMPLES
    with without(src, tmp_path, shards=shards) as dataset:
        assert shards_of(dataset) == all_but([])


def test_a_shard_whose_bytes_do_not_come_is_left_out_of_this_epoch_alone(
    src: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    looked_at = FaultyAnswer(fault=Fault.NO_RANGES)  # as any other answer, to a HEAD
    with without(src, tmp_path, shards="whole") as dataset:
        server.script(path_of(2), looked_at, always=DENIED)
        assert shards_of(dataset) == all_but([2])
        assert [request.method for request in server.requests(path_of(2))][:2] == ["HEAD", "GET"]
        server.script(path_of(2))
        assert shards_of(dataset) == all_but([])


def test_a_filter_notes_nothing_of_a_shard_that_does_not_come(src: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.script(path_of(2), always=DENIED)
    with without(src, tmp_path, where="cls > 0") as dataset:
        assert shards_of(dataset) == all_but([2])
        server.script(path_of(2))
        assert shards_of(dataset) == all_but([])
        assert len(dataset) == NUM_SHARDS * NUM_SAMPLES


def test_workers_that_stay_ask_again_in_the_next_epoch(src: str, server: FaultyHttpServer, tmp_path: Path) -> None:
    server.script(path_of(2), always=DENIED)
    dataset = without(src, tmp_path, shuffle_seed=1)
    loader = StreamingDataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True, collate_fn=shards_of)
    assert sorted(shard for batch in loader for shard in batch) == all_but([2])
    server.script(path_of(2))
    list(loader)  # workers may have begun it before
    assert sorted(shard for batch in loader for shard in batch) == all_but([])


def test_an_index_that_is_built_whole_leaves_out_what_is_not_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for shard in (0, 2):
        (tmp_path / f"{shard}.tar").write_bytes(tar_of([(f"{shard}", {"cls": b"1"})]))
    src = f"{tmp_path}/{{0..2}}.tar"
    for lazy in ({}, {"lazy_index_chunk_size": 1}):
        with opened(src, tmp_path / str(len(lazy)), source_options={"missing_shards": "skip"}, **lazy) as dataset:
            assert [sample["__key__"] for sample in dataset] == ["0", "2"]
            assert len(dataset) == 2
        assert "damaged" not in caplog.text
    assert f"{src}: 1 of 3 shards are not there, and left out: {tmp_path}/1.tar" in caplog.text
    (tmp_path / "1.tar").write_bytes(tar_of([("1", {"cls": b"1"})]))
    for lazy in ({}, {"lazy_index_chunk_size": 1}):
        with opened(src, tmp_path / str(len(lazy)), source_options={"missing_shards": "skip"}, **lazy) as dataset:
            assert [sample["__key__"] for sample in dataset] == ["0", "1", "2"]
    with pytest.raises(ConfigError, match="needs lazy_index_chunk_size"):
        opened(src, tmp_path, source_options={"missing_shards": "skip_unreadable"})
    with pytest.raises(ConfigError, match="missing_shards="):
        opened(src, tmp_path, source_options={"missing_shards": "never"})
