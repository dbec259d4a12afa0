"""ZIP archives as a source: every golden, Hugging Face's folders, and requests."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import ConfigError, DamagedMemberError, DamagedShardError, SchemaError, SourceError
from sqlstream.storage.members.names import split_name
from sqlstream.testing.servers import FaultyHttpServer
from tests.goldens import FIXTURES, expected

ZIP = FIXTURES / "zip"
REFUSED = {
    *("aes.zip", "bad_crc.zip", "deflate64.zip", "empty.zip", "encrypted.zip", "name_mismatch.zip", "overlap.zip", "split.zip"),
    *("symlink.zip", "truncated.zip", "zip64_stream.zip"),
}


def opened(src: Any, folder: Path, **options: Any) -> StreamingDataset:
    given: dict[str, Any] = {"show_progress": False, "cache_limit": "10mb", "on_error": "raise"} | options
    return StreamingDataset(src, folder / "cache", **given)


def parts(dataset: StreamingDataset) -> dict[str, str]:
    """The hash of each member's content, by archive and name."""
    return {
        f"{Path(sample['__url__']).name}:{sample['__key__']}.{name}": hashlib.sha256(value).hexdigest()
        for sample in dataset
        for name, value in sample.items()
        if isinstance(value, bytes)
    }


def test_every_golden_is_read_as_zipfile_reads_it(server: FaultyHttpServer, tmp_path: Path) -> None:
    goldens = expected("zip/expected.json")
    good = sorted(path.name for path in ZIP.glob("*.zip") if path.name not in REFUSED)
    server.objects |= {f"/{name}": (ZIP / name).read_bytes() for name in good}
    found = parts(opened([str(ZIP / name) for name in good], tmp_path))
    for unit in ("members", "whole"):
        assert parts(opened([f"{server.url}/{name}" for name in good], tmp_path / unit, shards=unit)) == found
    num_compared = 0
    for name in good:
        ours = {key.partition(":")[2]: digest for key, digest in found.items() if key.startswith(f"{name}:")}
        listed = goldens[name]["zipfile"].get("members")
        if listed is None or any(isinstance(some.get("content"), dict) for some in listed):  # zipfile cannot read it
            assert ours
            continue
        named = {some["name"]: some["content"] for some in listed if "content" in some and split_name(some["name"])}
        shown = {key: digest for key, digest in named.items() if not (key.startswith("__MACOSX/") or "/." in key)}
        if name == "names_437.zip":  # of UTF-8 without its flag, where zipfile takes code page 437
            ours, shown = dict.fromkeys(sorted(ours.values()), ""), dict.fromkeys(sorted(shown.values()), "")
        assert ours == shown, name
        num_compared += 1
    assert num_compared > 15


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_read_safely_is_a_named_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=name.replace(".", r"\.")):
        list(opened(ZIP / name, tmp_path))


def test_names_that_differ_in_case_alone_are_one_part_twice_and_equal_names_are_one_member(tmp_path: Path) -> None:
    members = [("a.JPG", b"first"), ("b.jpg", b"other"), ("a.jpg", b"second")]
    with zipfile.ZipFile(tmp_path / "cases.zip", "w") as archive:
        for name, data in members:
            archive.writestr(name, data)
    with pytest.raises(DamagedShardError, match=r"cases\.zip has 'a\.jpg' beside 'a\.JPG'.* rename"):
        opened(str(tmp_path / "cases.zip"), tmp_path)
    with zipfile.ZipFile(tmp_path / "same.zip", "w") as archive:
        archive.writestr("a.jpg", b"first")
        with pytest.warns(UserWarning, match="Duplicate name"):
            archive.writestr("a.jpg", b"second")
    assert [sample["jpg"] for sample in opened(str(tmp_path / "same.zip"), tmp_path)] == [b"second"]


def test_s3_a_damaged_member_fails_alone(tmp_path: Path) -> None:
    data = archive(**{"a.txt": b"the first", "b.txt": b"the second", "c.txt": b"the third"})
    (tmp_path / "s.zip").write_bytes(data.replace(b"the second", b"the secone", 1))
    dataset = opened(tmp_path / "s.zip", tmp_path, on_error="skip")
    assert [sample["__key__"] for sample in dataset] == ["a", "c"]
    (failure,) = dataset.failures()
    assert all(word in failure.error for word in ("s.zip", "b.txt", "byte ", "CRC-32", "sample 'b'"))
    with pytest.raises(DamagedMemberError, match="row 1, sample 'b'"):
        dataset[1]


def test_folders_of_hugging_face_have_the_rows_of_their_metadata(tmp_path: Path) -> None:
    there = expected("hf/zip.expected.json")["folder.zip, streaming=False"]
    dataset = opened(FIXTURES / "hf/folder.zip", tmp_path)
    assert [(sample["caption"], sample["box"]) for sample in dataset] == [(row["caption"], row["box"]) for row in there["rows"]]
    names = [row["image"]["path"].removeprefix("zip://").partition("::")[0] for row in there["rows"]]
    with zipfile.ZipFile(FIXTURES / "hf/folder.zip") as archive:
        assert [sample["image"] for sample in dataset] == [archive.read(name) for name in names]
    assert [sample["__key__"] for sample in dataset] == names
    assert len(dataset.select("caption LIKE '%2' AND image > 10")) == 1


