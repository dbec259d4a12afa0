"""Values of small members and of columns of MDS in SQL (`index_members`)."""

from __future__ import annotations

import gzip
import io
import json
import random
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, QueryError, SchemaError, SourceError
from sqlstream.index.sources.shards.values import MAX_VALUE_BYTES, NUMBERS, OBJECTS, TEXTS
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms.presets import DecodeByExtension
from tests.goldens import FIXTURES, expected
from tests.stream.shards import Made, opened, ranges, tar_of

NAMES = ["json", "txt", "cls"]
WDS = FIXTURES / "wds"


def made(shard: int, num_samples: int = 6, num_bytes: int = 2000) -> list[tuple[str, dict[str, bytes]]]:
    """Samples of pictures, classes, of every second one a text, of two thirds an object."""
    found: list[tuple[str, dict[str, bytes]]] = []
    for number in range(num_samples):
        sample = {"jpg": random.Random(number).randbytes(num_bytes), "cls": b"%d\n" % (number % 4)}
        if number % 2:
            sample["txt"] = f"caption é {number} of {shard}".encode()
        if number % 3:
            values = {"width": 100 * number, "score": number / 8, "kind": f"k{number}", "box": [number, 1], "more": {"a": None}}
            sample["json"] = json.dumps(values).encode()
        found.append((f"d{shard}/{number:04}", sample))
    return found


