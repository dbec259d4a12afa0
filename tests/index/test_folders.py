"""Folders of samples: one column for the main file whatever its extension, labels where folders look like classes."""

from __future__ import annotations

import contextlib
import json
import pickle
import sqlite3
from pathlib import Path

import pytest

from sqlstream.errors import SourceError
from sqlstream.index.file.index import Index
from sqlstream.index.file.intact import stamp_sqlite
from sqlstream.index.info import list_indexes
from tests.index.sources import FolderReader, all_rows, build, make_samples, write_csv


def test_links_to_folders_that_hold_them_are_not_followed_and_others_are(tmp_path: Path) -> None:
    for name in ("d/one", "d/two", "beside"):
        write_csv(tmp_path / name / "t.csv", f"name\n{name}\n")
    links = {"d/one/up": "d", "d/one/on": "d/two", "d/two/back": "d/one", "d/two/above": ".", "d/other": "beside"}
    for at, to in links.items():
        (tmp_path / at).symlink_to(tmp_path / to)
    (tmp_path / "d/itself").symlink_to("itself")
    found = [row["name"] for row in all_rows(build(tmp_path, tmp_path / "d/**/one/*.csv"))]
    assert set(found) == {"d/one"}
    every = [row["name"] for row in all_rows(build(tmp_path, tmp_path / "d/**/**/*.csv"))]
    assert set(every) == {"d/one", "d/two", "beside"}
    assert len(every) < 20, "glob goes around for ever"


def test_a_link_to_itself_is_one_to_nowhere(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "a.jpg", "below/b.jpg")
    for name, to in {"itself": "itself", "c.jpg": "c.jpg", "gone.jpg": "gone", "below/up": ".."}.items():
        (tmp_path / "d" / name).symlink_to(to)
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image"))
    assert [row["image"] for row in rows] == ["a.jpg", "below/b.jpg"]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_the_main_file_has_a_column_of_its_own_whatever_its_extension(where: str, tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "a.jpg", "b.JPG", "c.jpeg", "d.webp", "e.png", "e.gif", "e.txt")
    src = f"{tmp_path}/d/" if where == "local" else "s3://bucket/d/"
    index = build(tmp_path, src, FolderReader(tmp_path), data_type="image", columns_to_download=("image",))
    rows = all_rows(index)
    assert [row["image"] for row in rows] == ["a.jpg", "b.JPG", "c.jpeg", "d.webp", "e.gif"]
    assert rows[4] == {
        "index": "e",
        "jpg": None,
        "jpeg": None,
        "webp": None,
        "gif": "e.gif",
        "png": "e.png",
        "txt": "e.txt",
    } | {"image": "e.gif"}
    if where == "remote":
        listed = json.loads(index.listed([1])[1])
        assert listed["image"] == listed["jpg"]


def test_the_column_has_the_name_of_the_type(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "a.mp4", "b.webm", "a.json", "b.xml")
    assert [row["video"] for row in all_rows(build(tmp_path, tmp_path / "d", data_type="video"))] == ["a.mp4", "b.webm"]
    assert [row["text"] for row in all_rows(build(tmp_path, tmp_path / "d", data_type="text"))] == ["a.json", "b.xml"]


def test_an_extension_of_that_name_keeps_its_column(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "cat/a.jpg", "cat/a.image", "dog/b.jpg", "dog/b.label")
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image"))
    assert [(row["index"], row["image"], row["label"]) for row in rows] == [
        ("a", "cat/a.image", None),
        ("b", None, "dog/b.label"),
    ]


CLASSES = [
    (("cat/1.jpg", "dog/1.jpg"), [("cat/1", "cat"), ("dog/1", "dog")]),
    (("cat/1.jpg", "cat/1.txt", "dog/1.jpg", "dog/1.txt"), [("cat/1", "cat"), ("dog/1", "dog")]),
    (("cat/1.jpg", "dog/2.jpg", "README.txt"), [("1", "cat"), ("2", "dog")]),
    (("train/cat/1.jpg", "train/dog/2.jpg", "val/cat/3.jpg"), [("1", "cat"), ("2", "dog"), ("3", "cat")]),
    (
        ("train/cat/1.jpg", "val/cat/1.jpg", "val/dog/2.jpg"),
        [("train/cat/1", "cat"), ("val/cat/1", "cat"), ("val/dog/2", "dog")],
    ),
    (("cat/1.jpg", "dog/1.webp", "dog/2.jpg"), [("cat/1", "cat"), ("dog/1", "dog"), ("dog/2", "dog")]),
    (("cat/a.b.c.jpg", "dog/a.b.c.jpg"), [("cat/a.b.c", "cat"), ("dog/a.b.c", "dog")]),
]


