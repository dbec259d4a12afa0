"""Options: what users may write, and what they are told when it is wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pwd
import site
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sqlstream
from sqlstream import StreamingDataset
from sqlstream.config import (
    AspectBuckets,
    Buckets,
    IndexOptions,
    Lengths,
    Packs,
    SampleOptions,
    SourceOptions,
    StorageOptions,
    VideoBuckets,
    check_at_least,
    flag_of,
    parse_bytes,
    parse_duration,
    parse_limit,
)
from sqlstream.environment import child_environment, default_cache_directory
from sqlstream.errors import ConfigError
from sqlstream.storage.base.identity import Identity


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0, 0),
        (10_000, 10_000),
        ("10000", 10_000),
        ("100b", 100),
        ("10kb", 10 * 1024),
        ("10k", 10 * 1024),
        ("500 MB", 500 * 1024**2),
        ("1.5 GB", 3 * 1024**3 // 2),
        ("2GiB", 2 * 1024**3),
        (" 1tb ", 1024**4),
        (2**53 + 1, 2**53 + 1),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_parse_bytes_reads_what_sds_users_write(value: int | str | None, expected: int | None) -> None:
    assert parse_bytes(value) == expected


@given(st.integers(0, 2**50), st.sampled_from(["", "b", "kb", "MB", " gb", "TiB"]))
def test_parse_bytes_grows_with_the_number_and_takes_every_unit(number: int, unit: str) -> None:
    scale = parse_bytes(f"1{unit}")
    assert scale is not None
    assert parse_bytes(f"{number}{unit}") == number * scale


@pytest.mark.parametrize("value", ["", "lots", "-1", -1, "10 parsecs", "1e9", True, "1,5gb", "gb"])
def test_parse_bytes_refuses_what_is_no_size_and_names_option_value_and_cure(value: int | str) -> None:
    with pytest.raises(ConfigError, match=r"cache_limit=.*is not a size: give bytes") as caught:
        parse_bytes(value, "cache_limit")
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("value", "seconds"), [("90s", 90), ("2m", 120), ("12h", 43_200), ("7d", 604_800), ("0.5 W", 302_400)])
def test_parse_duration_reads_units_of_time(value: str, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize("value", ["7", "d", "-1d", "7 days", ""])
def test_parse_duration_refuses_what_is_no_duration_and_names_the_cure(value: str) -> None:
    with pytest.raises(ConfigError, match=r"older-than=.*is not a duration: give a number with s, m, h, d or w"):
        parse_duration(value)


def test_default_cache_directory_follows_the_environment_at_call_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SQLSTREAM_CACHE", str(tmp_path / "own"))
    assert default_cache_directory() == tmp_path / "own"
    monkeypatch.delenv("SQLSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_directory() == tmp_path / "xdg" / "sqlstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_directory() == Path.home() / ".cache" / "sqlstream"


def test_a_user_without_a_home_directory_is_told_to_name_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "SQLSTREAM_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    with pytest.raises(ConfigError, match="no home directory for a cache: give dst, or set SQLSTREAM_CACHE"):
        default_cache_directory()
    assert Identity(StorageOptions()).prefix("s3://bucket/key") == ""


def test_packages_that_are_installed_come_behind_the_standard_library_of_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/own")
    root = str(Path(sqlstream.__file__).parents[1])
    assert child_environment()["PYTHONPATH"].split(os.pathsep) == [root, "/own"]
    monkeypatch.setattr(site, "getsitepackages", lambda: [root])
    assert child_environment()["PYTHONPATH"] == "/own"


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        StorageOptions().num_retries = 4  # type: ignore[misc]  # the point of the test
    with pytest.raises(dataclasses.FrozenInstanceError):
        IndexOptions(src="a.csv").src = "b.csv"  # type: ignore[misc]  # the point of the test


def test_storage_options_refuse_values_out_of_range_by_the_name_that_users_know() -> None:
    with pytest.raises(ConfigError, match="num_downloading_retries=-1 is out of range: give 0 or more"):
        StorageOptions(num_retries=-1)
    with pytest.raises(ConfigError, match="num_downloading_workers=0 is out of range: give 1 or more"):
        StorageOptions(num_threads=0)
    for name in ("timeout", "read_timeout", "connect_timeout"):
        with pytest.raises(ConfigError, match=rf"storage_options\['{name}'\]=nan is out of range: give 0.001 or more"):
            StorageOptions(storage_options={name: math.nan})


def test_storage_options_are_named_by_texts() -> None:
    with pytest.raises(ConfigError, match="storage_options has the key 5, which is no text"):
        StorageOptions(storage_options={5: "a"})  # type: ignore[dict-item]  # the point of the test


def test_a_timeout_may_be_infinite_and_is_one_that_every_client_takes() -> None:
    for options in ({"timeout": math.inf}, {"timeout": 1e300}):
        assert StorageOptions(storage_options=options).total_timeout_seconds == 1e9


def test_check_at_least_takes_the_bound_itself() -> None:
    check_at_least("prefetch", 1, 1)
    with pytest.raises(ConfigError, match="prefetch=0 is out of range: give 1 or more"):
        check_at_least("prefetch", 0, 1)
    with pytest.raises(ConfigError, match=r"max_failure_ratio=nan is out of range: give 0\.0 or more"):
        check_at_least("max_failure_ratio", float("nan"), 0.0)
    with pytest.raises(ConfigError, match=r"timeout=10+ is out of range: give at most 1\.79"):
        check_at_least("timeout", 10**400, 0.0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("encoding", name) for name in ("utf-9", "", "rot13", "idna", 5)),
        *((name, 5) for name in ("delimiter", "quote_char", "path_prefix", "label_column")),
    ],
)
def test_source_options_refuse_what_is_no_text_and_what_is_no_encoding(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{name}={value!r} is no.*: give "):
        SourceOptions.of({name: value})


@pytest.mark.parametrize("name", ["delimiter", "quote_char"])
def test_a_mark_of_csv_is_one_that_a_line_can_hold(name: str) -> None:
    for value in ("\0", "\n", "\r", "é", "::"):
        with pytest.raises(ConfigError, match=rf"^{name}=.* is not a single ASCII character"):
            SourceOptions.of({name: value})
    with pytest.raises(ConfigError, match=r"delimiter and quote_char are both ';': give quote_char=''"):
        SourceOptions.of({"delimiter": ";", "quote_char": ";"})


def test_source_options_take_every_name_of_an_encoding() -> None:
    for name in ("UTF8", "utf-16", "UTF-32-BE", "latin-1", "cp1252", "shift_jis", "gb18030"):
        assert SourceOptions(encoding=name).encoding == name


def test_a_flag_may_be_a_number_that_means_one_and_is_no_text() -> None:
    for value, flag in ((True, True), (0, False), (1, True), (np.bool_(False), False)):
        assert flag_of("decode", value) is flag
    wrong: Any
    for wrong in ("false", "", b"x", None, 2, [True], {}, np.array([True])):
        with pytest.raises(ConfigError, match=r"^decode=.* is no bool: give True or False$"):
            flag_of("decode", wrong)


def test_check_at_least_returns_whole_numbers_of_python_that_have_64_bits() -> None:
    assert type(check_at_least("epoch", np.int32(3), 0)) is int  # type: ignore[call-overload]  # a number of numpy
    assert check_at_least("epoch", 2**63 - 1, 0) == 2**63 - 1
    assert check_at_least("max_failure_ratio", 0.5, 0.0) == 0.5
    with pytest.raises(ConfigError, match="epoch=9223372036854775808 is out of range: give at most 9223372036854775807"):
        check_at_least("epoch", 2**63, 0)


@pytest.mark.parametrize(
    "wrong", [np.array([1, 2]), np.array([1]), np.array([]), np.array(["raise"]), torch.ones(2), torch.ones(0)]
)
def test_an_array_where_one_value_is_wanted_is_refused_by_the_name_of_the_option(wrong: Any) -> None:
    for options in (
        {"batch_size": wrong},
        {"drop_last": wrong},
        {"max_failure_ratio": wrong},
        {"num_downloading_workers": wrong},
        {"eviction_policy": wrong},
        {"index_limit": wrong},
        {"refresh": wrong},
    ):
        (name,) = options
        with pytest.raises(ConfigError, match=rf"^{name}(\[0\])?="):
            StreamingDataset([{"text": "a"}], **options)
    for name in ("leftovers", "sync", "unknown"):
        with pytest.raises(ConfigError, match=rf"^Buckets: {name}=.* is unknown: give "):
            Buckets("label", global_batch_size=2, **{name: wrong})


@pytest.mark.parametrize("wrong", [5, np.array(5), np.array([1, 2]), torch.ones(()), torch.ones(2)])
def test_transforms_that_are_no_list_of_callables_are_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^transforms.* is (no list|not callable): give "):
        StreamingDataset([{"text": "a"}], transforms=wrong)


def test_numbers_are_taken_as_those_of_python_whatever_holds_one() -> None:
    number: Any
    for number in (np.int64(2), np.float64(2), np.array(2), torch.tensor(2), Decimal(2)):
        samples = SampleOptions(prefetch=number, num_random_access_retries=number, retained_samples=number)
        assert {*map(type, (samples.prefetch, samples.num_random_access_retries, samples.retained_samples))} == {int}
        packs = Packs("n", capacity=number, max_rows=number)
        assert json.dumps([packs.capacity, packs.max_rows]) == "[2, 2]"
        assert json.dumps(AspectBuckets.of([(number, number)]).fingerprint) == '{"aspect": [[2, 2]]}'
        assert json.dumps(Lengths((number,)).fingerprint) == '{"lengths": [2]}'
    for number in (np.bool_(True), torch.tensor(True), 1j):
        with pytest.raises(ConfigError, match="is no number: give 0"):
            check_at_least("max_failure_ratio", number, 0.0)


def test_buckets_take_arrays_of_sizes_and_of_lengths() -> None:
    sizes: Any = np.array([[64, 48], [48, 64]], np.int32)
    assert AspectBuckets.of(sizes).sizes == ((64, 48), (48, 64))
    assert Lengths(np.array([128, 512])).bucket_of(129) == 512  # type: ignore[arg-type]  # an array
    for make in (AspectBuckets.of, VideoBuckets.of):
        with pytest.raises(ConfigError, match="sizes=5 is no list of "):
            make(5)  # type: ignore[arg-type]  # the point of the test


def test_a_limit_of_more_bytes_than_64_bits_count_is_refused_and_whole_numbers_stay_exact() -> None:
    assert parse_bytes(2**60 + 1) == 2**60 + 1
    for limit in (2**63, "8388608tb", 10**30):
        with pytest.raises(ConfigError, match=r"^cache_limit=.* is out of range: give less than 2\*\*63 bytes, or None"):
            parse_limit(limit, "cache_limit")


def test_an_empty_prefix_of_paths_is_not_the_working_directory() -> None:
    with pytest.raises(ConfigError, match=r"^path_prefix='' is empty: give a place, '\.' for the working directory"):
        SourceOptions(path_prefix="")
