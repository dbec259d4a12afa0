"""The same samples as WebDataset gives: golden shards, decoders, stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import sqlstream.compat.webdataset as wds
from sqlstream.errors import ConfigError, DamagedShardError, DecodeError, ObjectNotFoundError, SourceError
from tests.compat.webdataset.kit import GOLDEN, KEYS, UNPICKLE, comparable, number_of, numbered, opened
from tests.goldens import FIXTURES, expected
from tests.stream.shards import tar_of

DECODED = expected("wds/decoded.expected.json")
PIPELINES = expected("wds/pipeline.expected.json")
SHUFFLED = expected("wds/shuffle.expected.json")
LISTINGS = expected("tar/expected.json")
STRICTER = {
    "bad_checksum.tar": "theirs ends in silence",
    "truncated_header.tar": "theirs ends in silence",
    "concatenated.tar": "theirs leaves the second archive out in silence",
    "duplicates.tar": "an error of theirs, too",
    "same_name.tar": "an error of theirs, too",
    "truncated_data.tar": "an error of theirs, too",
    "zero_bytes.tar": "an error of theirs, too",
    "sparse_gnu.tar": "sparse members are refused",
    "sparse_pax.tar": "sparse members are refused",
    "empty.tar": "theirs has no samples, which a whole dataset must",
}
BETTER = ("gz_two_streams.tar.gz", "zst.tar.zst", "zst_seekable.tar.zst", "hidden.tar")
"""Archives that theirs cannot read; and one with hidden files, whose samples are in tests/storage/members."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("golden")


def test_samples_are_those_that_webdataset_reads(folder: Path) -> None:
    with opened(GOLDEN, folder) as dataset:
        assert comparable(dataset) == expected("wds/raw.expected.json")["samples"]
        first = next(iter(dataset))
    assert Path(first["__local_path__"]).name == Path(first["__url__"]).name == "shard-000000.tar"


@pytest.mark.parametrize("spec", [name for name in DECODED if name != "what"])
def test_samples_are_decoded_as_webdataset_decodes_them(spec: str, folder: Path) -> None:
    theirs = [{name: value for name, value in there.items() if name != "__local_path__"} for there in DECODED[spec]]
    images = (spec,) if spec else ()
    with opened(GOLDEN, folder) as dataset:
        assert comparable(dataset.decode(*images, *UNPICKLE)) == theirs
        safe = sorted({name for sample in theirs for name in sample} - {"pkl", "pickle", "pyd", "pth"})
        wanted = [{name: value for name, value in sample.items() if name in safe} for sample in theirs]
        found = comparable(dataset.decode(*images, only=safe))
        assert [{name: value for name, value in sample.items() if name in safe} for sample in found] == wanted


def test_pickles_are_read_by_a_decoder_of_the_user_alone(folder: Path) -> None:
    with opened(GOLDEN, folder) as dataset, pytest.raises(DecodeError, match="unpickling runs whatever code"):
        list(dataset.decode())


@pytest.mark.parametrize("name", [name for name in LISTINGS if name not in BETTER])
def test_archives_of_many_programs_give_the_samples_of_webdataset(name: str, folder: Path) -> None:
    path = str(FIXTURES / "tar" / name)
    if name in STRICTER:
        with pytest.raises(SourceError), opened(path, folder) as dataset:
            list(dataset)
        return
    with opened(path, folder) as dataset:
        named = [{part: value for part, value in sample.items() if part} for sample in LISTINGS[name]["webdataset"]["samples"]]
        assert comparable(dataset) == named, "but for a member `c.`, whose extension is empty"


@pytest.mark.parametrize("name", [name for name in BETTER if name != "hidden.tar"])
def test_archives_that_webdataset_cannot_read_are_read(name: str, folder: Path) -> None:
    with opened(str(FIXTURES / "tar" / name), folder) as dataset:
        assert len(list(dataset)) > 0


