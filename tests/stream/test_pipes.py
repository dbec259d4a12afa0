"""Shards that other programs print: `pipe:…` with `allow_pipes`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.cache import Cache
from sqlstream.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    DamagedShardError,
    SourceChangedError,
    StorageError,
)
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.shards import content, opened, samples, tar_of

NUM_SHARDS, NUM_SAMPLES = 3, 8


def shards(folder: Path) -> list[dict[str, bytes]]:
    """Shards in a folder, and the content of all samples."""
    expected: list[dict[str, bytes]] = []
    for shard in range(NUM_SHARDS):
        made = samples(shard, NUM_SAMPLES)
        (folder / f"s-{shard}.tar").write_bytes(tar_of(made))
        expected += [{"__key__": key.encode(), **parts} for key, parts in made]
    return expected


def pipes(folder: Path, then: str = "cat") -> str:
    """Commands that note each of their runs."""
    return f"pipe:echo run >> {folder}/runs; {then} {folder}/s-{{0..{NUM_SHARDS - 1}}}.tar"


def runs(folder: Path) -> int:
    path = folder / "runs"
    return path.read_text().count("run") if path.exists() else 0


def piped(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    given = {"allow_pipes": True, **options.pop("source_options", {})}
    return opened(src, folder, source_options=given, **options)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_command_is_run_once_for_index_and_first_epoch(
    num_workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = shards(tmp_path)
    with piped(pipes(tmp_path), tmp_path, shuffle_seed=1) as dataset:
        for _ in range(2):
            loader = StreamingDataLoader(dataset, batch_size=5, num_workers=num_workers, collate_fn=list)
            found = [content(sample) for batch in loader for sample in batch]
            assert sorted(map(str, found)) == sorted(map(str, expected))
        assert runs(tmp_path) == NUM_SHARDS
        check_invariants(dataset.cache.path)
    with piped(pipes(tmp_path), tmp_path) as again:
        assert [content(sample) for sample in again] == expected
    assert runs(tmp_path) == NUM_SHARDS, "index and cache know commands by their text"
    assert not caplog.records, "their output is compared by its hash: no server is asked for a version"


def test_a_filter_or_few_columns_take_whole_shards_too(tmp_path: Path) -> None:
    expected = shards(tmp_path)
    with piped(pipes(tmp_path), tmp_path, shards="members", where="txt IS NOT NULL", columns_to_download=["txt"]) as dataset:
        wanted = [sample["txt"] for sample in expected if "txt" in sample]
        assert [sample["txt"] for sample in dataset] == wanted
        assert dataset.cache.statistics().entries == NUM_SHARDS
    assert runs(tmp_path) == NUM_SHARDS


def test_sql_sees_the_text_of_the_command_and_nothing_secret_in_it(tmp_path: Path) -> None:
    shards(tmp_path)
    command = f"pipe:env TOKEN=hidden cat {tmp_path}/s-0.tar"
    with piped(command, tmp_path) as dataset:
        (url,) = {row["__url__"] for row in dataset.query("SELECT __url__ FROM dataframe").to_pylist()}
        assert url == command.replace("hidden", "***")
        assert len(list(dataset)) == NUM_SAMPLES
    for path in (tmp_path / "cache").rglob("*"):
        assert not path.is_file() or b"hidden" not in path.read_bytes(), path


@pytest.mark.parametrize("then", ["gzip -c", "zstd -qc" if Path("/usr/bin/zstd").exists() else "bzip2 -c"])
def test_output_that_is_compressed_is_unpacked(then: str, tmp_path: Path) -> None:
    expected = shards(tmp_path)
    with piped(pipes(tmp_path, then), tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected


def test_commands_stand_beside_urls_and_translated_commands_are_not_run(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = shards(tmp_path)
    server.objects["/s-1.tar"] = (tmp_path / "s-1.tar").read_bytes()
    src = f"{tmp_path}/s-0.tar::pipe:curl -s {server.url}/s-1.tar::pipe:cat {tmp_path}/s-2.tar | cat"
    with piped(src, tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected
        urls = [row["__url__"] for row in dataset.query("SELECT DISTINCT __url__ FROM dataframe").to_pylist()]
        assert urls == [f"{tmp_path}/s-0.tar", f"{server.url}/s-1.tar", f"pipe:cat {tmp_path}/s-2.tar | cat"]


def test_no_command_is_run_unless_that_is_asked_for(tmp_path: Path) -> None:
    shards(tmp_path)
    with pytest.raises(ConfigError, match=r"is a command, .*allow_pipes"):
        opened(pipes(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="allow_pipes='yes' is no bool"):
        opened(pipes(tmp_path), tmp_path, source_options={"allow_pipes": "yes"})
    assert runs(tmp_path) == 0


def test_a_command_of_a_remote_list_is_refused_and_one_of_an_own_list_is_run(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = shards(tmp_path)
    listed = [{"url": f"pipe:echo run >> {tmp_path}/runs; cat {tmp_path}/s-{shard}.tar"} for shard in range(NUM_SHARDS)]
    document = json.dumps({"wids_version": 1, "shardlist": listed}).encode()
    server.objects["/wids.json"] = document
    with pytest.raises(AccessDeniedError, match=r"pipe:echo run .* is a command, named by http.*wids\.json"):
        piped(f"{server.url}/wids.json", tmp_path, allowed_roots=["pipe:", "/"])
    assert runs(tmp_path) == 0
    (tmp_path / "wids.json").write_bytes(document)
    with pytest.raises(ConfigError, match="allow_pipes"):
        opened(str(tmp_path / "wids.json"), tmp_path)
    with piped(str(tmp_path / "wids.json"), tmp_path) as dataset:
        assert [content(sample) for sample in dataset] == expected


@pytest.mark.parametrize("is_remote", [True, False])
def test_a_command_in_a_row_is_refused(is_remote: bool, server: FaultyHttpServer, tmp_path: Path) -> None:
    table = f"image\npipe:touch {tmp_path}/ran.jpg\n"
    server.objects["/t.csv"] = table.encode()
    (tmp_path / "t.csv").write_text(table)
    src = f"{server.url}/t.csv" if is_remote else str(tmp_path / "t.csv")
    dataset = piped(src, tmp_path, columns_to_download=["image"], allowed_roots=["pipe:", "/"], on_error="raise")
    with pytest.raises(AccessDeniedError, match="is a command, "):
        list(dataset)
    assert not (tmp_path / "ran.jpg").exists()


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", "the command ended with status 3"),
        ("head -c 2000 {0}/s-0.tar; kill -KILL $$", "the command was killed by SIGKILL"),
        ("cat {0}/missing.tar | cat", r"the command printed nothing; it said: .*missing\.tar"),
        ("no-such-program {0}/s-0.tar", "the command ended with status 127"),
    ],
)
def test_a_command_that_fails_as_it_is_indexed_is_an_error_that_names_it(command: str, reason: str, tmp_path: Path) -> None:
    shards(tmp_path)
    with pytest.raises(StorageError, match=f"the source pipe:.* cannot be read: .*{reason}"):
        piped("pipe:" + command.format(tmp_path), tmp_path)
    assert not list((tmp_path / "cache/data").rglob("*.*")), "nothing of it stays"


def test_output_that_ends_early_is_a_damaged_shard(tmp_path: Path) -> None:
    shards(tmp_path)
    with pytest.raises(DamagedShardError, match="pipe:head"):
        piped(f"pipe:head -c 9000 {tmp_path}/s-0.tar | cat", tmp_path)


def test_output_has_to_fit_the_limit(tmp_path: Path) -> None:
    shards(tmp_path)
    dataset = piped(pipes(tmp_path), tmp_path, cache_limit="16kb")  # a shard has more
    with pytest.raises(CacheFullError, match="pipe:"):
        list(dataset)


def test_a_command_that_prints_something_else_later_is_never_mixed_with_what_was_indexed(tmp_path: Path) -> None:
    shards(tmp_path)
    src = pipes(tmp_path)
    with piped(src, tmp_path) as dataset:
        assert len(dataset) == NUM_SHARDS * NUM_SAMPLES
    made = samples(0, NUM_SAMPLES)
    (tmp_path / "s-0.tar").write_bytes(tar_of(made[::-1]))  # as many bytes
    Cache(tmp_path / "cache").clear()
    with piped(src, tmp_path, on_error="raise") as dataset, pytest.raises(SourceChangedError, match="pipe:"):
        dataset[0]
    with piped(src, tmp_path, source_options={"source_version": "2"}) as renewed:
        assert renewed[0]["__key__"] == made[-1][0]


def test_an_entry_of_another_output_is_fetched_again(tmp_path: Path) -> None:
    expected = shards(tmp_path)
    src, good = pipes(tmp_path), (tmp_path / "s-0.tar").read_bytes()
    with piped(src, tmp_path) as dataset:
        len(dataset)
    Cache(tmp_path / "cache").clear()
    (tmp_path / "s-0.tar").write_bytes(tar_of(samples(0, NUM_SAMPLES)[::-1]))
    with piped(src, tmp_path, source_options={"source_version": "2"}, index_col_name="__key__", max_size=5) as other:
        list(other)
    (tmp_path / "s-0.tar").write_bytes(good)
    with piped(src, tmp_path, on_error="raise") as dataset:
        assert [content(sample) for sample in dataset] == expected


def test_a_run_goes_on_from_its_state(tmp_path: Path) -> None:
    shards(tmp_path)
    with piped(pipes(tmp_path), tmp_path, shuffle_seed=3) as dataset:
        whole = [sample["__key__"] for sample in dataset]
    for at in range(0, len(whole), 5):
        with piped(pipes(tmp_path), tmp_path, shuffle_seed=3) as first:
            rows = iter(first)
            for _ in range(at):
                next(rows)
            state = first.state_dict()
        with piped(pipes(tmp_path), tmp_path, shuffle_seed=3) as second:
            second.load_state_dict(state)
            assert [sample["__key__"] for sample in second] == whole[at:]


@pytest.mark.parametrize("then", ["cat", "gzip -c"])
def test_commands_need_no_index_first(then: str, tmp_path: Path) -> None:
    expected = shards(tmp_path)
    with piped(pipes(tmp_path, then), tmp_path, lazy_index_chunk_size=1) as dataset:
        assert runs(tmp_path) == 1, "the first shard says which columns there are"
        found = [content(sample) for sample in dataset]
        assert found == expected
        assert [content(sample) for sample in dataset] == expected
        if then == "cat":
            assert runs(tmp_path) == NUM_SHARDS
        assert len(dataset) == len(expected)
