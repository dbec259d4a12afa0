"""Shards of a store that are not there, or do not come: an error, the end, or left out, as the handler says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sqlstream.compat.webdataset as wds
from sqlstream.errors import AccessDeniedError, ObjectNotFoundError
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.compat.webdataset.kit import number_of, opened
from tests.stream.shards import tar_of

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

NUM_SHARDS, NUM_SAMPLES = 6, 4
DENIED = FaultyAnswer(fault=Fault.STATUS, status=403)
GO_ON: list[Any] = [wds.warn_and_continue, wds.ignore_and_continue, lambda _: True]


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        for shard in range(NUM_SHARDS):
            made = [(f"{number:03}", {"cls": b"%d" % number}) for number in numbers(shard)]
            server.objects[f"/t-{shard:05}.tar"] = tar_of(made)
        yield server


def numbers(shard: int) -> range:
    return range(shard * NUM_SAMPLES, (shard + 1) * NUM_SAMPLES)


def all_but(*missing: int) -> list[int]:
    return [number for shard in range(NUM_SHARDS) if shard not in missing for number in numbers(shard)]


def tupled(number: int) -> tuple[int]:
    return (number,)


def chain(server: FaultyHttpServer, tmp_path: Path, **options: Any) -> wds.WebDataset:
    urls = f"{server.url}/t-{{00000..{NUM_SHARDS - 1:05}}}.tar"
    return opened(urls, tmp_path, **options).decode().map(number_of)


@pytest.mark.filterwarnings("ignore:ObjectNotFoundError")  # what runs as it is calls the handler
@pytest.mark.parametrize("handler", GO_ON, ids=["warn", "ignore", "own"])
@pytest.mark.parametrize("missing", [(2,), (0,), (5,), (0, 1, 5)], ids=str)
def test_missing_shards_are_left_out(missing: tuple[int, ...], handler: Any, server: FaultyHttpServer, tmp_path: Path) -> None:
    for shard in missing:
        del server.objects[f"/t-{shard:05}.tar"]
    for folder, shuffled in (("a", False), ("b", 100)):
        with chain(server, tmp_path / folder, handler=handler, shardshuffle=shuffled) as dataset:
            for some in (dataset, dataset.compose(iter)):  # the last one runs as it is
                assert [sorted(some) for _ in range(2)] == [all_but(*missing)] * 2


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_goes_on_without_missing_shards(num_workers: int, server: FaultyHttpServer, tmp_path: Path) -> None:
    del server.objects["/t-00003.tar"]

    def loader_of(folder: Path) -> wds.WebLoader:
        dataset = chain(server, folder, handler=wds.warn_and_continue, shardshuffle=100).map(tupled).batched(3)
        return wds.WebLoader(dataset, batch_size=None, num_workers=num_workers)

    with loader_of(tmp_path / "a") as loader, loader_of(tmp_path / "b") as again:
        wanted, state = list[list[int]](), dict[str, Any]()
        for batch in loader:
            wanted.append(batch[0].tolist())
            state = loader.state_dict() if len(wanted) == 3 else state
        assert sorted(number for batch in wanted for number in batch) == all_but(3)
        again.load_state_dict(state)
        assert [batch.tolist() for (batch,) in again] == wanted[3:]


def test_a_shard_that_is_missing_is_an_error_or_the_end_where_the_handler_says_so(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    del server.objects["/t-00003.tar"]
    with chain(server, tmp_path) as dataset, pytest.raises(ObjectNotFoundError, match=r"t-00003\.tar does not exist"):
        list(dataset)
    with chain(server, tmp_path, handler=wds.ignore_and_stop) as dataset:
        found = list(dataset)  # shards are looked at some ahead
        assert found == [*range(3 * NUM_SAMPLES)][: len(found)]
    server.objects.clear()
    for handler in (wds.reraise_exception, *GO_ON):
        with pytest.raises(ObjectNotFoundError, match=r"t-00000\.tar does not exist"):
            chain(server, tmp_path / "none", handler=handler)


def test_a_shard_that_may_not_be_read_is_left_out_of_one_epoch(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.script("/t-00003.tar", always=DENIED)
    with chain(server, tmp_path) as dataset, pytest.raises(AccessDeniedError, match="t-00003"):
        list(dataset)
    with chain(server, tmp_path, handler=wds.ignore_and_continue) as dataset:
        assert list(dataset) == all_but(3)
        server.script("/t-00003.tar")
        assert list(dataset) == all_but()


def test_a_handler_of_the_user_ends_at_a_shard_of_this_machine_that_is_not_there(tmp_path: Path) -> None:
    for number in (0, 2):
        (tmp_path / f"{number}.tar").write_bytes(tar_of([(str(number), {"cls": b"%d" % number})]))
    asked: list[Exception] = []

    def first_alone(error: Exception) -> bool:
        asked.append(error)
        return len(asked) < 2

    with opened(f"{tmp_path}/{{0..4}}.tar", tmp_path, handler=first_alone) as dataset:
        assert [number_of(sample) for sample in dataset] == [0, 2]
    assert [str(error)[-6:-1] for error in asked] == ["1.tar", "3.tar"]