@pytest.mark.parametrize("runs_as_it_is", [False, True])
def test_a_member_that_select_files_fails_on_goes_by_the_handler(runs_as_it_is: bool, tmp_path: Path) -> None:
    with wds.TarWriter(tmp_path / "a.tar") as writer:
        for number in range(3):
            writer.write({"__key__": str(number), "cls": number, f"x{number}": b"1"})

    def wanted(name: str) -> bool:
        return "1.cls" not in name or bool(int("one"))

    def read(handler: Any) -> list[list[str]]:
        with opened(str(tmp_path / "a.tar"), tmp_path, select_files=wanted, handler=handler) as dataset:
            samples = list(dataset.compose(iter) if runs_as_it_is else dataset)
        return [[name for name in sample if name[0] != "_"] for sample in samples]

    assert read(wds.ignore_and_continue) == [["cls", "x0"], ["x1"], ["cls", "x2"]]
    assert read(wds.ignore_and_stop)[:1] == [["cls", "x0"]]
    assert ["cls", "x2"] not in read(wds.ignore_and_stop)
    with pytest.raises(ValueError, match="invalid literal"):
        read(wds.reraise_exception)


def test_stages_make_what_those_of_webdataset_make(folder: Path) -> None:
    with opened(GOLDEN, folder) as dataset:
        ignore = wds.ignore_and_continue
        made = {
            "to_tuple('seg.png;rgba.png;jpg','json') after decode('rgb8')": dataset.decode("rgb8", *UNPICKLE).to_tuple(
                "seg.png;rgba.png;jpg", "json"
            ),
            "to_tuple('npy','cls', handler=ignore_and_continue)": dataset.to_tuple("npy", "cls", handler=ignore),
            "to_tuple('npy','cls', missing_is_error=False)": dataset.to_tuple("npy", "cls", missing_is_error=False),
            "batched(4) of to_tuple('cls')": dataset.decode(only="cls").to_tuple("cls").batched(4),
        }
        for name, pipeline in made.items():
            assert comparable(pipeline) == PIPELINES[name], name
        renamed = dataset.rename(image="jpg;png", label="cls", keep=False)
        assert [sorted(sample) for sample in renamed] == PIPELINES["rename(image='jpg;png', label='cls', keep=False)"]
        selected = opened(GOLDEN, folder, select_files=lambda name: name.endswith(".cls"))
        assert [sorted(sample) for sample in selected] == PIPELINES["select_files=lambda n: n.endswith('.cls')"]
        with pytest.raises(ValueError, match=r"none of 'npy' is in the sample") as caught:
            list(dataset.to_tuple("npy", "cls"))
        assert "to_tuple('npy', 'cls') failed on sample" in caught.value.__notes__[0]


def test_files_of_which_none_is_selected_are_an_error_unless_that_is_not_looked_at(tmp_path: Path) -> None:
    urls = numbered(tmp_path / "shards")
    with opened(urls, tmp_path, select_files=lambda name: name.endswith(".jpg")) as dataset:
        for samples in (dataset, dataset.repeat(), *(wds.WebLoader(dataset, num_workers=count) for count in (0, 1, 2))):
            with pytest.raises(ValueError, match="select_files keeps no member of any sample"):
                list(samples)
    with opened(urls, tmp_path, select_files=lambda _: False, empty_check=False) as dataset:
        assert list(dataset) == []
    with opened(urls, tmp_path, select_files=lambda name: name.startswith(KEYS[-1])) as dataset:
        for num_workers in (2, 1):  # one of two has none of what is kept
            for loader in (DataLoader, wds.WebLoader):
                assert len(list(loader(dataset, batch_size=None, num_workers=num_workers))) == 1
        assert [sample["__key__"] for sample in dataset] == [KEYS[-1]]
        assert list(dataset.select(lambda _: False)) == []


@pytest.mark.parametrize("num_shards", [1, 2])
def test_members_with_the_name_of_the_column_of_several_sources_are_parts(num_shards: int, tmp_path: Path) -> None:
    (tmp_path / "a-0.tar").write_bytes(tar_of([("a", {"__source__": b"web", "txt": b"1"}), ("b", {"txt": b"2"})]))
    (tmp_path / "a-1.tar").write_bytes(tar_of([("c", {"__source__": b"books"})]))
    with opened(f"{tmp_path}/a-{{0..{num_shards - 1}}}.tar", tmp_path) as dataset:
        found = [sample.get("__source__") for sample in dataset]
        assert found == [b"web", None, b"books"][: num_shards + 1]


