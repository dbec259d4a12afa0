"""Rows that name members of archives: `zip://…::…`, `tar://…::…`, and objects with an offset."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import random
import sqlite3
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import AccessDeniedError, ConfigError, DamagedMemberError, SchemaError, SourceChangedError, SourceError
from sqlstream.index.file.intact import stamp_sqlite
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer, LocalS3
from sqlstream.transforms import presets
from tests.goldens import FIXTURES

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)


def opened(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    given: dict[str, Any] = {
        "show_progress": False,
        "cache_limit": "50mb",
        "on_error": "raise",
        "columns_to_download": ["image"],
    } | options
    return StreamingDataset(src, folder / "cache", **given)


def content(number: int, num_bytes: int = 2000) -> bytes:
    return bytes([number % 251]) * (num_bytes // 2) + random.Random(number).randbytes(num_bytes // 2)


def zip_of(files: Mapping[str, bytes], method: int | None = None) -> bytes:
    """An archive; of every method in turn, if none is given."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number, (name, body) in enumerate(files.items()):
            archive.writestr(name, body, METHODS[number % len(METHODS)] if method is None else method)
    return data.getvalue()


def tar_of(files: Mapping[str, bytes]) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            archive.addfile(info, io.BytesIO(body))
    return data.getvalue()


def files_of(prefix: str, num_files: int) -> dict[str, bytes]:
    return {f"{prefix}/{number:03}.bin": content(number) for number in range(num_files)}


def write_csv(path: Path, values: list[str], **more: list[Any]) -> Path:
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["image", "n", *more])
        writer.writerows([value, number, *(column[number] for column in more.values())] for number, value in enumerate(values))
    return path


def read(dataset: StreamingDataset) -> dict[int, bytes]:
    """What the paths of all samples lead to."""
    return {sample["n"]: Path(sample["image"]).read_bytes() for sample in dataset}


def gets(server: FaultyHttpServer, path: str) -> int:
    return sum(request.method == "GET" for request in server.requests(path))


@pytest.mark.parametrize("kind", ["zip", "tar"])
@pytest.mark.parametrize("is_remote", [True, False])
def test_a_chain_gives_the_path_of_a_file_with_the_content_of_the_member(
    kind: str, is_remote: bool, server: FaultyHttpServer, tmp_path: Path
) -> None:
    archives = {name: files_of(name, 9) for name in ("one", "two")}
    for name, files in archives.items():
        data = zip_of(files) if kind == "zip" else tar_of(files)
        server.objects[f"/{name}.{kind}"] = data
        (tmp_path / f"{name}.{kind}").write_bytes(data)
    outer = f"{server.url}/" if is_remote else ""  # a relative one is below the table's directory
    named = [(name, inner) for inner in range(9) for name in archives]
    values = [f"{kind}://{name}/{inner:03}.bin::{outer}{name}.{kind}" for name, inner in named]
    dataset = opened(write_csv(tmp_path / "t.csv", values), tmp_path, shuffle_seed=1)
    assert read(dataset) == {number: content(inner) for number, (_, inner) in enumerate(named)}
    assert all(sample["image"].endswith(".bin") for sample in dataset)
    for name in archives if is_remote else ():
        assert (
            gets(server, f"/{name}.{kind}") == {"zip": 1, "tar": 3}[kind] + 9
        )  # its table, and each member once in two epochs
    report = dataset.cache.statistics()
    assert (report.entries, report.used_bytes) == (18, 18 * 4096)


