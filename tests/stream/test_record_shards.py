"""Files of MessagePack or CBOR maps as a source."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cbor2
import msgpack
import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import DamagedShardError, SchemaError
from sqlstream.testing.servers import FaultyHttpServer
from tests.stream.shards import opened

BOTH = pytest.mark.parametrize("extension", ["msgpack", "cbor"])


def rows(start: int, num_rows: int) -> list[dict[str, Any]]:
    return [
        {
            "__key__": f"k{number:04}",
            "jpg": bytes([number % 251]) * (500 + number),
            "cls": number % 5,
            "txt": f"n° {number}",
            "meta": {"boxes": [[number, 1.5]], "ok": True},
            **({"mask": b"m%d" % number} if number % 3 == 0 else {}),
        }
        for number in range(start, start + num_rows)
    ]


def written(extension: str, records: Sequence[object]) -> bytes:
    pack = cbor2.dumps if extension == "cbor" else msgpack.packb
    return b"".join(pack(record) for record in records)


def read(dataset: StreamingDataset) -> list[dict[str, Any]]:
    """The samples, with what the maps said, in the order of their keys."""
    names = ("__key__", "jpg", "cls", "txt", "meta", "mask")
    found = [{name: sample[name] for name in names if sample.get(name) is not None} for sample in dataset]
    return sorted(found, key=lambda sample: str(sample["__key__"]))


@BOTH
def test_maps_are_rows_wherever_they_lie_and_whatever_the_unit(
    extension: str, server: FaultyHttpServer, tmp_path: Path
) -> None:
    for shard in range(3):
        data = written(extension, rows(10 * shard, 10))
        server.objects[f"/s-{shard}.{extension}"] = data
        (tmp_path / f"s-{shard}.{extension}").write_bytes(data)
    expected = rows(0, 30)
    assert read(opened(tmp_path / f"s-*.{extension}", tmp_path)) == expected
    for unit in ("members", "whole"):
        src = f"{server.url}/s-{{0..2}}.{extension}"
        assert read(opened(src, tmp_path / unit, shards=unit, shuffle_seed=1)) == expected


@BOTH
def test_sql_sees_what_json_can_say_and_samples_have_the_rest(extension: str, tmp_path: Path) -> None:
    (tmp_path / f"a.{extension}").write_bytes(written(extension, rows(0, 20)))
    dataset = opened(tmp_path / f"a.{extension}", tmp_path, where="cls = 3 AND txt LIKE '% 8'", columns_to_download=["jpg"])
    (sample,) = dataset
    assert (sample["__sample_key__"], sample["__shard__"]) == ("k0008", 0)
    assert sample["jpg"] == rows(8, 1)[0]["jpg"]
    assert sample["meta"] == {"boxes": [[8, 1.5]], "ok": True}
    assert "mask" not in sample
    bare = opened(tmp_path / f"a.{extension}", tmp_path, columns_to_download=[])
    assert {name for name in bare[0] if not name.startswith("__")} == {"cls", "txt", "meta"}
    masks = opened(tmp_path / f"a.{extension}", tmp_path, columns_to_download=["mask"])
    assert masks[3]["mask"] == b"m3"
    assert masks[4]["mask"] is None


def test_values_that_json_has_not_come_as_they_are(tmp_path: Path) -> None:
    when = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    records: list[dict[str, Any]] = [
        {"when": when, "pairs": {1: "a"}, "n": 1, "big": 1 << 70},
        {"when": when, "pairs": None, "n": None, "big": -1},
    ]
    (tmp_path / "a.cbor").write_bytes(written("cbor", records))
    dataset = opened(tmp_path / "a.cbor", tmp_path)
    assert [{name: sample[name] for name in records[0]} for sample in dataset] == records
    assert [sample["__sample_key__"] for sample in dataset] == ["0", "1"]  # they have no keys: the rows' numbers
    (tmp_path / "b.msgpack").write_bytes(written("msgpack", [{"a": 1}, {"a": 2, "b": "x"}, {}]))
    dataset = opened(tmp_path / "b.msgpack", tmp_path)
    assert [(sample["a"], sample["b"]) for sample in dataset] == [(1, None), (2, "x"), (None, None)]


def test_a_column_of_two_types_is_an_error_that_names_the_records(tmp_path: Path) -> None:
    (tmp_path / "a.msgpack").write_bytes(written("msgpack", [{"a": 1}, {"a": "x"}]))
    with pytest.raises(SchemaError, match=r"a\.msgpack: column 'a' holds int \(record 0\) and str \(record 1\)"):
        opened(tmp_path / "a.msgpack", tmp_path)


@BOTH
def test_a_damaged_file_is_an_error_or_used_up_to_the_damage(extension: str, tmp_path: Path) -> None:
    data = written(extension, rows(0, 6))
    for name, bad, number in (("cut", data[:-3], 5), ("no_map", data + b"\x01" + data, 6)):
        path = tmp_path / f"{name}.{extension}"
        path.write_bytes(bad)
        with pytest.raises(DamagedShardError, match=rf"{name}\.{extension}: record {number} at byte "):
            opened(path, tmp_path)
        found = read(opened(path, tmp_path, source_options={"damaged_shards": "until_damage"}))
        assert found == rows(0, number)


def test_a_run_goes_on_where_it_was_with_any_number_of_workers(server: FaultyHttpServer, tmp_path: Path) -> None:
    for shard in range(4):
        server.objects[f"/s-{shard}.msgpack"] = written("msgpack", rows(8 * shard, 8))
    src = f"{server.url}/s-{{0..3}}.msgpack"

    def keys(dataset: StreamingDataset, **loader: Any) -> list[str]:
        batches = StreamingDataLoader(dataset, batch_size=2, **loader)
        return [key for batch in batches for key in batch["__key__"]]

    def run(folder: str) -> StreamingDataset:
        return opened(src, tmp_path / folder, shuffle_seed=3, columns_to_download=["jpg"])

    expected = keys(run("a"))
    assert sorted(expected) == [row["__key__"] for row in rows(0, 32)]
    assert keys(run("b"), num_workers=2) == expected
    for step in (1, 7, 15):
        loader = StreamingDataLoader(run("a"), batch_size=2)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        resumed = StreamingDataLoader(run("c"), batch_size=2)
        resumed.load_state_dict(loader.state_dict())
        assert [key for batch in resumed for key in batch["__key__"]] == expected[2 * step :]
