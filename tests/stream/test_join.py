"""Joined columns, seen from a dataset: downloads, filters, weights, states, and what a foreign table may name."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sqlstream import StreamingDataset
from sqlstream.errors import AccessDeniedError, ConfigError, StateError
from sqlstream.testing.servers import FaultyHttpServer
from tests.index.sources import write_csv

NUM = 8


def opened(src: object, folder: Path, **options: Any) -> StreamingDataset:
    given = {"columns_to_download": [], "on_error": "raise", "show_progress": False, "on": "id", **options}
    return StreamingDataset(src, folder / "cache", **given)


def write_source(folder: Path) -> Path:
    rows = "".join(f"{n},{n}.jpg\n" for n in range(NUM))
    for n in range(NUM):
        write_csv(folder / f"{n}.jpg", f"picture {n}")
    return write_csv(folder / "t.csv", "id,image\n" + rows)


def write_latents(place: Path, *, last: int = 0) -> Path:
    rows = [f"{n},{n}.npy,{n / NUM}\n" for n in reversed(range(NUM - 1))]
    return write_csv(place, "id,latent,score\n" + "".join(rows) + f"{NUM - 1},{NUM - 1}.npy,{last}\n")


def test_joined_columns_are_downloaded_filtered_and_weighted(tmp_path: Path, server: FaultyHttpServer) -> None:
    source = write_source(tmp_path / "photos")
    server.objects["/far/latents.csv"] = write_latents(tmp_path / "l.csv").read_bytes()
    for n in range(NUM):
        server.objects[f"/far/{n}.npy"] = f"latent {n}".encode()
    given: dict[str, Any] = {"join": {"latents": f"{server.url}/far/latents.csv"}}
    with opened(source, tmp_path, columns_to_download=["image", "latent"], where="score >= 0.5", **given) as dataset:
        assert len(dataset) == 3
        assert [Path(sample["image"]).read_text() for sample in dataset] == ["picture 4", "picture 5", "picture 6"]
        assert [Path(dataset[n]["latent"]).read_text() for n in range(3)] == ["latent 4", "latent 5", "latent 6"]
    with opened(source, tmp_path, weights="score > 0.7", **given) as dataset:
        assert Counter(sample["id"] for sample in dataset) == {6: NUM}


def test_a_state_goes_on_with_equal_joined_tables_wherever_they_lie(tmp_path: Path) -> None:
    source, latents = write_source(tmp_path / "photos"), write_latents(tmp_path / "l.csv")
    shutil.copytree(tmp_path / "photos", tmp_path / "copy")
    moved = write_latents(tmp_path / "elsewhere/of/l.csv")
    with opened(source, tmp_path, shuffle_seed=1, join={"latents": latents}) as dataset:
        samples = iter(dataset)
        next(samples)
        state = json.loads(json.dumps(dataset.state_dict()))
        rest = [(sample["id"], sample["score"]) for sample in samples]
    with opened(tmp_path / "copy/t.csv", tmp_path, shuffle_seed=1, join={"latents": moved}) as dataset:
        dataset.load_state_dict(state)
        assert [(sample["id"], sample["score"]) for sample in dataset] == rest
    write_latents(moved, last=1)
    other = opened(tmp_path / "copy/t.csv", tmp_path, shuffle_seed=1, join={"latents": moved})
    with other, pytest.raises(StateError, match="the values of the rows"):
        other.load_state_dict(state)


def test_a_value_of_a_remote_joined_table_names_no_local_file(tmp_path: Path, server: FaultyHttpServer) -> None:
    secret = write_csv(tmp_path / "secret.txt", "mine")
    server.objects["/l.csv"] = f"id,file\n0,file://{secret}\n".encode()
    source = write_csv(tmp_path / "t.csv", f"id,path\n0,{secret}\n")
    join = {"latents": f"{server.url}/l.csv"}

    def moved(row: dict[str, Any]) -> dict[str, Any]:
        return {**row, "path": row["file"]}

    refused: list[dict[str, Any]] = [
        {"columns_to_download": ["file"]},
        {"columns_to_download": ["path"], "sql_query": "SELECT file AS path FROM dataframe"},
        {"columns_to_download": ["path"], "sql_query": "SELECT *, path AS own FROM dataframe"},  # computed rows have no columns
        {"columns_to_download": ["path"], "predownload_transforms": [moved]},
    ]
    for options in refused:
        with (
            opened(source, tmp_path, join=join, **options) as dataset,
            pytest.raises(AccessDeniedError, match=r"named by the remote index .*(l\.csv|t\.csv).*allowed_roots"),
        ):
            dataset[0]
    with opened(source, tmp_path, join=join, columns_to_download=["path"]) as dataset:  # the user's own value
        assert Path(dataset[0]["path"]).read_text() == "mine"
    with opened(source, tmp_path, join=join, columns_to_download=["file"], allowed_roots=[str(tmp_path)]) as dataset:
        assert Path(dataset[0]["file"]).read_text() == "mine"


def test_a_local_joined_table_gives_the_rows_of_a_remote_one_local_files(tmp_path: Path, server: FaultyHttpServer) -> None:
    mask = write_csv(tmp_path / "masks/0.png", "a mask")
    server.objects["/t.csv"] = f"id,image\n0,file://{mask}\n".encode()
    join = {"masks": write_csv(tmp_path / "masks/m.csv", "id,mask\n0,0.png\n")}
    with opened(f"{server.url}/t.csv", tmp_path, join=join, columns_to_download=["mask"]) as dataset:
        assert Path(dataset[0]["mask"]).read_text() == "a mask"
    denied = opened(f"{server.url}/t.csv", tmp_path, join=join, columns_to_download=["image", "mask"])
    with denied, pytest.raises(AccessDeniedError, match=rf"named by the remote index {server.url}/t\.csv"):
        denied[0]


def test_options_of_joined_tables_are_checked(tmp_path: Path) -> None:
    source = write_source(tmp_path / "photos")
    with pytest.raises(ConfigError, match="lazy_index_chunk_size"):
        opened(source, tmp_path, join={"latents": source}, lazy_index_chunk_size=4)
    with pytest.raises(ConfigError, match="join names none"):
        opened(source, tmp_path)
