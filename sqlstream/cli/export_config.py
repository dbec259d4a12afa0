"""The YAML file of `sqlstream index export --config`: a query, and where its rows go as train.parquet and val.parquet.

Its keys are those of `sds`, and some of ours for what is no BigQuery and no S3.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sqlstream.config import IndexOptions, check_at_least
from sqlstream.errors import ConfigError, MissingDependencyError
from sqlstream.storage.base import urls

_logger = logging.getLogger(__name__)

ROW_GROUP_ROWS = 100_000
"""Rows of a row group, if nothing else is asked for."""

_KINDS: dict[str, tuple[type, ...]] = {
    "bq_project": (str,),
    "src": (str, list),
    "sql_query": (str,),
    "where": (str,),
    "sql_engine": (str,),
    "key_column": (str,),
    "s3_destination_path": (str,),
    "destination": (str,),
    "s3_bucket_region": (str,),
    "storage_options": (dict,),
    "recompute": (bool,),
    "val_ratio": (int, float),
    "max_num_val_rows": (int,),
    "shuffle_seed": (int,),
    "row_group_size": (int,),
    "local_tmp_dir": (str,),
    "gcs_tmp_dir": (str,),
}
"""Every key, and the types that YAML gives its values."""
_WORDS: dict[type, str] = {
    str: "a text",
    list: "a list",
    dict: "a mapping",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """What the file says."""

    index: IndexOptions
    """The source, the query, and what names its rows."""
    destination: str
    """The directory or prefix that gets the files, without a slash at its end."""
    storage_options: Mapping[str, object] = field(default_factory=dict, repr=False)
    recompute: bool = False
    """Replace files that are there; else they are left, and nothing is done."""
    val_ratio: float = 0.0
    """Share of val.parquet; 0: there is none."""
    max_val_rows: int | None = None
    shuffle_seed: int | None = None
    row_group_rows: int = ROW_GROUP_ROWS
    scratch: Path | None = None
    """Where the index and the files are made before they are written; None: the system's temporary directory."""


def read_config(path: str) -> ExportConfig:
    """Return what a file says.

    Raises:
        ConfigError: It cannot be read, or a key or a value of it is wrong.
        MissingDependencyError: PyYAML is not installed.
    """
    given = _load(path)
    try:
        return _checked(given)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def _load(path: str) -> Mapping[Any, Any]:
    try:
        import yaml
    except ImportError as error:
        cure = "pip install 'sqlstream-data[yaml]'"
        raise MissingDependencyError(f"--config {path} is YAML, which needs PyYAML: {cure}") from error
    try:
        found = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--config {path} cannot be read ({error}): check the path") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is no YAML ({' '.join(str(error).split())}): correct it") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"--config {path} holds no keys with values: write sql_query: SELECT …, say")
    return found


def _checked(given: Mapping[Any, Any]) -> ExportConfig:
    """Return the values of a file, each of its type and in its range."""
    for key, value in given.items():
        if key not in _KINDS:
            near = difflib.get_close_matches(str(key), _KINDS, n=1)
            meant = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{key!r} is no key of an export: {meant}It takes {', '.join(_KINDS)}")
        kinds = _KINDS[key]
        if value is not None and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            shown = f"a {type(value).__name__}" if key == "storage_options" else repr(value)
            raise ConfigError(f"{key} is {shown}: give {' or '.join(dict.fromkeys(_WORDS[kind] for kind in kinds))}")
    values = {key: value for key, value in given.items() if value is not None}
    if values.get("gcs_tmp_dir") is not None:
        _logger.warning("gcs_tmp_dir is not used: BigQuery's rows come over its storage API, without files in between")
    val_ratio, max_val_rows = float(values.get("val_ratio", 0)), values.get("max_num_val_rows")
    if not 0 <= val_ratio < 1:
        raise ConfigError(f"val_ratio={val_ratio:g} is out of range: give a share of 0 or more, below 1")
    if max_val_rows is not None:
        check_at_least("max_num_val_rows", max_val_rows, 1)
        if not val_ratio:
            raise ConfigError(f"max_num_val_rows={max_val_rows} bounds val.parquet, which there is not: give val_ratio, too")
    row_group_rows = values.get("row_group_size", ROW_GROUP_ROWS)
    check_at_least("row_group_size", row_group_rows, 1)
    region = {"region": values["s3_bucket_region"]} if "s3_bucket_region" in values else {}
    scratch = values.get("local_tmp_dir")
    return ExportConfig(
        index=IndexOptions(
            src=_source(values),
            sql_query=values.get("sql_query"),
            where=values.get("where"),
            sql_engine=values.get("sql_engine", "sqlite"),
            key_column=values.get("key_column"),
            index_limit=None,  # it is gone when the files are written
        ),
        destination=_destination(values),
        storage_options={**region, **values.get("storage_options", {})},
        recompute=values.get("recompute", False),
        val_ratio=val_ratio,
        max_val_rows=max_val_rows,
        shuffle_seed=values.get("shuffle_seed"),
        row_group_rows=row_group_rows,
        scratch=None if scratch is None else Path(scratch).expanduser(),
    )


def _source(values: Mapping[str, Any]) -> Any:
    name = _one_of(values, ("bq_project", "src"), "where rows come from")
    if name == "src":
        return values["src"]
    if "sql_query" not in values:
        raise ConfigError(f"bq_project={values['bq_project']!r} has no sql_query: give the SELECT that BigQuery runs")
    return f"bigquery://{values['bq_project']}"


def _destination(values: Mapping[str, Any]) -> str:
    name = _one_of(values, ("s3_destination_path", "destination"), "where train.parquet goes")
    destination: str = values[name]
    if name == "s3_destination_path" and urls.scheme(destination) not in ("s3", "s3a"):
        raise ConfigError(
            f"s3_destination_path={urls.redact(destination)!r} is not on S3: write s3://bucket/path; another place is given "
            "as destination"
        )
    return os.path.expanduser(destination).rstrip("/") or "/"


def _one_of(values: Mapping[str, Any], names: tuple[str, str], what: str) -> str:
    """Return which of two keys is given."""
    found = [name for name in names if values.get(name)]
    if len(found) != 1:
        both = f"it has {found[0]} and {found[1]}" if found else f"it has neither {names[0]} nor {names[1]}"
        raise ConfigError(f"{both}, which say {what}: give one of them")
    return found[0]
