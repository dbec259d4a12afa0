"""`sqlstream index export --config`: a YAML file, and the files that it makes on disk and on a real S3 server."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sqlstream.cli.export_config import read_config
from sqlstream.cli.main import main
from sqlstream.testing.servers import LocalS3
from tests.processes import ROOT

NUM_ROWS = 200


@pytest.fixture
def src(tmp_path: Path) -> Path:
    rows = range(NUM_ROWS)
    pq.write_table(
        pa.table({"index": [f"k{n}" for n in rows], "n": rows, "tags": [[n] for n in rows]}), tmp_path / "src.parquet"
    )
    return tmp_path / "src.parquet"


def written(tmp_path: Path, **keys: Any) -> Path:
    """A file with these keys; JSON is YAML."""
    path = tmp_path / "tables.yaml"
    path.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    return path


def failure(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_a_query_goes_to_s3_as_training_and_validation_tables(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def export(*words: str, **changes: Any) -> Any:
        path = written(tmp_path, **{**keys, **changes})
        assert main(["index", "export", "--config", str(path), "--json", *words]) == 0
        return json.loads(capsys.readouterr().out)

    def puts() -> int:
        return sum(request.method == "PUT" and ".parquet" in request.path for request in s3.requests())

    with LocalS3() as s3:
        s3.put("prepared/x", b"")
        options = s3.storage_options
        keys = {
            "src": str(src),
            "sql_query": "SELECT *, n * 2 AS twice FROM dataframe WHERE n < 150",
            "s3_destination_path": "s3://prepared/photos/v2/",
            "s3_bucket_region": "us-east-1",
            "storage_options": {"endpoint_url": options["endpoint_url"], "key": options["key"]},
            "recompute": False,
            "val_ratio": 0.2,
            "max_num_val_rows": 7,
            "row_group_size": 50,
            "local_tmp_dir": str(tmp_path / "scratch"),
        }
        secret = ("--storage-option", f"secret={options['secret']}")
        document = export(*secret)
        assert document == {
            "files": ["s3://prepared/photos/v2/val.parquet", "s3://prepared/photos/v2/train.parquet"],
            "num_rows": [7, 143],
        }
        assert [path.name for path in (tmp_path / "scratch").iterdir()] == []
        again = export(*secret)
        assert (again["files"], again["num_rows"], puts()) == (document["files"], [None, None], 2)
        assert export(*secret, recompute=True)["num_rows"] == [7, 143]
        assert puts() == 4
        s3.delete(document["files"][1])
        half = failure(capsys, "index", "export", "--config", written(tmp_path, **keys), *secret)
        assert "v2/val.parquet is there, and s3://prepared/photos/v2/train.parquet is not" in half
        assert "recompute: true" in half


def test_the_tables_lie_in_a_directory_and_share_the_rows_by_key(
    src: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "folder"
    path = written(tmp_path, src=str(src), destination=str(out), val_ratio=0.2, where="n >= 100", row_group_size=30)
    assert main(["index", "export", "--config", str(path)]) == 0
    val, train = (pq.read_table(out / f"{name}.parquet") for name in ("val", "train"))
    rows: list[Any] = val["n"].to_pylist() + train["n"].to_pylist()
    assert sorted(rows) == list(range(100, NUM_ROWS))
    assert val.schema.equals(train.schema)
    assert pq.read_metadata(out / "train.parquet").row_group(0).num_rows == 30
    capsys.readouterr()
    assert main(["index", "export", "--config", str(path)]) == 0
    assert f"nothing was done: {out}/val.parquet and {out}/train.parquet are there" in capsys.readouterr().out
    whole = written(tmp_path, src=str(src), destination=str(tmp_path / "whole"))
    assert main(["index", "export", "--config", str(whole)]) == 0
    assert [path.name for path in (tmp_path / "whole").iterdir()] == ["train.parquet"]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"val_ration": 0.1}, "'val_ration' is no key of an export: did you mean 'val_ratio'? It takes bq_project, src,"),
        ({"val_ratio": "0.1"}, "val_ratio is '0.1': give a whole number or a number"),
        ({"recompute": 1}, "recompute is 1: give true or false"),
        ({"max_num_val_rows": True}, "max_num_val_rows is True: give a whole number"),
        ({"storage_options": "secret"}, "storage_options is a str: give a mapping"),
        ({"val_ratio": 1.0}, "val_ratio=1 is out of range"),
        ({"max_num_val_rows": 5}, "max_num_val_rows=5 bounds val.parquet, which there is not: give val_ratio, too"),
        ({"row_group_size": 0}, "row_group_size=0 is out of range"),
        ({"bq_project": "p"}, "it has bq_project and src"),
        ({"src": None}, "it has neither bq_project nor src"),
        ({"src": None, "bq_project": "p"}, "bq_project='p' has no sql_query"),
        ({"destination": None}, "it has neither s3_destination_path nor destination"),
        ({"destination": None, "s3_destination_path": "bucket/x"}, "s3_destination_path='bucket/x' is not on S3"),
        ({"sql_engine": "spark"}, "sql_engine='spark' is unknown"),
    ],
)
def test_a_wrong_key_or_value_is_named(
    keys: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, **{"src": "t.csv", "destination": str(tmp_path / "out"), **keys})
    error = failure(capsys, "index", "export", "--config", path)
    assert message in error
    assert str(path) in error
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_no_yaml_of_keys_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.yaml"
    assert "cannot be read" in failure(capsys, "index", "export", "--config", path)
    path.write_text("a: [")
    assert "is no YAML" in failure(capsys, "index", "export", "--config", path)
    path.write_text("- a")
    assert "holds no keys" in failure(capsys, "index", "export", "--config", path)
    assert "export needs DST and OUT, or --config" in failure(capsys, "index", "export", tmp_path)
    assert "--config and DST exclude each other" in failure(capsys, "index", "export", tmp_path, "--config", path)
    assert "--config and --split exclude" in failure(capsys, "index", "export", "--config", path, "--split", "val=0.1")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert "pip install 'sqlstream-data[yaml]'" in failure(capsys, "index", "export", "--config", path)


def test_bigquery_runs_the_query_and_names_its_extra_where_that_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {"bq_project": "my-project", "sql_query": "SELECT 1 AS n", "gcs_tmp_dir": "gs://scratch/x"}
    path = written(tmp_path, **keys, destination=str(tmp_path / "out"))
    assert read_config(str(path)).index.src == "bigquery://my-project"
    assert "gcs_tmp_dir is not used" in caplog.text
    monkeypatch.setitem(sys.modules, "google.cloud.bigquery", None)
    error = failure(capsys, "index", "export", "--config", path)
    assert "bigquery://my-project needs a driver that is not installed" in error
    assert "sqlstream-data[bigquery]" in error


def test_the_file_on_the_page_is_one(tmp_path: Path) -> None:
    example = re.search(r"```yaml\n(bq_project.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)
    assert example is not None
    (tmp_path / "tables.yaml").write_text(example[1])
    config = read_config(str(tmp_path / "tables.yaml"))
    assert (config.destination, config.val_ratio, config.max_val_rows) == ("s3://my-bucket/photos/v2", 0.01, 10_000)
