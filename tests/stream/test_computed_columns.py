"""Columns that a query computes or renames, downloaded under their new names."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream import MixedDataset, StreamingDataset
from sqlstream.errors import AccessDeniedError, ConfigError, ObjectNotFoundError, QueryError, SchemaError
from sqlstream.testing.servers import FaultyHttpServer
from tests.index.sources import make_samples
from tests.stream.tables import make_table

ENGINES = ["sqlite", *(["duckdb"] if importlib.util.find_spec("duckdb") else [])]
KEYS = ("aab0001", "aab0002", "zxc0003")


@pytest.fixture
def pictures(server: FaultyHttpServer) -> FaultyHttpServer:
    """Pictures of a server, by the first letters of their keys."""
    server.objects |= {f"/images/{key[:3]}/{key}.jpg": f"picture {key}".encode() for key in KEYS}
    return server


def opened(src: object, cache: Path, **options: Any) -> StreamingDataset:
    given = {"columns_to_download": ["image"], "on_error": "raise", "show_progress": False, "cache_limit": None, **options}
    return StreamingDataset(src, cache, **given)


def contents(dataset: StreamingDataset, field: str = "image") -> list[str]:
    return [Path(sample[field]).read_text() for sample in dataset]


def by_key(server: FaultyHttpServer) -> str:
    return f"'{server.url}/images/' || substr(key, 1, 3) || '/' || key || '.jpg'"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_metadata_file_without_urls_whose_image_is_computed_from_its_key(
    engine: str, pictures: FaultyHttpServer, tmp_path: Path
) -> None:
    lines = [json.dumps({"key": key, "caption": f"a {key}"}) for key in KEYS]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {
        "sql_query": f"SELECT *, {by_key(pictures)} AS image FROM dataframe",
        "source_options": {"sql_engine": engine},
    }
    with opened(tmp_path / "metadata.jsonl", tmp_path / "cache", **options) as dataset:
        assert contents(dataset) == [f"picture {key}" for key in KEYS]
        assert [sample["caption"] for sample in dataset] == [f"a {key}" for key in KEYS]
        first, state = next(iter(dataset))["key"], dataset.state_dict()
    with opened(tmp_path / "metadata.jsonl", tmp_path / "cache", **options) as dataset:
        dataset.load_state_dict(state)
        assert [first, *(sample["key"] for sample in dataset)] == list(KEYS)


@pytest.fixture
def table(pictures: FaultyHttpServer, tmp_path: Path) -> Path:
    urls = [f"{pictures.url}/images/{key[:3]}/{key}.jpg" for key in KEYS]
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"index": KEYS, "image": [*urls[:2], None], "small": [None, None, urls[2]]}), path)
    return path


@pytest.mark.parametrize(
    ("columns", "renamed", "allows", "engine"),
    [
        ('"index", image AS jpg', 2, False, "sqlite"),
        ('"index", image AS jpg', 2, True, "sqlite"),
        ("*, coalesce(image, small) AS jpg", 3, False, "sqlite"),
        ("*, coalesce(image, small) AS jpg", 3, True, "sqlite"),
        ("*, coalesce(image, small) AS jpg", 3, True, ENGINES[-1]),
    ],
)
def test_a_renamed_column_is_downloaded_under_its_new_name(
    columns: str, renamed: int, allows: bool, engine: str, table: Path, tmp_path: Path
) -> None:
    options = {
        "sql_query": f"SELECT {columns} FROM dataframe",
        "columns_to_download": ["jpg"],
        "allow_missing_columns": allows,
        "source_options": {"sql_engine": engine},
    }
    with opened(table, tmp_path / "cache", max_size=renamed, **options) as dataset:
        assert contents(dataset, "jpg") == [f"picture {key}" for key in KEYS[:renamed]]
        assert [sample["__sample_key__"] for sample in dataset] == list(KEYS[:renamed])
    with opened(table, tmp_path / "cache", where="jpg LIKE '%aab0002%'", **options) as dataset:
        assert contents(dataset, "jpg") == ["picture aab0002"]


def test_a_column_that_neither_source_nor_query_gives_is_named_once_and_rightly(table: Path, tmp_path: Path) -> None:
    for query in ('SELECT "index", image AS jpeg FROM dataframe', "SELECT *, 1 AS one FROM dataframe"):
        with pytest.raises(SchemaError, match="gives no 'jpg', which is a column of columns_to_download: select it as well"):
            opened(table, tmp_path / "cache", sql_query=query, columns_to_download=["jpg"])
        with opened(
            table, tmp_path / "cache", sql_query=query, columns_to_download=["jpg"], allow_missing_columns=True
        ) as dataset:
            assert [sample["jpg"] for sample in dataset] == [None] * 3
    with pytest.raises(SchemaError, match=r"has no such column: .*compute it \(sql_query="):
        opened(table, tmp_path / "cache", where="row < 2", columns_to_download=["jpg"])
    with pytest.raises(QueryError, match="no such column: jpg"):
        opened(table, tmp_path / "cache", sql_query="SELECT *, jpg || '' AS image2 FROM dataframe", columns_to_download=["jpg"])


def test_a_column_that_may_be_missing_can_still_be_asked_for_in_a_query(table: Path, tmp_path: Path) -> None:
    options = {"columns_to_download": ["image", "jpg"], "allow_missing_columns": True}
    query = "SELECT index, coalesce(jpg, image) AS image FROM dataframe"
    with opened(table, tmp_path / "cache", sql_query=query, max_size=2, **options) as dataset:
        assert contents(dataset) == [f"picture {key}" for key in KEYS[:2]]
        assert [sample["jpg"] for sample in dataset] == [None, None]


@pytest.mark.parametrize("is_remote", [False, True])
def test_files_of_several_extensions_become_one_column(is_remote: bool, server: FaultyHttpServer, tmp_path: Path) -> None:
    folder = make_samples(tmp_path / "photos", "a.jpg", "b.JPEG", "c.webp")
    src, options = str(folder), dict[str, object]()
    if is_remote:
        server.objects |= {f"/bucket/photos/{path.name}": path.read_bytes() for path in folder.iterdir()}
        src, options = "s3://bucket/photos/", {"endpoint_url": server.url, "anon": True, "region": "us-east-1"}
    query = "SELECT *, coalesce(jpg, jpeg, webp) AS picture FROM dataframe"
    given = {"data_type": "image", "sql_query": query, "columns_to_download": ["picture"], "storage_options": options}
    with opened(src, tmp_path / "cache", **given) as dataset:
        assert contents(dataset, "picture") == ["a.jpg", "b.JPEG", "c.webp"]


def test_a_quoted_url_is_unquoted_by_the_query(server: FaultyHttpServer, tmp_path: Path) -> None:
    make_samples(tmp_path, "a b+ü.jpg")
    (tmp_path / "t.csv").write_text("index,link\na,https%3A//example.org/x/a+b%2B%C3%BC.jpg\n")
    query = "SELECT *, parse_filename(unquote_plus(link)) AS image FROM dataframe"
    for engine in ENGINES:
        options = {"sql_query": query, "source_options": {"sql_engine": engine}}
        with opened(tmp_path / "t.csv", tmp_path / "cache", **options) as dataset:
            assert contents(dataset) == ["a b+ü.jpg"]


# -- who may name what --------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.jpg"
    path.write_bytes(b"mine")
    return path


COMPUTED = [
    "SELECT *, '{path}' AS image FROM dataframe",
    "SELECT *, 'file://{path}' AS image FROM dataframe",
    "SELECT *, path AS image FROM dataframe",
    "SELECT * FROM (SELECT path AS image, word FROM dataframe) WHERE (image LIKE '%secret%')",
    "SELECT *, word || substr(path, 5) AS image FROM dataframe",
]


def test_a_computed_url_is_judged_as_one_of_the_table(server: FaultyHttpServer, secret: Path, tmp_path: Path) -> None:
    row = {"index": "a", "word": "local", "path": f"file://{secret}"}
    server.objects["/foreign.jsonl"] = json.dumps(row).encode()
    (tmp_path / "own.jsonl").write_text(json.dumps({**row, "index": "b"}))
    foreign, own = f"{server.url}/foreign.jsonl", tmp_path / "own.jsonl"
    for query in (text.format(path=secret) for text in COMPUTED):
        with opened([own, foreign], tmp_path / "cache", sql_query=query) as dataset:
            for number in range(2):
                with pytest.raises(AccessDeniedError, match="secret"):
                    dataset[number]
    # below the place of a remote table a plain path names no file of this machine
    for text, error in zip(COMPUTED, (ObjectNotFoundError, AccessDeniedError), strict=False):
        query = text.format(path=secret)
        with opened(foreign, tmp_path / "cache", sql_query=query) as dataset, pytest.raises(error, match="secret"):
            dataset[0]
    with opened(own, tmp_path / "cache", sql_query=COMPUTED[0].format(path=secret)) as dataset:
        assert Path(dataset[0]["image"]).read_bytes() == b"mine"


def test_a_column_that_would_hide_behind_the_name_of_a_stream_is_refused(tmp_path: Path) -> None:
    src = make_table(tmp_path, 4)
    query = "SELECT *, 1 AS __stream__ FROM dataframe"
    with opened(src, tmp_path / "cache", columns_to_download=[], sql_query=query) as dataset:
        assert next(iter(dataset))["__stream__"] == 1
        with pytest.raises(ConfigError, match=r"stream 'a' has a column '__stream__'.*give it another name"):
            MixedDataset({"a": dataset})