def zip_of(samples: Made, **files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, parts in samples:
            for extension, content in parts.items():
                archive.writestr(f"{key}.{extension}", content)
        for name, content in files.items():
            archive.writestr(name.replace("__", "/").replace("_DOT_", "."), content)
    return data.getvalue()


PACKED: dict[str, Callable[[Made], bytes]] = {
    "tar": tar_of,
    "tar.gz": lambda samples: gzip.compress(tar_of(samples)),
    "zip": zip_of,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three shards of six samples, in each form."""
    for kind, pack in PACKED.items():
        for shard in range(3):
            (tmp_path / f"{shard}.{kind}").write_bytes(pack(made(shard)))
    return tmp_path


def parsed(src: Any, folder: Path, *names: str, **options: Any) -> StreamingDataset:
    given = options.pop("source_options", {})
    return opened(src, folder, source_options={"index_members": list(names) or NAMES, **given}, on_error="raise", **options)


def plain(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if not name.startswith("__")}


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", list(PACKED))
def test_values_are_those_of_decode_by_extension_and_sql_sees_them(
    kind: str, remote: bool, server: FaultyHttpServer, folder: Path
) -> None:
    src: Any = str(folder / f"*.{kind}")
    if remote:
        server.objects |= {f"/{path.name}": path.read_bytes() for path in folder.glob(f"*.{kind}")}
        src = [f"{server.url}/{shard}.{kind}" for shard in range(3)]
    decoded = list(opened(src, folder, transforms=[DecodeByExtension()]))
    dataset = parsed(src, folder, transforms=[DecodeByExtension(partial=True)])
    for ours, theirs in zip(dataset, decoded, strict=True):
        assert {name: ours[name] for name in ("__key__", "cls", "txt", "json", "jpg")} == {
            name: theirs[name] for name in ("__key__", "cls", "txt", "json", "jpg")
        }
        values = {name.removeprefix("json_"): value for name, value in ours.items() if name.startswith("json_")}
        assert values == (theirs["json"] or dict.fromkeys(values))
        assert set(values) == {"width", "score", "kind", "box", "more"}
    for where, wanted in {
        "json_width > 150 AND cls = 1": [5, 5, 5],
        "txt LIKE '%é 3 of 1'": [3],
        "txt IS NULL AND json_score > 0.4": [4, 4, 4],
        "json_width IS NULL AND jpg = 2000": [0, 3] * 3,
        "json_extract(json_box, '$[0]') = 2": [2, 2, 2],
    }.items():
        assert [int(sample["__key__"][-4:]) for sample in dataset.select(where)] == wanted
    types = {column: str(dataset.schema.field(column).type) for column in ("cls", "txt", "json_width", "json_score")}
    assert types == {"cls": "int64", "txt": "string", "json_width": "int64", "json_score": "double"}


def test_the_table_of_extensions_is_that_of_decode_by_extension() -> None:
    decode = DecodeByExtension(partial=True)
    assert all(decode({name: b"7"}) == {name: "7"} for name in TEXTS)
    assert all(decode({name: b"7"}) == {name: 7} and decode({f"a.{name.upper()}": b"7"}) for name in NUMBERS)
    assert all(decode({name: b'{"a": 7}'}) == {name: {"a": 7}} for name in OBJECTS)
    for name in ("class", "count", "html", "jpg", "py", "bin"):
        assert decode({name: b"7"}) == {name: b"7"}, "no value is known"


def test_no_member_is_fetched_whose_value_is_in_the_row(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/data/s-000.tar"] = tar_of(made(0, 5, num_bytes=300_000))
    url = f"{server.url}/data/s-000.tar"
    dataset = parsed(url, tmp_path, columns_to_download=["cls", "txt"], shards="members", where="json_width > 0")
    num_before = len(ranges(server, 0))
    assert [plain(sample)["cls"] for sample in dataset] == [1, 2, 0]
    assert [sample["txt"] for sample in dataset] == ["caption é 1 of 0", None, None]
    assert len(ranges(server, 0)) == num_before
    assert "jpg" not in dataset[0]


@pytest.mark.parametrize(("num_samples", "num_bytes"), [(400, 5_000), (6, 3_000_000)], ids=["near", "far"])
def test_the_index_of_a_tar_takes_no_more_requests_for_values(
    num_samples: int, num_bytes: int, server: FaultyHttpServer, tmp_path: Path
) -> None:
    for shard in range(2):
        server.objects[f"/data/s-{shard:03}.tar"] = tar_of(made(0, num_samples, num_bytes))
    opened(f"{server.url}/data/s-000.tar", tmp_path).close()
    parsed(f"{server.url}/data/s-001.tar", tmp_path).close()
    most = 0 if num_bytes > 1 << 20 else 4  # of the first steps, before whole blocks are read
    assert len(ranges(server, 1)) <= len(ranges(server, 0)) + most
    assert sum(ranges(server, 1)) <= sum(ranges(server, 0)) + (most + 1) * 8192


def test_members_of_a_zip_come_by_merged_requests(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects |= {"/near.zip": zip_of(made(0, 300, 5_000)), "/far.zip": zip_of(made(0, 6, 500_000))}
    for name, most in (("near", 2), ("far", 6)):
        dataset = parsed(f"{server.url}/{name}.zip", tmp_path)
        asked = [request for request in server.requests(f"/{name}.zip") if request.method == "GET"]
        assert len(asked) <= 2 + most
        assert len(dataset.select("cls = 1")) == (75 if name == "near" else 2)


def test_queries_weights_and_joins_go_by_values(folder: Path) -> None:
    src = str(folder / "*.tar")
    query = (
        "SELECT *, json_width * 2 AS wide, txt || '!' AS loud FROM dataframe WHERE cls = 1 ORDER BY json_score DESC, __key__"
    )
    dataset = parsed(src, folder, sql_query=query)
    assert [(sample["wide"], sample["loud"]) for sample in dataset][:2] == [
        (1000, "caption é 5 of 0!"),
        (1000, "caption é 5 of 1!"),
    ]
    assert all(len(sample["jpg"]) == 2000 for sample in dataset)
    duck = parsed(src, folder, where="json_width > 100 AND cls = 1", source_options={"sql_engine": "duckdb"})
    assert [sample["json_width"] for sample in duck] == [500, 500, 500]
    own = parsed(src, folder, sql_query="SELECT cls, count(*) AS n FROM dataframe GROUP BY cls")
    assert [plain(sample) for sample in own] == [{"cls": number, "n": count} for number, count in enumerate((6, 6, 3, 3))]
    weighted = parsed(src, folder, weights="CASE WHEN cls = 2 THEN 1 ELSE 0 END", epoch_size=30, shuffle_seed=1)
    assert {sample["cls"] for sample in weighted} == {2}
    table = pa.table({"cls": [0, 1, 2, 3], "name": ["a", "b", "c", "d"]})
    joined = parsed(src, folder, join={"names": table}, on="cls", where="name = 'd' AND json_width IS NULL")
    assert [(sample["cls"], sample["name"], len(sample["jpg"])) for sample in joined] == [(3, "d", 2000)] * 3
    keyed = parsed([str(folder / "0.tar")], folder, index_col_name="txt", where="txt IS NOT NULL")
    assert keyed[0]["__sample_key__"] == "caption é 1 of 0"


def test_a_state_of_every_step_goes_on(server: FaultyHttpServer, folder: Path) -> None:
    server.objects |= {f"/{path.name}": path.read_bytes() for path in folder.glob("*.tar")}

    def loader(num_workers: int = 0) -> StreamingDataLoader:
        dataset = parsed([f"{server.url}/{n}.tar" for n in range(3)], folder, where="json_width > 100", shuffle_seed=3)
        return StreamingDataLoader(dataset, batch_size=2, num_workers=num_workers, collate_fn=list)

    whole = loader(num_workers=2)
    seen, states = [], []
    for batch in whole:
        seen.append([(sample["__key__"], sample["json_width"], len(sample["jpg"])) for sample in batch])
        states.append(whole.state_dict())
    assert sum(map(len, seen)) == 9
    for number, state in enumerate(states[:-1], start=1):
        other = loader()
        other.load_state_dict(state)
        assert [[(s["__key__"], s["json_width"], len(s["jpg"])) for s in batch] for batch in other] == seen[number:]


def test_a_source_grows_and_a_new_key_is_null_in_what_was_there(folder: Path) -> None:
    src = str(folder / "*.tar")
    assert len(parsed(src, folder)) == 18
    (folder / "3.tar").write_bytes(tar_of([("new", {"jpg": b"x", "cls": b"9", "json": b'{"width": 0.5, "fresh": "yes"}'})]))
    grown = parsed(src, folder)
    assert len(grown) == 19
    assert [(sample["__key__"], sample["json_width"]) for sample in grown.select("json_fresh IS NOT NULL")] == [("new", 0.5)]
    assert len(grown.select("json_width > 0.4")) == 13
    assert grown[1]["json_fresh"] is None
    others = [parsed(src, folder, "cls"), opened(src, folder)]
    assert [type(other[1]["txt"]) for other in others] == [bytes, bytes], "each choice has an index of its own"
    assert [other[1]["cls"] for other in others] == [1, b"1\n"]


def test_types_of_several_shards_are_joined_as_those_of_lines_of_json(tmp_path: Path) -> None:
    def shard(name: str, text: bytes) -> str:
        (tmp_path / name).write_bytes(tar_of([("k", {"json": text})]))
        return str(tmp_path / name)

    src = [shard("a.tar", b'{"x": 1, "y": null}'), shard("b.tar", b'{"x": 1.5, "y": "t", "z": NaN}'), shard("c.tar", b"{}")]
    values = [(sample["json_x"], sample["json_y"]) for sample in parsed(src, tmp_path, "json")]
    assert values == [(1.0, None), (1.5, "t"), (None, None)]
    with pytest.raises(SchemaError, match=r"'json_x' is int64 in .*a\.tar and string in .*d\.tar"):
        parsed([src[0], shard("d.tar", b'{"x": "1"}')], tmp_path, "json")
    (tmp_path / "e.tar").write_bytes(tar_of([("e", {"json": b'{"x": 1}'}), ("f", {"json": b'{"x": "1"}'})]))
    with pytest.raises(SchemaError, match=r"e\.tar: column 'json_x' holds int \(sample 'e'\) and str \(sample 'f'\)"):
        parsed(tmp_path / "e.tar", tmp_path, "json")


BAD = {
    "cls": (b"seven", r"'cls' of the sample 'bad', at byte 2560, does not parse: invalid literal"),
    "txt": (b"\xff\xfe", r"'txt' of the sample 'bad', at byte 2560, .*utf-8"),
    "json": (b"{", r"'json' of the sample 'bad', at byte 2560, .*Expecting"),
    "jsn": (b"[1]", r"'jsn' of the sample 'bad', at byte 2560, .*a JSON list"),
    "id": (b"9" * 30, "'id' holds integers that 64 bits cannot"),
    "text": (b"x" * (MAX_VALUE_BYTES + 1), r"'bad.text' at byte 2560 has 1048577 bytes, .* 1048576 at most"),
    "a.json": (b'{"\\ud800": 1}', "surrogates not allowed"),
    "transcript": (b"a\xed\xa0\x80", "utf-8"),
}


@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("name", list(BAD))
def test_a_member_that_does_not_parse_is_an_error_with_shard_key_and_place(name: str, mode: str, tmp_path: Path) -> None:
    content, why = BAD[name]
    (tmp_path / "s.tar").write_bytes(tar_of([("good", {"jpg": b"x"}), ("more", {"jpg": b"x"}), ("bad", {name: content})]))
    with pytest.raises(SourceError, match=r"s\.tar.*" + why):
        parsed(tmp_path / "s.tar", tmp_path, name, source_options={"damaged_shards": mode})
    assert opened(tmp_path / "s.tar", tmp_path)[2][name] == content


def test_a_damaged_text_of_a_zip_is_damage_of_its_shard(tmp_path: Path) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("a.txt", b"the first")
    (tmp_path / "a.zip").write_bytes(data.getvalue().replace(b"the first", b"the worst", 1))
    (tmp_path / "b.zip").write_bytes(zip_of(made(0, 2)))
    src = [str(tmp_path / "a.zip"), str(tmp_path / "b.zip")]
    with pytest.raises(SourceError, match=r"a\.zip: the member 'a\.txt' at byte 0 is damaged: its CRC-32"):
        parsed(src, tmp_path)
    assert len(parsed(src, tmp_path, source_options={"damaged_shards": "until_damage"})) == 2


def test_what_index_members_may_name(folder: Path) -> None:
    src = str(folder / "*.tar")
    (folder / "t.csv").write_text("cls\n1\n")
    for names, why in (
        ("cls", "is a text: give a list"),
        ([3], "holds 3"),
        (["jpg"], "'jpg', and members of TAR"),
        (5, "is no list"),
    ):
        with pytest.raises(ConfigError, match=f"index_members.*{why}"):
            opened(src, folder, source_options={"index_members": names})
    with pytest.raises(ConfigError, match=r"index_members=.*is for shards .*, and .*t\.csv is none"):
        parsed(str(folder / "t.csv"), folder, "cls")
    with pytest.raises(SchemaError, match=r"index_members names 'id', but .* has no such column: it has .*'cls'"):
        parsed(src, folder, "cls", "id")
    assert parsed(src, folder, "cls", "id", allow_missing_columns=True)[1]["id"] is None
    kept = parsed(src, folder, index_cols_to_keep=["json_width", "cls"], columns_to_download=["jpg"])
    assert set(plain(kept[1])) == {"json_width", "cls", "jpg"}


def test_names_that_come_twice_are_errors(tmp_path: Path) -> None:
    for name, parts, why in (
        ("a", {"json": b'{"a": 1}', "json_a": b"x"}, "a column 'json_a', and the shard has one"),
        ("b", {"json": b'{"a_b": 1}', "json_a.json": b"x"}, None),
    ):
        (tmp_path / f"{name}.tar").write_bytes(tar_of([("k", parts)]))
        if why is None:
            assert parsed(tmp_path / f"{name}.tar", tmp_path, "json")[0]["json_a_b"] == 1
            continue
        with pytest.raises(SchemaError, match=rf"{name}\.tar: .*{why}"):
            parsed(tmp_path / f"{name}.tar", tmp_path, "json")
    metadata = b'{"file_name": "d/a.txt", "text": "described"}\n'
    (tmp_path / "c.zip").write_bytes(zip_of([("d/a", {"txt": b"written"})], metadata_DOT_jsonl=metadata))
    with pytest.raises(SchemaError, match=r"c\.zip: the column 'text' is of content of its files, and of its metadata: rename"):
        parsed(tmp_path / "c.zip", tmp_path, "text")
    metadata = b'{"file_name": "d/a.txt", "score": 3}\n{"file_name": "d/a.txt", "score": 4}\n'
    (tmp_path / "d.zip").write_bytes(zip_of([("d/a", {"txt": b"written"})], metadata_DOT_jsonl=metadata))
    rows = [(sample["text"], sample["score"]) for sample in parsed(tmp_path / "d.zip", tmp_path, "text", where="score > 2")]
    assert rows == [("written", 3), ("written", 4)]


def test_texts_are_values_and_never_names_of_objects(server: FaultyHttpServer, tmp_path: Path) -> None:
    texts = ["/etc/passwd", f"{server.url}/secret", f"zip://a.txt::{server.url}/secret.zip", "../up"]
    for number, text in enumerate(texts):
        (tmp_path / str(number)).mkdir()
        (tmp_path / f"{number}/s.tar").write_bytes(tar_of([("k", {"txt": text.encode(), "jpg": b"x"})]))
    src = [str(tmp_path / f"{number}/s.tar") for number in range(len(texts))]
    for columns in (["txt"], ["txt", "jpg"], None):
        dataset = parsed(src, tmp_path, "txt", columns_to_download=columns)
        assert [sample["txt"] for sample in dataset] == texts
    assert server.requests() == []


def test_wids_and_samples_before_damage_have_values(tmp_path: Path) -> None:
    theirs = list(opened(WDS / "index.json", tmp_path, transforms=[DecodeByExtension(only="cls json")]))
    ours = list(parsed(WDS / "index.json", tmp_path, "cls", "json"))
    assert [sample["cls"] for sample in ours] == [sample["cls"] for sample in theirs]
    assert all(
        sample[f"json_{key}"] == value
        for sample, other in zip(ours, theirs, strict=True)
        for key, value in other["json"].items()
    )
    data = tar_of(made(0, 4))
    (tmp_path / "cut.tar").write_bytes(data[: len(data) // 2])
    (tmp_path / "whole.tar").write_bytes(tar_of(made(1, 2)))
    src = [str(tmp_path / "cut.tar"), str(tmp_path / "whole.tar")]
    kept = parsed(src, tmp_path, source_options={"damaged_shards": "until_damage"}, where="cls = 1")
    assert [(sample["__shard__"], sample["txt"]) for sample in kept] == [(0, "caption é 1 of 0"), (1, "caption é 1 of 1")]


MDS = ("plain", "zstd", "gz", "br", "bz2", "snappy", "jsonl", "csv", "tsv", "xsv", "jsonl_zstd", "fixed_only", "merged")


def scalars(name: str) -> list[str]:
    """Columns of an MDS golden that SQL can hold."""
    shard = json.loads((FIXTURES / "mds" / name / "index.json").read_text())["shards"][0]
    columns = shard.get("columns") or dict(zip(shard["column_names"], shard["column_encodings"], strict=True))
    return [
        column
        for column, encoding in columns.items()
        if re.match("u?int|float|str|json", encoding)
        and encoding not in ("str_decimal", "str_int")  # these have more digits here
    ]


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("name", MDS)
def test_columns_of_mds_are_columns_of_sql(name: str, remote: bool, server: FaultyHttpServer, tmp_path: Path) -> None:
    names, src = scalars(name), str(FIXTURES / "mds" / name)
    assert names
    if remote:
        files = [path for path in Path(src).rglob("*") if path.is_file()]
        server.objects |= {f"/{name}/{path.relative_to(src)}": path.read_bytes() for path in files}
        src = f"{server.url}/{name}/"
    dataset = parsed(src, tmp_path, *names)
    for sample, other in zip(dataset, opened(src, tmp_path), strict=True):
        for column in names:
            value = other[column].item() if isinstance(other[column], np.generic) else other[column]
            assert repr(sample[column]) == repr(value), column
        assert plain(sample).keys() == plain(other).keys()
    table = dataset.query(f'SELECT "{names[0]}" AS x FROM dataframe ORDER BY row').to_pylist()
    assert [row["x"] for row in table] == [sample[names[0]] for sample in dataset]


def test_columns_of_mds_filter_and_are_not_fetched(server: FaultyHttpServer, tmp_path: Path) -> None:
    folder = FIXTURES / "mds/fixed_only"
    server.objects |= {f"/m/{path.name}": path.read_bytes() for path in folder.iterdir()}
    names = scalars("fixed_only")
    dataset = parsed(f"{server.url}/m/", tmp_path, *names, where=f'"{names[0]}" > 2', columns_to_download=names[:1])
    num_before = len(server.requests())
    assert all(sample[names[0]] > 2 for sample in dataset)
    assert 0 < len(dataset) < len(expected("mds/fixed_only.expected.json")["samples"])
    assert len(server.requests()) == num_before


def test_a_query_of_a_column_of_mds_that_is_none_of_sql_is_an_error_with_the_cure(tmp_path: Path) -> None:
    name = scalars("fixed_only")[0]
    with pytest.raises(QueryError, match=f"the content of '{name}' stays in its files, .* of MDS shards, give index_members"):
        opened(str(FIXTURES / "mds/fixed_only"), tmp_path, where=f"{name} IS NOT NULL")
    assert len(parsed(FIXTURES / "mds/fixed_only", tmp_path, name, where=f"{name} IS NOT NULL")) > 0


def test_columns_of_mds_that_are_not_there_or_no_scalars_are_named(tmp_path: Path) -> None:
    for names, why in (
        (["nope"], "'nope', which is no column of the shards: .*'i32'"),
        (["bytes"], "'bytes', which is of the encoding"),
    ):
        with pytest.raises(ConfigError, match=f"index_members names {why}"):
            parsed(FIXTURES / "mds/plain", tmp_path, *names)
    shutil.copytree(FIXTURES / "mds/plain", tmp_path / "plain")
    first = next((tmp_path / "plain").glob("*.mds"))
    data = bytearray(first.read_bytes())
    start = int(np.frombuffer(data, "<u4", 1, 4)[0])
    data[start : start + 4] = b"\xff\xff\xff\x7f"
    first.write_bytes(data)
    with pytest.raises(SourceError, match=rf"the sample 0 at byte {start}: the sample has"):
        parsed(tmp_path / "plain", tmp_path, "i32")


def test_parts_are_files_and_parsed_ones_values(server: FaultyHttpServer, folder: Path) -> None:
    server.objects |= {f"/0.{kind}": (folder / f"0.{kind}").read_bytes() for kind in ("tar", "zip")}
    for kind in ("tar", "zip"):
        (sample,) = parsed(f"{server.url}/0.{kind}", folder, members="path", where="cls = 1 AND json_width > 400")
        assert Path(sample["jpg"]).read_bytes() == made(0)[5][1]["jpg"]
        assert (sample["cls"], sample["txt"]) == (1, "caption é 5 of 0")
        assert json.loads(Path(sample["json"]).read_text())["width"] == sample["json_width"]