def test_buffers_that_run_as_they_are_mix_as_those_of_webdataset() -> None:
    assert list(wds.shuffle(4, 4, seed=0)(range(10))) == SHUFFLED["shuffle(bufsize=4, initial=4, seed=0) of range(10)"]
    assert list(wds.shuffle(seed=0)(range(10))) == SHUFFLED["shuffle(bufsize=1000, initial=100, seed=0) of range(10)"]
    assert list(wds.shuffle(8, 2, seed=7)(range(30))) == SHUFFLED["shuffle(bufsize=8, initial=2, seed=7) of range(30)"]
    stage = wds.detshuffle(4, 4, seed=0)
    epochs = SHUFFLED["detshuffle(4, 4, seed=0) of range(10), epochs 0 to 2"]
    assert [list(stage.run(range(10))) for _ in range(3)] == epochs


def test_parts_that_only_later_shards_have_are_in_their_samples(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_of([("a", {"jpg": b"1", "cls": b"1"})]))
    (tmp_path / "b.tar").write_bytes(tar_of([("b", {"png": b"2", "json": b"{}"})]))
    with opened([str(tmp_path / "a.tar"), str(tmp_path / "b.tar")], tmp_path) as dataset:
        assert list(dataset.to_tuple("jpg;png", "__key__")) == [(b"1", "a"), (b"2", "b")]
        assert {*list(dataset)[1]} == {"__key__", "__url__", "__local_path__", "png", "json"}


def test_a_sample_that_comes_twice_is_decoded_twice(tmp_path: Path) -> None:
    def twice(samples: Iterable[Any]) -> Iterator[Any]:
        for sample in samples:
            yield sample
            yield sample

    with opened(numbered(tmp_path / "s", 1), tmp_path) as dataset:
        wanted = [number for number in range(8) for _ in range(2)]
        assert [number_of(sample) for sample in dataset.compose(twice).decode()] == wanted
        kept = dataset.mcached().decode().map(number_of)
        assert [*kept, *kept] == [*range(8), *range(8)]


def test_a_file_url_without_slashes_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, number in (("file:a.tar", 1), (f"file:{tmp_path}/b.tar", 2)):
        with wds.TarWriter(name) as writer:
            writer.write({"__key__": str(number), "cls": number})
    assert {path.name for path in tmp_path.iterdir()} == {"a.tar", "b.tar"}
    with opened([f"file:{tmp_path}/a.tar", "file:b.tar"], tmp_path) as dataset:
        assert list(dataset.to_tuple("cls", "__local_path__")) == [(b"1", f"{tmp_path}/a.tar"), (b"2", f"{tmp_path}/b.tar")]


def test_shards_are_named_by_paths_too(tmp_path: Path) -> None:
    src = Path(numbered(tmp_path / "s", 2))
    for urls in (src, [tmp_path / "s/s-0.tar", str(tmp_path / "s/s-1.tar")]):
        with opened(urls, tmp_path) as dataset:
            assert [sample["__key__"] for sample in dataset] == KEYS[:16]
    assert {shard["url"] for shard in wds.ResampledShards(src, 20)} <= {
        str(tmp_path / f"s/s-{number}.tar") for number in range(2)
    }


def test_files_are_renamed_within_their_sample(tmp_path: Path) -> None:
    def renamed(name: str) -> str:
        return "x/" + name.replace(".cls", ".label.cls")

    with opened(numbered(tmp_path / "shards", 1), tmp_path, rename_files=renamed) as dataset:
        assert list(dataset.slice(1).to_tuple("__key__", "label.cls")) == [("x/000", b"0")]
    (tmp_path / "two.tar").write_bytes(tar_of([("a", {"jpg": b"1", "cls": b"1"})]))
    apart: Any = {"rename_files": lambda name: name.replace("a.cls", "b.cls")}
    with opened(str(tmp_path / "two.tar"), tmp_path, **apart) as dataset, pytest.raises(ValueError, match="the keys a, b"):
        list(dataset)


