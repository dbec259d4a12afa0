"""What each parameter of the drop-in becomes: an option of ours, nothing, or an error that says what to do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from sqlstream.compat.streaming import StreamingDataset
from sqlstream.compat.streaming.base.util import (
    bytes_to_int,
    get_list_arg,
    number_abbrev_to_int,
    retry,
    wait_for_file_to_exist,
)
from sqlstream.compat.streaming.translation.asked import Asked
from sqlstream.compat.streaming.translation.places import place_of
from sqlstream.errors import ConfigError
from tests.compat.streaming.kit import copied

DEFAULTS: dict[str, Any] = {
    "epoch_size": None,
    "predownload": None,
    "cache_limit": None,
    "sampling_method": "balanced",
    "sampling_granularity": 1,
    "partition_algo": "relaxed",
    "num_canonical_nodes": None,
    "batch_size": None,
    "shuffle": False,
    "shuffle_algo": "py1e",
    "shuffle_seed": 9176,
    "shuffle_block_size": None,
    "batching_method": "random",
    "allow_unsafe_types": False,
    "replication": None,
}


def asked(**given: Any) -> Asked:
    return Asked(**DEFAULTS | given)


def test_the_shuffle_becomes_blocks_of_shards_or_a_whole_shuffle() -> None:
    assert asked(shuffle=True).stream_options(9176, 1, None)["shuffle_seed"] == 9176
    assert "shuffle_block_size" not in asked(shuffle=True).stream_options(9176, 1, None)
    assert asked(shuffle=True, shuffle_algo="naive").stream_options(9176, 1, None)["shuffle_block_size"] is None
    block = asked(shuffle=True, shuffle_algo="py1br", shuffle_block_size=1000)
    assert block.window_of([300] * 50) == 4, "so many shards have 1000 samples"
    assert block.stream_options(9176, 1, 4)["shuffle_window"] == 4
    assert block.window_of([300] * 2) == 2
    assert asked(shuffle_block_size=1000).window_of([300] * 50) is None, "nothing is shuffled"


def test_numbers_and_sizes_become_ours() -> None:
    given = asked(epoch_size="2k", batch_size=8, predownload=0, replication=2)
    assert given.run_options == {"epoch_size": 2000, "batch_size": 8, "prefetch": 1, "replication": 2}
    assert asked().run_options == {"epoch_size": None, "batch_size": None, "prefetch": None, "replication": 1}
    assert asked(allow_unsafe_types=True).stream_options(None, 4, None) == {
        "shuffle_seed": None,
        "num_canonical_nodes": 4,
        "source_options": {"allow_pickle": True},
        "on_error": "raise",
    }


@pytest.mark.parametrize(
    "given",
    [
        {"sampling_method": "other"},
        {"sampling_granularity": 0},
        {"partition_algo": "other"},
        {"shuffle_algo": "py1b"},
        {"shuffle_seed": -1},
        {"shuffle_block_size": 0},
        {"batching_method": "other"},
        {"num_canonical_nodes": 0},
        {"replication": 0},
        {"epoch_size": "-5"},
        {"epoch_size": "many"},
        {"epoch_size": "infk"},
        {"epoch_size": math.nan},
        {"epoch_size": [3]},
        {"batch_size": "4"},
        {"shuffle_block_size": "1k"},
        {"shuffle_block_size": 10.5},
        {"predownload": "all"},
    ],
    ids=lambda given: "-".join(f"{name}_{value}" for name, value in given.items()),
)
def test_a_wrong_value_is_named_with_what_is_right(given: dict[str, Any]) -> None:
    (value,) = given.values()
    with pytest.raises(ConfigError, match=str(value)) as raised:
        asked(**given)
    assert "give" in str(raised.value)
    assert isinstance(raised.value, ValueError), "as MosaicML's is"


def test_what_harms_nothing_is_accepted(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "keep_zip": True,
        "partition_algo": "orig",
        "sampling_granularity": 7,
        "download_timeout": 5,
        "download_retry": 0,
    }
    dataset = StreamingDataset(local=str(copied("fixed_only", tmp_path)), predownload=4, cache_limit="1gb", **options)
    assert len(list(dataset)) == dataset.size


def test_options_are_attributes_as_scripts_read_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {"shuffle_algo": "py1s", "shuffle_seed": 7, "batch_size": 2, "batching_method": "stratified"}
    dataset = StreamingDataset(local=str(copied("fixed_only", tmp_path)), **given)
    expected = DEFAULTS | given | {"num_canonical_nodes": 1}
    assert {name: getattr(dataset, name) for name in DEFAULTS if name != "epoch_size"} == {
        name: value for name, value in expected.items() if name != "epoch_size"
    }


def test_what_has_no_equal_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="classes of streams cannot be registered"):
        StreamingDataset(local=str(tmp_path), stream_name="mine")
    contradictions: list[dict[str, Any]] = [{}, {"local": "a", "streams": [object()]}]
    for wrong in contradictions:
        with pytest.raises(ConfigError, match="either streams=, or remote= and local="):
            StreamingDataset(**wrong)
    pickled = str(copied("pickle", tmp_path))
    with pytest.raises(ConfigError, match="allow_unsafe_types=True"):
        StreamingDataset(local=pickled)
    assert len(list(StreamingDataset(local=pickled, allow_unsafe_types=True, batch_size=1))) > 0


def test_places_of_remotes_and_their_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_ACCOUNT_NAME", "me")
    monkeypatch.setenv("AZURE_ACCOUNT_ACCESS_KEY", "secret")
    monkeypatch.setenv("MOSAICML_STREAMING_AWS_REQUESTER_PAYS", "others,paid")
    found = place_of("azure://box/data/", None, "train")
    assert (found.src, found.dst) == ("az://box/data/train/", None)
    assert found.storage_options == {"account_name": "me", "account_key": "secret"}
    assert place_of("s3://paid/data", "cache", None).storage_options == {"requester_pays": True}
    found = place_of("s3://free/data", str(tmp_path), "a/b")
    assert (found.src, found.dst, found.storage_options) == ("s3://free/data/a/b/", tmp_path / ".sqlstream", {})


def test_utilities_do_what_theirs_do(tmp_path: Path) -> None:
    assert [bytes_to_int(size) for size in ("100b", "64kb", "1.5mb", "7", 9)] == [100, 65536, 3 << 19, 7, 9]
    assert [number_abbrev_to_int(number) for number in ("10K", "2m", "1b", "5", 3)] == [10_000, 2_000_000, 10**9, 5, 3]
    with pytest.raises(ConfigError, match="64xb"):
        bytes_to_int("64xb")
    assert (get_list_arg("a,b"), get_list_arg("")) == (["a", "b"], [])
    wait_for_file_to_exist(str(tmp_path), 0.0, 0.0, "")
    with pytest.raises(RuntimeError, match="gone"):
        wait_for_file_to_exist(str(tmp_path / "gone"), 0.0, -1.0, "")


def test_retry_calls_again_after_the_named_errors() -> None:
    calls: list[str] = []

    @retry(KeyError, clean_up_fn=lambda: calls.append("clean"), num_attempts=2, initial_backoff=0, max_jitter=0)  # type: ignore[untyped-decorator]  # theirs takes anything
    def fails(error: Exception) -> None:
        calls.append("call")
        raise error

    with pytest.raises(KeyError):
        fails(KeyError())
    with pytest.raises(ValueError, match="other"):
        fails(ValueError("other"))
    assert calls == ["call", "clean", "call", "clean", "call"]
    assert retry(len)("abc") == 3
    with pytest.raises(ConfigError, match="num_attempts=0"):
        retry(num_attempts=0)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("prepare_shard", "predownload="),
        ("evict_shard", "cache_limit="),
        ("evict_coldest_shard", "cache_limit="),
        ("resample_streams", r"set_epoch\(\)"),
    ],
)
def test_a_method_that_is_not_here_says_what_to_do(name: str, cure: str, tmp_path: Path) -> None:
    dataset = StreamingDataset(local=str(copied("fixed_only", tmp_path)), batch_size=2)
    with pytest.raises(AttributeError, match=f"StreamingDataset.{name} is not here: .*{cure}"):
        getattr(dataset, name)(0)
    assert not hasattr(dataset, name)
