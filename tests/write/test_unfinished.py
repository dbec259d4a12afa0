"""A wildcard over shards whose writing has not ended: TARs, ZIPs and Parquet files have no index that would say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from sqlstream import StreamingDataset
from sqlstream.index.sources.places.wildcard import match_files
from sqlstream.storage.base.protocols import NO_REQUESTS
from sqlstream.testing.storage import MemoryStore
from sqlstream.write import WriteOptions
from tests.write.programs import write

WARNING = "has not ended (.sqlstream-write.jsonl is there)"


class Broken(Exception):
    """What the source of samples raises."""


def break_off(number: int) -> None:
    if number == 5:
        raise Broken


def test_a_dataset_over_a_writing_that_broke_off_is_warned_of_until_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "out"
    with pytest.raises(Broken):
        write("tar", out, WriteOptions(), break_off)
    with StreamingDataset(f"{out}/*.tar", tmp_path / "cache") as dataset:
        assert len(dataset) == 4
    assert [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]
    caplog.clear()
    write("tar", out, WriteOptions(resume=True))
    assert len(match_files(f"{out}/*.tar", NO_REQUESTS)) == 4
    assert WARNING not in caplog.text


@pytest.mark.parametrize("has_ended", [False, True])
def test_in_a_store_the_listing_shows_it_and_the_journal_says_whether_it_has_ended(
    has_ended: bool, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore({})
    options = WriteOptions(remote=store)
    if has_ended:
        write("tar", "s3://bucket/out", options)
    else:
        with pytest.raises(Broken):
            write("tar", "s3://bucket/out", options, break_off)
    assert "s3://bucket/out/.sqlstream-write.jsonl" in store.objects
    assert len(match_files("s3://bucket/*/*.tar", store)) == (4 if has_ended else 2)
    assert (WARNING in caplog.text) is not has_ended
    caplog.clear()
    store.objects["s3://bucket/other/0.tar"] = b"tar"
    match_files("s3://bucket/other/*.tar", store)
    assert WARNING not in caplog.text