@pytest.mark.parametrize("handler", [wds.warn_and_continue, wds.ignore_and_continue, wds.ignore_and_stop, print])
def test_a_damaged_shard_ends_as_the_handler_says(handler: Any, tmp_path: Path) -> None:
    numbered(tmp_path / "s", 1)
    shutil.copy(FIXTURES / "tar/bad_checksum.tar", tmp_path / "s/t.tar")
    urls = [str(tmp_path / "s/s-0.tar"), str(tmp_path / "s/t.tar"), str(tmp_path / "s/s-0.tar")]
    with opened(urls, tmp_path) as dataset, pytest.raises(DamagedShardError):
        list(dataset)
    with opened(urls, tmp_path, handler=handler) as dataset:
        keys = [sample["__key__"] for sample in dataset]
    before, after = [f"{number:03}" for number in range(8)], [f"{number:03}" for number in range(8)]
    assert keys == before if handler is wds.ignore_and_stop else (keys[:8], keys[-8:]) == (before, after)


@pytest.mark.parametrize("handler", [wds.warn_and_continue, wds.ignore_and_stop])
def test_a_sample_with_one_extension_twice_is_damage_that_the_handler_decides_on(handler: Any, tmp_path: Path) -> None:
    numbered(tmp_path / "s", 2)
    (tmp_path / "s/t.tar").write_bytes(tar_of([("a", {"txt": b"1"}), ("b", {"txt": b"2", "TXT": b"3"})]))
    urls = [str(tmp_path / "s" / name) for name in ("s-0.tar", "t.tar", "s-1.tar")]
    with opened(urls, tmp_path) as dataset, pytest.raises(DamagedShardError, match=r"'b\.TXT' beside 'b\.txt'"):
        list(dataset)
    with opened(urls, tmp_path, handler=handler) as dataset:
        keys = [sample["__key__"] for sample in dataset]
    assert keys == (KEYS[:8] if handler is wds.ignore_and_stop else [*KEYS[:8], "a", *KEYS[8:16]])


@pytest.mark.parametrize(
    ("handler", "wanted"), [(wds.ignore_and_continue, ["0", "2"]), (wds.ignore_and_stop, ["0"]), (wds.reraise_exception, None)]
)
def test_a_handler_decides_on_shards_of_this_machine_that_are_not_there(
    handler: Any, wanted: list[str] | None, tmp_path: Path
) -> None:
    for number in (0, 2):
        (tmp_path / f"{number}.tar").write_bytes(tar_of([(str(number), {"cls": b"1"})]))
    if wanted is None:
        with pytest.raises(ObjectNotFoundError, match=r"1\.tar does not exist"):
            opened(f"{tmp_path}/{{0..3}}.tar", tmp_path, handler=handler)
        return
    with opened(f"{tmp_path}/{{0..3}}.tar", tmp_path, handler=handler) as dataset:
        for chain in (dataset, dataset.shuffle(3), dataset.compose(iter)):  # the last one runs as it is
            assert sorted(sample["__key__"] for sample in chain) == wanted
    with pytest.raises(ObjectNotFoundError, match=r"7\.tar does not exist"):
        opened(f"{tmp_path}/7.tar", tmp_path, handler=handler)


def test_what_a_sample_says_of_itself_is_decoded_as_text(tmp_path: Path) -> None:
    def add(sample: dict[str, Any]) -> dict[str, Any]:
        return {**sample, "__place__": b"here", "__odd__": b"\xff"}

    for decoders in ((), (lambda _key, _data: None,)):
        sample = next(iter(opened(numbered(tmp_path / "shards"), tmp_path).map(add).decode(*decoders)))
        assert (sample["__place__"], sample["__odd__"], sample["cls"]) == ("here", b"\xff", 0)


@pytest.mark.parametrize("urls", [3, None, 2.5])
def test_what_names_no_shards_is_refused(urls: Any) -> None:
    for kind in (wds.WebDataset, wds.SimpleShardList, wds.ResampledShards):
        with pytest.raises(ConfigError, match=f"{urls} names no shards: give a text"):
            kind(urls)