def test_tables_of_all_kinds_may_name_members(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = files_of("a", 5)
    server.objects["/a.zip"] = zip_of(files)
    rows: list[dict[str, Any]] = [
        {"image": f"zip://{name}::{server.url}/a.zip", "n": number} for number, name in enumerate(files)
    ]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    structs = [{"image": {"bytes": None, "path": row["image"]}, "n": row["n"]} for row in rows]
    for src in (
        write_csv(tmp_path / "t.csv", [row["image"] for row in rows]),
        tmp_path / "t.jsonl",
        tmp_path / "t.parquet",
        rows,
    ):
        assert read(opened(src, tmp_path)) == dict(enumerate(files.values()))
    assert read(opened(structs, tmp_path)) == dict(enumerate(files.values()))
    (tmp_path / "names.csv").write_text("name,n\n" + "".join(f"{name},{number}\n" for number, name in enumerate(files)))
    computed = f"SELECT n, 'zip://' || name || '::{server.url}/a.zip' AS image FROM dataframe WHERE n != 2"
    expected = {number: body for number, body in enumerate(files.values()) if number != 2}
    assert read(opened(tmp_path / "names.csv", tmp_path, sql_query=computed)) == expected
    assert gets(server, "/a.zip") == 6 + 5  # each index has its own, members are fetched once


def test_the_forum_s_zip_of_many_members_takes_one_request_for_its_table(server: FaultyHttpServer, tmp_path: Path) -> None:
    image = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(image, "PNG")
    names = [f"train/{number:05}.png" for number in range(20_000)]
    server.objects["/many.zip"] = zip_of(dict.fromkeys(names, image.getvalue()), zipfile.ZIP_STORED)
    (tmp_path / "t.csv").write_text("number,caption\n" + "".join(f"{number},c{number}\n" for number in range(20_000)))
    dataset = opened(
        tmp_path / "t.csv",
        tmp_path,
        sql_query=(
            f"SELECT *, 'zip://train/' || substr('0000' || number, -5) || '.png::{server.url}/many.zip' AS image FROM dataframe"
        ),
        transforms=presets.create_standard_image_pipeline("image", (8, 8)),
        shuffle_seed=1,
    )
    assert gets(server, "/many.zip") <= 2
    before, num_seen = gets(server, "/many.zip"), 0
    for batch in StreamingDataLoader(dataset, batch_size=10, num_workers=2):
        assert batch["image"].shape == (10, 3, 8, 8)
        if (num_seen := num_seen + 10) == 200:
            break
    dataset.close()
    assert 200 <= gets(server, "/many.zip") - before <= 200 + 3 * 512  # no member twice
    asked = [request.range for request in server.requests("/many.zip") if request.method == "GET"]  # more may be on their way
    assert len(set(asked)) == len(asked)


def test_members_come_from_s3(tmp_path: Path) -> None:
    files = files_of("a", 4)
    with LocalS3() as s3:
        zipped, tarred = s3.put("bucket/a.zip", zip_of(files)), s3.put("bucket/a.tar", tar_of(files))
        values = [f"{kind}://{name}::{url}" for kind, url in (("zip", zipped), ("tar", tarred)) for name in files]
        table = s3.put("bucket/t.csv", write_csv(tmp_path / "t.csv", values).read_bytes())
        for src in (tmp_path / "t.csv", table):
            dataset = opened(src, tmp_path, storage_options=s3.storage_options)
            assert read(dataset) == dict(enumerate([*files.values()] * 2))
            dataset.close()


def test_parts_of_objects_have_places(server: FaultyHttpServer, tmp_path: Path) -> None:
    bodies = [content(number, 1000 + number) for number in range(6)]
    starts = [sum(map(len, bodies[:number])) for number in range(6)]
    server.objects |= {"/data/all.bin": b"".join(bodies), "/data/alone.png": content(99)}
    (tmp_path / "all.bin").write_bytes(b"".join(bodies))
    parts = {"offset_column": "start", "length_column": "size"}
    for where in (f"{server.url}/data/all.bin", "all.bin"):
        table = write_csv(
            tmp_path / "t.csv",
            [*[where] * 6, f"{server.url}/data/alone.png"],
            start=[*starts, ""],
            size=[*map(len, bodies), ""],
        )
        dataset = opened(table, tmp_path, source_options=parts, where="n != 1", index_cols_to_keep=["n"])
        assert read(dataset) == {number: body for number, body in enumerate([*bodies, content(99)]) if number != 1}
        part = dataset.select("n < 3")
        assert read(part) == {0: bodies[0], 2: bodies[2]}
    asked = [str(request.range) for request in server.requests("/data/all.bin") if request.method == "GET"]
    assert sorted(asked) == sorted(
        f"bytes={start}-{start + len(body) - 1}"
        for number, (start, body) in enumerate(zip(starts, bodies, strict=True))
        if number != 1
    )


def test_an_empty_member_is_an_empty_file(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = {"a.txt": b"", "b.txt": b"b", "c.txt": b""}
    server.objects |= {"/a.zip": zip_of(files), "/a.tar": tar_of(files)}
    values = [f"{kind}://{name}::{server.url}/a.{kind}" for kind in ("zip", "tar") for name in files]
    assert read(opened(write_csv(tmp_path / "t.csv", values), tmp_path)) == dict(enumerate([*files.values()] * 2))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("zip://a/9.bin::a.zip", "row 1 names 'a/9.bin' in .*a.zip, which has 2 files"),
        ("zip://a/*.bin::a.zip", "no wildcards"),
        ("tar://a/9.bin::a.tar", "row 1 names 'a/9.bin' in .*a.tar"),
        ("zip://a::tar://b::a.tar", "row 1 names .* and no chain"),
        ("zip://a::simplecache::https://h/a.zip", "and no chain"),
        ("zip://::a.zip", "and no chain"),
        ("zip://a/000.bin::none.zip", "none.zip does not exist.*row 1 names it in column 'image'"),
        ("zip://a/000.bin::a.tar", "a.tar is damaged.*row 1 names it"),
        ("tar://a/000.bin::a.tgz", "a.tgz is compressed as a whole.*row 1 names it"),
    ],
)
def test_what_is_no_member_is_an_error_that_names_the_row(value: str, why: str, tmp_path: Path) -> None:
    files = files_of("a", 2)
    (tmp_path / "a.zip").write_bytes(zip_of(files))
    (tmp_path / "a.tar").write_bytes(tar_of(files))
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        archive.add(tmp_path / "a.zip", "a/000.bin")
    table = write_csv(tmp_path / "t.csv", ["zip://a/000.bin::a.zip", value])
    with pytest.raises((SourceError, FileNotFoundError), match=why):
        opened(table, tmp_path)
    assert read(opened(table, tmp_path, where="n = 0")) == {0: content(0)}  # what is not selected is not looked at


