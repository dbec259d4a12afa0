"""Encodings of one's own: written and read as a script of theirs does, and refused where no process knows them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from sqlstream import StreamingDataset as OurDataset
from sqlstream.compat.streaming import MDSWriter, StreamingDataset
from sqlstream.compat.streaming.base.format.mds.encodings import (
    Encoding,
    _encodings,
    get_mds_encoded_size,
    get_mds_encodings,
    is_mds_encoding,
    is_mds_encoding_safe,
    mds_decode,
    mds_encode,
)
from sqlstream.errors import ConfigError, DecodeError, EncodeError

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Complex(Encoding):
    """Two numbers."""

    size = 16

    def encode(self, obj: complex) -> bytes:
        self._validate(obj, complex)
        return struct.pack("<2d", obj.real, obj.imag)

    def decode(self, data: bytes) -> complex:
        return complex(*struct.unpack("<2d", data))


class Words(Encoding):
    """Words with something between them."""

    def __init__(self, between: str = " ") -> None:
        self.between = between

    @classmethod
    def from_str(cls, text: str) -> Words:
        return cls(text)

    def encode(self, obj: list[str]) -> bytes:
        return self.between.join(obj).encode()

    def decode(self, data: bytes) -> list[str]:
        return data.decode().split(self.between)


@pytest.fixture
def added() -> Iterator[None]:
    _encodings["complex"] = Complex
    _encodings["words"] = Words
    yield
    for name in ("complex", "words"):
        _encodings.pop(name, None)


COLUMNS = {"c": "complex", "n": "int", "w": "words", "x": "words:+"}
SAMPLES = [{"c": complex(number, -1), "n": number, "w": ["a", str(number)], "x": ["p", "q"]} for number in range(12)]


def written(directory: Path) -> str:
    with MDSWriter(out=str(directory), columns=COLUMNS, size_limit=400) as writer:
        for sample in SAMPLES:
            writer.write(sample)
    return str(directory)


@pytest.mark.usefixtures("added")
def test_samples_of_added_encodings_come_back_also_in_workers_and_through_our_own_dataset(tmp_path: Path) -> None:
    local = written(tmp_path / "mds")
    dataset = StreamingDataset(local=local, batch_size=4)
    assert [dataset[number] for number in range(12)] == SAMPLES
    loader: Any = DataLoader(dataset, batch_size=4, num_workers=1, collate_fn=list)
    assert [sample for batch in loader for sample in batch] == SAMPLES
    with OurDataset(local, tmp_path / "cache", show_progress=False) as ours:
        assert ours[5]["w"] == ["a", "5"]
    with pytest.raises(EncodeError, match="column 'c' of encoding 'complex', a value of type str: AttributeError"):
        MDSWriter(out=str(tmp_path / "other"), columns={"c": "complex"}).write({"c": "5"})


@pytest.mark.usefixtures("added")
def test_where_an_encoding_is_not_added_its_column_alone_is_refused(tmp_path: Path) -> None:
    dataset = StreamingDataset(local=written(tmp_path / "mds"), batch_size=4)
    assert dataset[0] == SAMPLES[0]
    del _encodings["complex"]
    with pytest.raises(DecodeError, match=r"'complex' is not decoded.*add it in each process that reads it"):
        dataset[0]
    with OurDataset(tmp_path / "mds", tmp_path / "cache", columns_to_download=["n", "w"], show_progress=False) as ours:
        assert (ours[3]["n"], ours[3]["w"]) == (3, ["a", "3"])
    with pytest.raises(ConfigError, match=r"encoding 'complex' is unknown.*words"):
        MDSWriter(out=str(tmp_path / "other"), columns={"c": "complex"})
    _encodings["complex"] = Complex
    assert dataset[1] == SAMPLES[1]


@pytest.mark.usefixtures("added")
def test_the_names_of_the_module_do_what_theirs_do() -> None:
    assert {"int", "jpeg", "list[png]", "ndarray", "pkl", "complex"} <= get_mds_encodings()
    assert len(_encodings) == len(get_mds_encodings())
    assert [is_mds_encoding(name) for name in ("str", "complex", "words:,", "ndarray:int16:2", "other")] == [True] * 4 + [False]
    assert [is_mds_encoding_safe(name) for name in ("pkl", "complex")] == [False, True]
    assert mds_encode("int", 5) == b"\5" + bytes(7) == _encodings["int"]().encode(5)
    assert mds_encode("int", b"as it is") == b"as it is"
    assert mds_decode("words:,", mds_encode("words:,", ["a", "b"])) == ["a", "b"]
    assert [get_mds_encoded_size(name) for name in ("int", "str", "complex")] == [8, None, 16]
    for name in ("other", "int:5"):
        with pytest.raises(ConfigError, match="is unknown"):
            mds_decode(name, b"")


@pytest.mark.parametrize(("name", "made"), [("jpeg", Complex), ("a:b", Complex), ("", Complex), ("mine", object), ("mine", 5)])
def test_what_is_no_encoding_of_ones_own_is_refused(name: str, made: Any) -> None:
    with pytest.raises(ConfigError, match="_encodings"):
        _encodings[name] = made
    with pytest.raises(KeyError):
        del _encodings["int"]
    with pytest.raises(KeyError):
        _encodings["mine"]