@pytest.mark.parametrize(("names", "expected"), CLASSES)
def test_folders_that_look_like_classes_are_labels(
    names: tuple[str, ...], expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    make_samples(tmp_path / "d", *names)
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image"))
    assert [(row["index"], row["label"]) for row in rows] == expected
    if "cat/1.txt" in names:
        assert [row["txt"] for row in rows] == ["cat/1.txt", "dog/1.txt"]
    labelled = all_rows(build(tmp_path, tmp_path / "d", data_type="image", label_column="label"))
    assert [row["label"] for row in labelled] == [row["label"] for row in rows]


@pytest.mark.parametrize(
    "names",
    [
        ("1.jpg", "2.jpg"),
        ("cat/1.jpg", "cat/2.jpg"),
        ("cat/1.jpg", "2.jpg"),
        ("cat/1.jpg", "a/dog/2.jpg"),
        ("images/a/1.jpg", "images/b/2.jpg", "captions/a/1.txt", "captions/b/2.txt"),
        ("images/1.jpg", "images/2.jpg", "masks/1.png", "masks/2.png"),
    ],
)
def test_other_folders_are_not(names: tuple[str, ...], tmp_path: Path) -> None:
    make_samples(tmp_path / "d", *names)
    rows = all_rows(build(tmp_path, tmp_path / "d", data_type="image"))
    assert all("label" not in row for row in rows)
    assert [row["index"] for row in rows] == ["1", "2"][: len(rows)]
    if "images/a/1.jpg" in names:
        assert [row["txt"] for row in rows] == ["captions/a/1.txt", "captions/b/2.txt"]


@pytest.mark.parametrize(
    "names",
    [
        ("cat/1.jpg", "a/dog/1.jpg"),
        ("1.jpg", "cat/1.jpg"),
        ("images/a/1.jpg", "images/b/1.jpg", "captions/a/1.txt"),
        ("images/a/1.jpg", "images/b/1.jpg", "masks/a/1.png", "masks/b/1.png"),
    ],
)
def test_names_that_come_twice_in_other_folders_are_an_error_with_the_cure(names: tuple[str, ...], tmp_path: Path) -> None:
    make_samples(tmp_path / "d", *names)
    with pytest.raises(SourceError, match=r"1\.(jpg|png) have the same key '1' .*source_options=\{'label_column': 'label'\}"):
        build(tmp_path, tmp_path / "d", data_type="image")
    num_pictures = sum(not name.endswith("txt") for name in names)
    assert len(build(tmp_path, tmp_path / "d", data_type="image", label_column="label")) == num_pictures


@pytest.mark.parametrize("names", [("1.jpg", "1.JPG"), ("cat/1.jpg", "cat/1.JPG", "dog/1.jpg")])
def test_two_names_in_one_folder_that_differ_in_case_are_an_error(names: tuple[str, ...], tmp_path: Path) -> None:
    make_samples(tmp_path / "d", *names)
    with pytest.raises(SourceError, match=r"1\.JPG and .*1\.jpg have the same key '(cat/)?1'.* rename one"):
        build(tmp_path, tmp_path / "d", data_type="image")


def as_of_an_earlier_version(index: Index) -> None:
    """Have the file of an index say nothing of its columns, as those of earlier versions."""
    index.close()
    with contextlib.closing(sqlite3.connect(index.path)) as file:
        file.execute("DELETE FROM meta WHERE key = 'layout'")
        file.commit()
    stamp_sqlite(index.path)
    assert len(all_rows(index)) == 2


def test_an_index_of_an_earlier_version_is_built_again_under_its_name(tmp_path: Path) -> None:
    make_samples(tmp_path / "d", "cat/1.jpg", "dog/2.jpg")
    query = "SELECT *, upper(label) AS name FROM dataframe"
    first = build(tmp_path, tmp_path / "d", data_type="image")
    computed = build(tmp_path, tmp_path / "d", data_type="image", sql_query=query)
    as_of_an_earlier_version(first)
    as_of_an_earlier_version(computed)
    before = first.path.stat().st_ino, computed.path.stat().st_ino
    assert first.fingerprint == first.path.stem
    again = build(tmp_path, tmp_path / "d", data_type="image")
    computed_again = build(tmp_path, tmp_path / "d", data_type="image", sql_query=query)
    assert (again.fingerprint, computed_again.fingerprint) == (first.fingerprint, computed.fingerprint)
    assert (again.path.stat().st_ino != before[0], computed_again.path.stat().st_ino != before[1]) == (True, True)
    assert build(tmp_path, tmp_path / "d", data_type="image").path.stat().st_ino == again.path.stat().st_ino


def test_rows_that_earlier_versions_made_otherwise_have_another_fingerprint(tmp_path: Path) -> None:
    """There 1.jpg and 1.webp of two folders were one sample: a state must not go on with other rows."""
    make_samples(tmp_path / "d", "cat/1.jpg", "dog/1.webp", "dog/2.jpg")
    index = build(tmp_path, tmp_path / "d", data_type="image")
    assert index.fingerprint != index.path.stem
    assert pickle.loads(pickle.dumps(index)).fingerprint == index.fingerprint
    chosen = build(tmp_path, tmp_path / "d", data_type="image", where="label = 'dog'")
    assert [row["index"] for row in all_rows(chosen)] == ["dog/1", "dog/2"]
    assert [info.num_selected for info in list_indexes(tmp_path / "index")] == [3, 2]