def test_folders_are_labels_where_they_are_asked_for(tmp_path: Path) -> None:
    dataset = opened(FIXTURES / "hf/labels.zip", tmp_path, source_options={"label_column": "label"})
    assert {sample["__key__"]: sample["label"] for sample in dataset} == {
        key: key.split("/")[-2] for key in (sample["__key__"] for sample in dataset)
    }
    assert (
        len(opened(FIXTURES / "hf/labels.zip", tmp_path, source_options={"label_column": "label"}, where="label = 'dog'")) == 2
    )
    with pytest.raises(ConfigError, match=r"^label_column='label' is for ZIP .*, and .*folder\.zip has some"):
        opened(FIXTURES / "hf/folder.zip", tmp_path, source_options={"label_column": "label"})


def archive(**files: bytes) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as made:
        for name, content in files.items():
            made.writestr(name.replace("__", "/"), content)
    return data.getvalue()


def test_metadata_that_names_no_file_or_two_for_one_column_is_an_error(tmp_path: Path) -> None:
    for name, files, why in (
        ("a.zip", {"metadata.csv": b"file_name,x\nno.png,1\n", "a.png": b"a"}, "'no.png'"),
        ("b.zip", {"metadata.csv": b"file_name,x\n../a.png,1\n", "a.png": b"a"}, r"'\.\./a\.png'"),
    ):
        (tmp_path / name).write_bytes(archive(**files))
        with pytest.raises(SourceError, match=why):
            opened(tmp_path / name, tmp_path)
    (tmp_path / "c.zip").write_bytes(archive(**{"metadata.csv": b"x\n1\n", "a.png": b"a"}))
    with pytest.raises(SchemaError, match="file_name"):
        opened(tmp_path / "c.zip", tmp_path)
    two = {"metadata.csv": b"file_name,image_file_name\na.png,b.png\n", "a.png": b"a", "b.png": b"b"}
    (tmp_path / "d.zip").write_bytes(archive(**two))
    with pytest.raises(SchemaError, match=r"d\.zip: metadata\.csv: row 0 has two files for the column 'image'"):
        opened(tmp_path / "d.zip", tmp_path)


def test_metadata_may_have_columns_that_end_as_file_name_does_and_names_of_files_that_are_numbers(tmp_path: Path) -> None:
    metadata = b"file_name,mask_file_name,profile_name,profile_names\n1,2,Ann,a b\n2,1,Bob,c\n"
    (tmp_path / "a.zip").write_bytes(archive(**{"metadata.csv": metadata, "1": b"one", "2": b"two"}))
    names = ("file", "mask", "profile_name", "profile_names")
    with opened(tmp_path / "a.zip", tmp_path) as dataset:
        assert [tuple(sample[name] for name in names) for sample in dataset] == [
            (b"one", b"two", "Ann", "a b"),
            (b"two", b"one", "Bob", "c"),
        ]


def test_metadata_are_read_in_any_folder_and_errors_call_them_as_the_archive_does(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    server.objects["/a.zip"] = archive(**{"1?__metadata.csv": b"file_name,n\na.png,7\n", "1?__a.png": b"a"})
    with opened(f"{server.url}/a.zip", tmp_path) as dataset:
        assert [(sample["n"], sample["image"]) for sample in dataset] == [(7, b"a")]
    for text, error, why in (
        (b"file_name,n\na.png,7,8\n", SourceError, r"b\.zip: metadata\.csv, line 2: 3 values"),
        (b"file_name,file_name\na.png,a.png\n", SchemaError, "'file_name' more than once"),
    ):
        (tmp_path / "b.zip").write_bytes(archive(**{"metadata.csv": text, "a.png": b"a"}))
        with pytest.raises(error, match=why):
            opened(tmp_path / "b.zip", tmp_path)


def test_columns_of_several_metadata_files_have_the_values_of_each_or_are_refused_by_name(tmp_path: Path) -> None:
    for name, one, two, wanted in (
        ("null", b"null", b"[1, 2]", [None, [1, 2]]),
        ("float", b"1", b"2.5", [1.0, 2.5]),
        ("text", b"[1]", b'"t"', r"'n' is JSON in .*text\.zip: a/metadata\.jsonl and string in .*text\.zip: b/metadata\.jsonl"),
        ("type", b"1", b'"t"', r"'n' is int64 in .*, or leave it out of the metadata$"),
        ("sign", b"-1", b"18446744073709551615", r"sign\.zip: its metadata have values of several types"),
    ):
        files = {f"{at}__metadata.jsonl": b'{"file_name": "x.png", "n": %b}' % value for at, value in (("a", one), ("b", two))}
        (tmp_path / f"{name}.zip").write_bytes(archive(**files, **{"a__x.png": b"a", "b__x.png": b"b"}))
        if isinstance(wanted, str):
            with pytest.raises(SchemaError, match=wanted):
                opened(tmp_path / f"{name}.zip", tmp_path)
        else:
            with opened(tmp_path / f"{name}.zip", tmp_path) as dataset:
                assert [sample["n"] for sample in dataset] == wanted


def test_an_archive_over_http_takes_two_requests_for_its_index(server: FaultyHttpServer, tmp_path: Path) -> None:
    files = {f"d{number % 7}__{number:04}.bin": bytes([number % 256]) * 40_000 for number in range(60)}
    server.objects["/big.zip"] = archive(**files)
    dataset = opened(f"{server.url}/big.zip", tmp_path, shards="members", shuffle_seed=1)
    asked = [request for request in server.requests("/big.zip") if request.method == "GET"]
    assert len(asked) <= 2
    assert len(parts(dataset)) == 60
    assert len([request for request in server.requests("/big.zip") if request.method == "GET"]) - len(asked) <= 60
    assert sorted(parts(dataset)) == sorted(f"big.zip:{name.replace('__', '/')}" for name in files)
