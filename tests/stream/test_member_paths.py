"""`members="path"`: parts of shards as paths of files."""

from __future__ import annotations

import gzip
import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sqlstream import StreamingDataLoader, StreamingDataset
from sqlstream.errors import ConfigError, DamagedMemberError, SourceChangedError
from sqlstream.testing.invariants import check_invariants
from sqlstream.testing.servers import FaultyHttpServer
from sqlstream.transforms import presets
from tests.cache.kit import break_ledger
from tests.goldens import FIXTURES
from tests.stream import shards
from tests.stream.shards import content, opened, tar_of


def zip_of(made: shards.Made) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number, (key, parts) in enumerate(made):
            for extension, body in parts.items():
                archive.writestr(f"{key}.{extension}", body, (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)[number % 2])
    return data.getvalue()


def read(dataset: StreamingDataset) -> list[dict[str, bytes]]:
    """Key and content of each sample, which has paths under the extensions of its parts."""
    found = []
    for sample in dataset:
        parts = {name: sample[name] for name in ("jpg", "cls", "txt", "seg.png") if sample.get(name) is not None}
        assert all(path.endswith("." + name.rpartition(".")[2]) for name, path in parts.items())
        assert all(Path(path).is_relative_to(dataset.cache.path / "data") for path in parts.values())
        found.append({"__key__": sample["__key__"].encode(), **{name: Path(path).read_bytes() for name, path in parts.items()}})
    return found


@pytest.mark.parametrize("kind", ["tar", "zip"])
@pytest.mark.parametrize("is_remote", [True, False])
def test_parts_are_files_of_the_ledger_with_their_content(
    kind: str, is_remote: bool, server: FaultyHttpServer, tmp_path: Path
) -> None:
    made = [(key, {**parts, "seg.png": b"s" + parts["cls"]}) for key, parts in shards.samples(0, 12)]
    data = tar_of(made) if kind == "tar" else zip_of(made)
    server.objects[f"/s.{kind}"] = data
    (tmp_path / f"s.{kind}").write_bytes(data)
    src = f"{server.url}/s.{kind}" if is_remote else tmp_path / f"s.{kind}"
    expected = [{"__key__": key.encode(), **parts} for key, parts in made]
    dataset = opened(src, tmp_path, members="path")
    num_indexing = len(server.requests(f"/s.{kind}"))
    assert read(dataset) == expected
    num_parts = sum(len(parts) for _, parts in made)
    assert dataset.cache.statistics().entries == num_parts
    assert read(dataset) == expected
    assert len(server.requests(f"/s.{kind}")) - num_indexing == (num_parts if is_remote else 0)
    some = opened(src, tmp_path, members="path", columns_to_download=["jpg"], where="txt IS NULL")
    assert [set(sample) & {"jpg", "cls", "txt", "seg.png"} for sample in some] == [{"jpg"}] * 8
    beside = opened(src, tmp_path, shards="whole")  # bytes of the same shard, in the same cache
    assert [content(sample) for sample in beside] == expected
    for one in (dataset, some, beside):
        one.close()
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_script_that_opens_paths_runs_in_workers_under_a_small_limit(server: FaultyHttpServer, tmp_path: Path) -> None:
    def picture(number: int) -> bytes:
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(data, "PNG")
        return data.getvalue()

    server.objects["/s.tar"] = tar_of([(f"{number:03}", {"png": picture(number)}) for number in range(40)])

    def look(sample: dict[str, Any]) -> dict[str, Any]:
        with Image.open(sample["png"]) as image:  # as scripts of sds do
            return {"red": image.getchannel("R").getpixel((0, 0))}

    dataset = opened(
        f"{server.url}/s.tar", tmp_path, members="path", shuffle_seed=1, transforms=[look], cache_limit=30 * 4096, prefetch=4
    )
    for _ in range(2):
        reds = [red for batch in StreamingDataLoader(dataset, batch_size=4, num_workers=2) for red in batch["red"].tolist()]
        assert sorted(reds) == list(range(40))
    pipeline = presets.create_standard_image_pipeline("png", (8, 8))
    images = opened(f"{server.url}/s.tar", tmp_path / "b", members="path", transforms=pipeline, columns_to_download=["png"])
    assert images[7]["image"].shape == (3, 8, 8)