def test_places_that_cannot_be_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    options = {"offset_column": "start", "length_column": "size"}
    for start, size, why in ((90, 20, "bytes 90 to 110 .* has 100"), (-1, 5, "whole numbers"), (5, "", "whole numbers")):
        table = write_csv(tmp_path / "t.csv", ["a.bin"] * 2, start=[0, start], size=[100, size])
        with pytest.raises(SourceError, match=f"row 1 .*{why}"):
            opened(table, tmp_path, source_options=options)
    with pytest.raises(ConfigError, match="length_column=None"):
        opened(table, tmp_path, source_options={"offset_column": "start"})
    with pytest.raises(SchemaError, match="no column 'begin', which offset_column names"):
        opened(table, tmp_path, source_options=options | {"offset_column": "begin"})
    with pytest.raises(ConfigError, match="names 2 columns"):
        opened(table, tmp_path, source_options=options, columns_to_download=["image", "n"])


def test_a_damaged_member_fails_alone(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = {"a.txt": b"the first" * 30, "b.txt": b"the second" * 30, "c.txt": b"the third" * 30}
    data = zip_of(files, zipfile.ZIP_STORED)
    server.objects["/a.zip"] = data.replace(b"the second", b"the secone", 1)
    table = write_csv(tmp_path / "t.csv", [f"zip://{name}::{server.url}/a.zip" for name in files])
    dataset = opened(table, tmp_path, on_error="skip")
    assert sorted(read(dataset)) == [0, 2]
    with pytest.raises(DamagedMemberError, match=r"a.zip: the member at byte .*CRC-32"):
        dataset[1]


def test_an_archive_that_changes_is_an_error_and_is_read_again(server: FaultyHttpServer, tmp_path: Path) -> None:
    (tmp_path / "b.zip").write_bytes(zip_of(files_of("b", 3)))
    server.objects["/a.zip"] = zip_of(files_of("a", 3))
    for prefix, outer in (("a", f"{server.url}/a.zip"), ("b", "b.zip")):
        values = [f"zip://{name}::{outer}" for name in files_of(prefix, 3)]
        dataset = opened(write_csv(tmp_path / f"{prefix}.csv", values), tmp_path)
        other = {"more.bin": bytes(5000)} | {name: content(number + 50) for number, name in enumerate(files_of(prefix, 3))}
        if prefix == "a":
            server.objects["/a.zip"] = zip_of(other)
        else:
            (tmp_path / "b.zip").write_bytes(zip_of(other))
        with pytest.raises(SourceChangedError, match=f"{prefix}.zip"):
            read(dataset)
        again = opened(tmp_path / f"{prefix}.csv", tmp_path)
        assert read(again) == {number: content(number + 50) for number in range(3)}


def test_rows_of_others_name_archives_by_the_same_rules_as_objects(server: FaultyHttpServer, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"a.bin": b"a"}))
    with LocalS3() as s3:
        local = f"file://{tmp_path}"
        table = s3.put("bucket/t.csv", f"image,n\nzip://a.bin::{local}/a.zip,0\n".encode())
        with pytest.raises(AccessDeniedError, match=r"local file outside the allowed roots.*row 0 names it"):
            opened(table, tmp_path, storage_options=s3.storage_options)
        trusted = opened(table, tmp_path, storage_options=s3.storage_options, allowed_roots=[local])
        assert read(trusted) == {0: b"a"}
        trusted.close()
        table = s3.put("bucket/t.csv", f"image,n\nzip://a.bin::{server.url}/a.zip,0\n".encode())
        server.objects["/a.zip"] = (tmp_path / "a.zip").read_bytes()
        with pytest.raises(AccessDeniedError, match=r"private|allowed_roots"):
            opened(table, tmp_path, storage_options=s3.storage_options)
        assert not server.requests("/a.zip")


