"""What shards say of their samples, in columns: the same as dicts of parts say, in a fraction of their memory."""

from __future__ import annotations

import io
import tracemalloc
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sqlstream.config import StorageOptions
from sqlstream.index.sources.base.access import local_file
from sqlstream.index.sources.shards.columns import SampleParts, Texts
from sqlstream.index.sources.shards.layout import Scratch
from sqlstream.index.sources.shards.samples import ShardSamples
from sqlstream.index.sources.shards.tar_shard import TarShard
from sqlstream.index.sources.shards.zip_shard import ZipShard
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.members import places
from sqlstream.storage.members.entries import cut
from sqlstream.storage.members.places import SamplePart
from tests.stream.shards import tar_of

NAMES = ("jpg", "cls", "seg.png")
SMALL, LARGE = st.integers(0, 3000), st.integers(0, 1 << 40)


@st.composite
def dicts(draw: st.DrawFn) -> list[dict[str, SamplePart]]:
    """Samples with some of the columns, all with as many facts."""
    num_facts = draw(st.integers(0, 3))
    facts = st.tuples(*[LARGE] * num_facts)
    part = st.builds(lambda offset, size, more: SamplePart(0, offset, size, more), LARGE, SMALL, facts)
    return draw(st.lists(st.dictionaries(st.sampled_from(NAMES), part), max_size=12))


def bare(samples: list[dict[str, SamplePart]]) -> list[dict[str, SamplePart]]:
    return [{name: part._replace(column=0) for name, part in parts.items()} for parts in samples]


@given(dicts(), st.sets(st.sampled_from(NAMES)))
def test_columns_say_what_dicts_say(samples: list[dict[str, SamplePart]], kept: set[str]) -> None:
    parts = SampleParts.of(samples)
    assert bare([*parts]) == samples
    assert [bare([parts[at]])[0] for at in range(len(samples))] == samples
    assert bare(parts[2:5]) == samples[2:5]
    assert list(parts.names) == list(dict.fromkeys(name for found in samples for name in found))
    spans = [[(part.offset, part.offset + part.size) for part in found.values() if part.size] for found in samples]
    assert list(parts.spans()) == spans
    for name in parts.names:
        assert parts.sizes(name, None, 1, 4).to_pylist() == [
            found[name].size if name in found else None for found in samples[1:4]
        ]
    sizes = {name: sum(found[name].size or 1 for found in samples if name in found) for name in parts.names}
    assert parts.column_bytes() == sizes
    flat = [span for found in spans for span in found]
    assert parts.are_in_order() == all(before[1] <= after[0] for before, after in pairwise(flat))
    numbers = {name: number for number, name in enumerate(sorted(kept), 7)}
    expected = [
        places.pack([(1, 2)], [part._replace(column=numbers[name]) for name, part in found.items() if name in kept])
        for found in samples
    ]
    assert list(parts.packed([[(1, 2)]] * len(samples), numbers)) == expected


@given(st.lists(st.text()))
def test_texts_are_as_they_were(texts: list[str]) -> None:
    texts = [text.encode(errors="ignore").decode() for text in texts]
    found = Texts.of(texts)
    assert [*found] == texts
    assert found[1:3] == texts[1:3]
    assert found.column(1, 2).to_pylist() == texts[1:3]
    assert len(found) == len(texts)


def read(layout: TarShard | ZipShard, path: Path) -> ShardSamples:
    def temporary(what: str) -> Path:
        return path.with_name(what)

    return layout.samples(local_file(path), Fetcher(StorageOptions()), Scratch(temporary))


def zip_of(names: list[str]) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for number, name in enumerate(names):
            archive.writestr(name, bytes(number % 7))
    return data.getvalue()


@pytest.mark.parametrize(
    ("names", "samples"),
    [
        (["a.jpg", "a.cls", "b.jpg"], {"a": [("jpg", 0), ("cls", 1)], "b": [("jpg", 2)]}),
        (["a.jpg", "b.jpg", "a.cls"], {"a": [("jpg", 0), ("cls", 2)], "b": [("jpg", 1)]}),
        (["a.jpg", ".hidden", "__MACOSX/a.jpg", "x/.b.jpg", "README", "a.cls"], {"a": [("jpg", 0), ("cls", 5)]}),
        (["README"], {}),
    ],
)
def test_members_of_a_zip_are_a_sample_wherever_they_are(
    names: list[str], samples: dict[str, list[tuple[str, int]]], tmp_path: Path
) -> None:
    (tmp_path / "x.zip").write_bytes(zip_of(names))
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        starts = [info.header_offset for info in archive.infolist()]
    found = read(ZipShard(), tmp_path / "x.zip")
    assert found.keys is not None
    made = {
        key: [(name, starts.index(part.offset)) for name, part in parts.items()]
        for key, parts in zip(found.keys, found.parts, strict=True)
    }
    assert made == samples
    spans = [[(part.offset, part.offset + part.size) for part in parts.values()] for parts in found.parts]
    assert list(found.entries()) == cut(spans)


def tar_archive(num_members: int) -> bytes:
    return tar_of([(f"{number:09}", {"jpg": b"1", "json": b"2"}) for number in range(num_members // 2)])


def zip_archive(num_members: int) -> bytes:
    return zip_of([f"{number // 2:09}.{('jpg', 'json')[number % 2]}" for number in range(num_members)])


@pytest.mark.parametrize(
    ("layout", "archive", "most_bytes"), [(TarShard(), tar_archive, 45), (ZipShard(), zip_archive, 130)], ids=["tar", "zip"]
)
def test_samples_of_a_shard_take_few_bytes_a_member(
    layout: TarShard | ZipShard, archive: Callable[[int], bytes], most_bytes: int, tmp_path: Path
) -> None:
    num_members = 40_000
    (tmp_path / "shard").write_bytes(archive(num_members))
    read(layout, tmp_path / "shard")  # what is imported and made once
    tracemalloc.start()
    found = read(layout, tmp_path / "shard")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(found.parts) == num_members // 2
    assert peak / num_members < most_bytes, "dicts of parts took 280 of a TAR, 560 of a ZIP"