def test_files_that_metadata_of_a_zip_name_have_their_extensions(tmp_path: Path) -> None:
    dataset = opened(FIXTURES / "hf/folder.zip", tmp_path, members="path")
    bytes_of = opened(FIXTURES / "hf/folder.zip", tmp_path)
    for sample, plain in zip(dataset, bytes_of, strict=True):
        assert sample["image"].endswith(".png")
        assert Path(sample["image"]).read_bytes() == plain["image"]


def test_empty_parts_are_empty_files(server: FaultyHttpServer, tmp_path: Path) -> None:
    made: shards.Made = [("a", {"jpg": b"x", "txt": b""}), ("b", {"jpg": b"", "txt": b"y"})]
    for name, data in (("s.tar", tar_of(made)), ("s.zip", zip_of(made))):
        server.objects[f"/{name}"] = data
        assert read(opened(f"{server.url}/{name}", tmp_path, members="path")) == [
            {"__key__": key.encode(), **parts} for key, parts in made
        ]


@pytest.mark.parametrize("is_remote", [True, False])
def test_parts_of_a_shard_that_is_compressed_as_a_whole_are_copies_of_the_ledger(
    is_remote: bool, server: FaultyHttpServer, tmp_path: Path
) -> None:
    made = shards.samples(0, 12)
    data = gzip.compress(tar_of(made))
    server.objects["/s.tar.gz"] = data
    (tmp_path / "s.tar.gz").write_bytes(data)
    src = f"{server.url}/s.tar.gz" if is_remote else tmp_path / "s.tar.gz"
    expected = [{"__key__": key.encode(), **parts} for key, parts in made]
    dataset = opened(src, tmp_path, members="path")
    assert read(dataset) == expected
    num_parts = sum(len(parts) for _, parts in made)
    assert dataset.cache.statistics().entries == 1 + num_parts  # the content of the shard, and the copies
    num_requests = len(server.requests("/s.tar.gz"))
    before = dataset.cache.statistics()
    assert read(dataset) == expected
    after = dataset.cache.statistics()
    assert (after.misses, after.hits - before.hits) == (before.misses, num_parts)  # the copies alone, not the shard
    assert dataset[5]["jpg"] == list(dataset)[5]["jpg"]
    assert len(server.requests("/s.tar.gz")) == num_requests
    beside = opened(src, tmp_path)
    assert [content(sample) for sample in beside] == expected
    for one in (dataset, beside):
        one.close()
    check_invariants(tmp_path / "cache", at_rest=True)


def test_copies_give_room_to_each_other_and_are_made_again(server: FaultyHttpServer, tmp_path: Path) -> None:
    made = [(f"{number:03}", {"bin": bytes([number]) * 5000}) for number in range(24)]
    for shard in range(2):
        server.objects[f"/{shard}.tar.gz"] = gzip.compress(tar_of(made[12 * shard : 12 * shard + 12]))
    shard_bytes = 12 * (512 + 5120) + 10240
    dataset = opened(
        f"{server.url}/{{0..1}}.tar.gz",
        tmp_path,
        members="path",
        cache_limit=shard_bytes + 2 * 8192,
        transforms=[lambda sample: {"bin": Path(sample["bin"]).read_bytes()}],
    )
    for _ in range(2):
        found = [data for batch in StreamingDataLoader(dataset, batch_size=4) for data in batch["bin"]]
        assert found == [parts["bin"] for _, parts in made]
    assert dataset[17]["bin"] == made[17][1]["bin"]
    dataset.close()
    check_invariants(tmp_path / "cache", at_rest=True)


def test_a_copy_that_is_gone_is_made_again_and_a_cache_that_fails_gives_private_files(tmp_path: Path) -> None:
    made = shards.samples(0, 3)
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(tar_of(made)))
    dataset = opened(tmp_path / "s.tar.gz", tmp_path, members="path", columns_to_download=["jpg"], on_cache_error="bypass")
    first = Path(dataset[0]["jpg"])
    dataset.cache.clear()
    samples = iter(dataset)
    assert Path(next(samples)["jpg"]).read_bytes() == made[0][1]["jpg"]
    assert first.read_bytes() == made[0][1]["jpg"]
    samples.close()  # type: ignore[attr-defined]  # a generator
    break_ledger(dataset.cache)
    path = Path(dataset[1]["jpg"])
    assert path.read_bytes() == made[1][1]["jpg"]
    assert not path.is_relative_to(tmp_path / "cache")