def test_a_chain_made_by_a_predownload_transform_names_the_cure(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/a.zip"] = zip_of({"a.bin": b"a", "b.bin": b"b"})
    table = write_csv(tmp_path / "t.csv", [f"zip://a.bin::{server.url}/a.zip"])

    def other(row: dict[str, Any]) -> dict[str, Any]:
        return row | {"image": row["image"].replace("a.bin", "b.bin")}

    assert read(opened(table, tmp_path, predownload_transforms=[dict])) == {0: b"a"}
    with pytest.raises(Exception, match="compute such values in sql_query"):
        opened(table, tmp_path, predownload_transforms=[other])[0]


def test_workers_ranks_and_resumption_see_the_same_members(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = files_of("a", 24)
    server.objects |= {"/a.zip": zip_of(files), "/a.tar": tar_of(files)}
    values = [f"{('zip', 'tar')[n % 2]}://{name}::{server.url}/a.{('zip', 'tar')[n % 2]}" for n, name in enumerate(files)]
    table = write_csv(tmp_path / "t.csv", values)

    def digests(dataset: StreamingDataset, num_workers: int, context: str | None = None) -> list[str]:
        loader = StreamingDataLoader(
            dataset, batch_size=2, num_workers=num_workers, multiprocessing_context=context, collate_fn=list
        )
        return [hashlib.md5(Path(sample["image"]).read_bytes()).hexdigest() for batch in loader for sample in batch]

    expected = digests(opened(table, tmp_path, shuffle_seed=1), 0)
    assert sorted(expected) == sorted(hashlib.md5(body).hexdigest() for body in files.values())
    assert digests(opened(table, tmp_path / "other", shuffle_seed=1), 2, "spawn") == expected
    first = opened(table, tmp_path, shuffle_seed=1)
    loader = StreamingDataLoader(first, batch_size=2, collate_fn=list)
    steps = iter(loader)
    for _ in range(5):
        next(steps)
    state = loader.state_dict()
    second = opened(table, tmp_path, shuffle_seed=1)
    resumed = StreamingDataLoader(second, batch_size=2, collate_fn=list)
    resumed.load_state_dict(state)
    rest = [hashlib.md5(Path(sample["image"]).read_bytes()).hexdigest() for batch in resumed for sample in batch]
    assert rest == expected[10:]


def test_the_members_found_are_kept_for_later_runs(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = files_of("a", 4)
    server.objects["/a.zip"] = zip_of(files)
    table = write_csv(tmp_path / "t.csv", [f"zip://{name}::{server.url}/a.zip" for name in files])
    opened(table, tmp_path).close()
    num_requests = gets(server, "/a.zip")
    dataset = opened(table, tmp_path)
    assert gets(server, "/a.zip") == num_requests == 1
    assert sorted(read(dataset.select("n > 1"))) == [2, 3]
    names = sorted(path.suffix for path in (tmp_path / "cache/index").glob("*.sqlite"))
    assert len(names) == 2


def test_the_golden_of_hugging_face_is_read_as_it_says(tmp_path: Path) -> None:
    with zipfile.ZipFile(FIXTURES / "hf/chained/images.zip") as archive:
        for table, column in (("metadata.csv", "image"), ("metadata.jsonl", "image")):
            dataset = opened(FIXTURES / "hf/chained" / table, tmp_path, columns_to_download=[column])
            rows = dataset.query(f"SELECT {column} FROM dataframe").to_pylist()
            names = [row[column].removeprefix("zip://").partition("::")[0] for row in rows]
            assert names
            assert [Path(sample[column]).read_bytes() for sample in dataset] == [archive.read(name) for name in names]


def test_relative_archives_start_at_their_own_table(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.zip").write_bytes(zip_of({"a.bin": name.encode()}))
        write_csv(tmp_path / name / "t.csv", ["zip://a.bin::a.zip"])
    dataset = opened([tmp_path / "one/t.csv", tmp_path / "two/t.csv"], tmp_path)
    assert [Path(sample["image"]).read_bytes() for sample in dataset] == [b"one", b"two"]


@pytest.mark.parametrize(
    "answers",
    [
        [FaultyAnswer(fault=Fault.NO_RANGES)],
        [FaultyAnswer(fault=Fault.RESET, after_bytes=500)],
        [FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=700), FaultyAnswer(fault=Fault.STATUS, status=503)],
        [FaultyAnswer(fault=Fault.NO_LENGTH)],
    ],
    ids=["no ranges", "reset", "cut and busy", "no length"],
)
@pytest.mark.parametrize("kind", ["zip", "tar"])
def test_what_servers_do_wrong_costs_requests_and_no_bytes(
    kind: str, answers: list[FaultyAnswer], server: FaultyHttpServer, tmp_path: Path
) -> None:
    files = files_of("a", 4)
    server.objects[f"/a.{kind}"] = zip_of(files) if kind == "zip" else tar_of(files)
    table = write_csv(tmp_path / "t.csv", [f"{kind}://{name}::{server.url}/a.{kind}" for name in files])
    dataset = opened(table, tmp_path)
    server.script(f"/a.{kind}", *answers)
    assert read(dataset) == dict(enumerate(files.values()))


def test_a_member_damaged_on_its_way_fails_and_is_not_kept(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects["/a.zip"] = zip_of({"a.bin": content(1)}, zipfile.ZIP_STORED)
    dataset = opened(write_csv(tmp_path / "t.csv", [f"zip://a.bin::{server.url}/a.zip"]), tmp_path)
    server.script("/a.zip", FaultyAnswer(fault=Fault.DAMAGE))
    with pytest.raises(DamagedMemberError, match=r"a\.zip: the member at byte 0 is damaged: there is no local header.*row 0"):
        dataset[0]
    assert Path(dataset[0]["image"]).read_bytes() == content(1)
    assert dataset.cache.statistics().entries == 1


def test_an_archive_that_is_gone_fails_its_samples_alone(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.objects |= {"/a.zip": zip_of({"a.bin": b"a"}), "/b.zip": zip_of({"b.bin": b"b"})}
    values = [f"zip://a.bin::{server.url}/a.zip", f"zip://b.bin::{server.url}/b.zip"]
    dataset = opened(write_csv(tmp_path / "t.csv", values), tmp_path, on_error="skip", max_failure_ratio=0.9)
    del server.objects["/a.zip"]
    assert read(dataset) == {1: b"b"}
    (failure,) = [failure for failure in dataset.failures() if failure.row is not None]
    assert "zip://a.bin" in failure.error or "a.zip" in failure.error


def test_archives_are_named_by_rows_of_a_remote_table_below_its_directory(tmp_path: Path) -> None:
    with LocalS3() as s3:
        s3.put("bucket/data/a.zip", zip_of({"a.bin": b"a", "../../etc/passwd": b"data"}))
        table = s3.put("bucket/data/t.csv", b"image,n\nzip://a.bin::a.zip,0\nzip://../../etc/passwd::a.zip,1\n")
        dataset = opened(table, tmp_path, storage_options=s3.storage_options)
        assert read(dataset) == {0: b"a", 1: b"data"}
        dataset.close()


def test_indexes_of_earlier_versions_are_looked_through_and_nothing_is_written_for_those_without_chains(tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(zip_of({"a.bin": b"a"}))
    tables = [write_csv(tmp_path / "chained.csv", ["zip://a.bin::a.zip"]), write_csv(tmp_path / "plain.csv", ["a.zip"])]
    for table in tables:
        opened(table, tmp_path).close()
    files = list((tmp_path / "cache/index").glob("*.sqlite"))
    for path in files:
        with contextlib.closing(sqlite3.connect(path)) as file, file:
            file.execute("DELETE FROM meta WHERE key = 'chained'")
        stamp_sqlite(path)
    assert read(opened(tables[0], tmp_path)) == {0: b"a"}
    assert read(opened(tables[1], tmp_path)) == {0: (tmp_path / "a.zip").read_bytes()}
    assert sorted((tmp_path / "cache/index").glob("*.sqlite")) == sorted(files)