def test_shards_without_files_are_refused(tmp_path: Path) -> None:
    for name in ("plain", "zstd"):
        for lazy in (None, 1):
            with pytest.raises(ConfigError, match=r"mds/.* has shards of values"):
                opened(FIXTURES / f"mds/{name}", tmp_path, members="path", lazy_index_chunk_size=lazy)
            dataset = opened(
                FIXTURES / f"mds/{name}", tmp_path, members="path", lazy_index_chunk_size=lazy, columns_to_download=[]
            )
            assert dataset[0]["__sample_key__"] == "0"  # no part of it is asked for
    (tmp_path / "s.tar.gz").write_bytes(gzip.compress(tar_of(shards.samples(0, 3))))
    with pytest.raises(ConfigError, match="shards='whole'"):
        opened(tmp_path / "s.tar.gz", tmp_path, members="path", shards="whole")
    with pytest.raises(ConfigError, match="members='paths' is unknown"):
        opened(tmp_path / "s.tar.gz", tmp_path, members="paths")


def test_a_damaged_part_fails_alone_and_a_shard_that_changes_is_an_error(server: FaultyHttpServer, tmp_path: Path) -> None:
    made: shards.Made = [(name, {"txt": f"the text of {name}".encode()}) for name in ("a", "b", "c", "d")]
    server.objects["/s.zip"] = zip_of(made).replace(b"text of c", b"texx of c", 1)
    dataset = opened(f"{server.url}/s.zip", tmp_path, members="path", on_error="skip")
    assert [sample["__key__"] for sample in dataset] == ["a", "b", "d"]
    with pytest.raises(DamagedMemberError, match=r"s\.zip: the member at byte .*row 2, sample 'c'"):
        dataset[2]
    dataset.close()
    other = opened(f"{server.url}/s.zip", tmp_path / "other", members="path")
    server.objects["/s.zip"] = zip_of([*made, ("e", {"txt": b"more"})])
    with pytest.raises(SourceChangedError, match=r"s\.zip"):
        list(other)


@pytest.mark.parametrize("is_chained", [False, True], ids=["members", "chained"])
def test_a_local_archive_that_changes_after_it_was_read_gives_no_file_of_the_other_version(
    is_chained: bool, tmp_path: Path
) -> None:
    made: shards.Made = [(name, {"txt": f"the text of {name}".encode()}) for name in ("a", "b", "c")]
    path = tmp_path / "s.tar"
    path.write_bytes(tar_of(made))
    rows = [{"txt": f"tar://{name}.txt::{path}"} for name, _ in made]
    options: dict[str, Any] = {"columns_to_download": ["txt"]} if is_chained else {"members": "path"}
    with opened(rows if is_chained else path, tmp_path, on_error="raise", **options) as dataset:
        assert Path(dataset[0]["txt"]).read_bytes() == b"the text of a"
        path.write_bytes(tar_of(made).replace(b"the text", b"new text"))
        with pytest.raises(SourceChangedError, match=r"s\.tar changed since it was indexed"):
            dataset[1]


def test_a_run_goes_on_at_any_step(server: FaultyHttpServer, tmp_path: Path) -> None:
    expected = shards.serve(server, 3, 8)
    src = f"{server.url}/data/s-{{000..002}}.tar"

    def run(folder: str) -> StreamingDataset:
        return opened(src, tmp_path / folder, members="path", shuffle_seed=5, columns_to_download=["jpg", "cls"])

    def samples(loader: StreamingDataLoader) -> list[bytes]:
        return [Path(path).read_bytes() for batch in loader for path in batch["jpg"]]

    whole = samples(StreamingDataLoader(run("a"), batch_size=2))
    assert sorted(whole) == sorted(sample["jpg"] for sample in expected)
    for step in range(1, 12, 3):
        loader = StreamingDataLoader(run("a"), batch_size=2)
        batches = iter(loader)
        for _ in range(step):
            next(batches)
        resumed = StreamingDataLoader(run("b"), batch_size=2)
        resumed.load_state_dict(loader.state_dict())
        assert samples(resumed) == whole[2 * step :]
