"""Fields by their extensions: the tables of WebDataset and wids, as these programs read their own shards."""

from __future__ import annotations

import gzip
import io
import pickle
import random
import re
import tarfile
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sqlstream.errors import ConfigError, DecodeError, MissingDependencyError, TransformError
from sqlstream.transforms.cached import CacheTransform, chain_key
from sqlstream.transforms.decode_by_extension import IMAGE_EXTENSIONS, IMAGE_FORMS
from sqlstream.transforms.presets import DecodeByExtension
from tests.goldens import FIXTURES, as_json, expected

WDS = FIXTURES / "wds"
NAME = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
DECODED = expected("wds/decoded.expected.json")
WIDS = expected("wds/wids.expected.json")
NOT_OURS = {"__local_path__", "__url__", "__dataset__", "__index__", "__shardindex__", "__shard__"}


@cache
def members() -> list[tuple[str, dict[str, bytes]]]:
    """Return (key, content by extension) of each sample of the three shards."""
    found: list[tuple[str, dict[str, bytes]]] = []
    for path in sorted(WDS.glob("shard-*.tar")):
        with tarfile.open(path) as archive:
            for member in archive:
                match = NAME.match(member.name)
                stream = archive.extractfile(member)
                assert match is not None
                assert stream is not None
                if not found or found[-1][0] != match[1]:
                    found.append((match[1], {}))
                found[-1][1][match[2]] = stream.read()
    return found


def sample(number: int, *, dotted: bool = False) -> dict[str, Any]:
    key, content = members()[number]
    return {"__key__": key, **{("." if dotted else "") + name: data for name, data in content.items()}}


def without(written: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in written.items() if name not in NOT_OURS}


@pytest.mark.parametrize("images", [name for name in DECODED if name != "what"])
def test_samples_are_equal_to_those_of_webdataset(images: str) -> None:
    pytest.importorskip("msgpack")
    pytest.importorskip("cbor2")
    decode = pickle.loads(pickle.dumps(DecodeByExtension(images or None, allow_pickle=True)))
    found = [as_json(decode(sample(number))) for number in range(len(members()))]
    assert found == [without(there) for there in DECODED[images]]


@pytest.mark.parametrize(("images", "there"), [("wids-pil", "PIL"), ("wids-numpy", "numpy")])
def test_samples_are_equal_to_those_of_wids(images: str, there: str) -> None:
    pytest.importorskip("msgpack")
    decode = DecodeByExtension(images, allow_pickle=True)
    for number, written in enumerate(WIDS[there]):
        assert as_json(decode(sample(number, dotted=True))) == without(written)
        undotted = as_json(decode(sample(number)))
        assert {f".{name}" if name != "__key__" else name: value for name, value in undotted.items()} == without(written)


def test_the_forms_without_a_golden_follow_those_with_one() -> None:
    jpg = members()[0][1]["jpg"]
    rgba = members()[1][1]["rgba.png"]

    def decoded(images: str, data: bytes = jpg) -> Any:
        return DecodeByExtension(images)({"jpg": data})["jpg"]

    assert torch.equal(decoded("torch"), decoded("torchrgb"))
    assert as_json(decoded("pilrgb")) == as_json(decoded("pil"))
    assert decoded("pill").mode == "L"
    assert np.array_equal(np.asarray(decoded("pill")), decoded("l8"))
    assert np.array_equal(decoded("torchl8").numpy(), decoded("l8"))
    assert torch.equal(decoded("torchrgba8", rgba), torch.from_numpy(decoded("rgba8", rgba)).permute(2, 0, 1))
    assert torch.equal(decoded("torchrgba", rgba), decoded("torchrgba8", rgba).float() / 255)
    assert {form for form in IMAGE_FORMS if not form.startswith("wids")} == set(
        "l8 rgb8 rgba8 l rgb rgba torchl8 torchrgb8 torchrgba8 torchl torchrgb torch torchrgba pill pil pilrgb pilrgba".split()
    )
    assert len(IMAGE_EXTENSIONS) == 63


def test_arrays_may_be_written_to() -> None:
    """Torch warns of arrays that may not, when it collates them."""
    for images in ("rgb8", "rgb", "l8", "wids-numpy"):
        assert DecodeByExtension(images)({"jpg": members()[0][1]["jpg"]})["jpg"].flags.writeable
    assert all(array.flags.writeable for array in DecodeByExtension()({"ten": members()[2][1]["ten"]})["ten"])


def test_the_last_extension_decides_in_any_case_and_other_fields_stay() -> None:
    given = {"a.b.TXT": b"x", "x.tar": b"y", "class": b"5", "html": b"<p>", "width": 512, "": b"", "__txt": b"z", "txt": None}
    assert DecodeByExtension()(dict(given)) == {**given, "a.b.TXT": "x"}


def test_what_gzip_holds_is_decoded_under_the_name_as_it_was() -> None:
    zipped = {"json.gz": gzip.compress(b"[1]"), "bin.gz": gzip.compress(b"a") + gzip.compress(b"b"), "gz": gzip.compress(b"c")}
    assert DecodeByExtension()(dict(zipped)) == {"json.gz": [1], "bin.gz": b"ab", "gz": b"c"}
    dotted = {f".{name}": data for name, data in zipped.items()}
    assert DecodeByExtension("wids-pil")(dict(dotted)) == {".json.gz": [1], ".bin.gz": b"ab", ".gz": zipped["gz"]}
    for wrong in (b"", b"x", zipped["bin.gz"][:-3]):
        with pytest.raises(DecodeError, match=r"'json\.gz'"):
            DecodeByExtension()({"json.gz": wrong + b"y"})


def test_a_small_gzip_that_holds_very_much_is_an_error() -> None:
    decode = DecodeByExtension(max_inflated_bytes=10**6)
    with pytest.raises(DecodeError, match="hold more than max_inflated_bytes=1000000"):
        decode({"txt.gz": gzip.compress(bytes(10**6 + 1))})
    assert len(decode({"txt.gz": gzip.compress(bytes(10**6))})["txt.gz"]) == 10**6


@pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "pth", "a.pkl", "pkl.gz"])
def test_pickles_are_refused_unless_they_are_allowed(name: str) -> None:
    data = pickle.dumps({"a": 1})
    if name == "pth":
        file = io.BytesIO()
        torch.save({"a": 1}, file)
        data = file.getvalue()
    data = gzip.compress(data) if name.endswith(".gz") else data
    with pytest.raises(DecodeError, match=rf"DecodeByExtension: field '{name}'.*allow_pickle=True"):
        DecodeByExtension()({name: data})
    assert DecodeByExtension(allow_pickle=True)({name: data}) == {name: {"a": 1}}
    with pytest.raises(DecodeError, match="allow_pickle=True"):
        DecodeByExtension("wids-pil")({"pt" if name == "pyd" else name: data})
    assert DecodeByExtension(only=["txt"])({name: data, "txt": b"a"}) == {name: data, "txt": "a"}


def test_an_array_of_objects_is_not_unpickled() -> None:
    for allow_pickle in (False, True):
        file = io.BytesIO()
        np.save(file, np.array([{}], dtype=object), allow_pickle=True)
        with pytest.raises(DecodeError, match="'npy'"):
            DecodeByExtension(allow_pickle=allow_pickle)({"npy": file.getvalue()})


def test_a_field_that_is_decoded_already_is_an_error_unless_partial_says_so() -> None:
    done = {"txt": "already", "cls": b"3"}
    with pytest.raises(DecodeError, match=r"field 'txt': expected the content of a file, got str 'already'.*partial=True"):
        DecodeByExtension()(dict(done))
    assert DecodeByExtension(partial=True)(dict(done)) == {"txt": "already", "cls": 3}
    assert DecodeByExtension(only="cls index")(dict(done)) == {"txt": "already", "cls": 3}


def test_content_may_be_any_buffer_or_a_struct() -> None:
    given = {"txt": memoryview(b"a"), "cls": bytearray(b"3"), "json": {"bytes": b"[2]", "path": "x.json"}}
    assert DecodeByExtension()(given) == {"txt": "a", "cls": 3, "json": [2]}
    with pytest.raises(DecodeError, match="expected the content"):
        DecodeByExtension()({"json": {"bytes": None, "path": "/etc/hostname"}})


@pytest.mark.parametrize("name", ["jpg", "png", "mpg", "h5", "eps", "txt", "cls", "json", "npy", "npz", "ten", "mp", "cbor"])
def test_content_that_does_not_decode_names_the_field(name: str) -> None:
    for data in (b"\xff\xfe nonsense", b"\xc1"):
        with pytest.raises(DecodeError, match=f"DecodeByExtension: field '{name}'.*sample 'k' holds"):
            DecodeByExtension("pil")({"__sample_key__": "k", name: data})


def test_postscript_does_not_run() -> None:
    data = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    with pytest.raises(DecodeError, match="PostScript is not decoded"):
        DecodeByExtension("rgb8")({"eps": data})


def test_random_damage_is_a_decode_error_or_a_value() -> None:
    draw, failed = random.Random(4), 0
    decode = DecodeByExtension("rgb8")
    for _ in range(400):
        _, content = members()[draw.choice([1, 2])]
        name = draw.choice([name for name in content if name not in ("pyd", "pth")])
        damaged = bytearray(content[name])
        damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        try:
            decode({name: bytes(damaged[: draw.choice([len(damaged), draw.randrange(len(damaged))])])})
        except (DecodeError, MissingDependencyError):
            failed += 1
    assert failed > 50


def test_arrays_of_tenbin_are_checked() -> None:
    data = members()[2][1]["ten"]

    def arrays(data: bytes) -> list[np.ndarray[Any, Any]]:
        found: list[np.ndarray[Any, Any]] = DecodeByExtension()({"ten": data})["ten"]
        return found

    whole = [array.tolist() for array in arrays(data)]
    for length in range(len(data)):
        try:
            found = [array.tolist() for array in arrays(data[:length])]
        except DecodeError:
            continue
        assert found == whole[: len(found)], "cut between two arrays, or in the padding behind one"
    assert [array.dtype for array in arrays(data.replace(b"f4", b"u4"))] == [np.uint32, np.int64], "their reader knows no u4"
    dimensions = data[:32] + (99).to_bytes(8, "little") + data[40:]
    negative = data[:40] + (-1).to_bytes(8, "little", signed=True) + data[48:]
    for wrong in (data.replace(b"f4", b"O8"), dimensions, negative, data[:80], b"~TenBin~"):
        with pytest.raises(DecodeError, match="'ten'"):
            arrays(wrong)


def test_an_unknown_form_of_images_is_refused_when_it_is_made() -> None:
    with pytest.raises(ConfigError, match="'jpeg' is not one of l8"):
        DecodeByExtension("jpeg")


def test_its_samples_can_be_stored_within_the_chain() -> None:
    keys = {
        chain_key(CacheTransform("a", [made]))
        for made in (DecodeByExtension("pil"), DecodeByExtension("rgb8"), DecodeByExtension("rgb8", only=["jpg"]))
    }
    assert len(keys) == 3


def test_images_are_whole_when_they_leave() -> None:
    """wids gives images that read their stream later: here a damaged one fails while its sample is made."""
    png = members()[0][1]["seg.png"]
    assert DecodeByExtension("wids-pil")({"png": png})["png"].getpixel((0, 0)) == Image.open(io.BytesIO(png)).getpixel((0, 0))
    with pytest.raises((DecodeError, TransformError)):
        DecodeByExtension("wids-pil")({"png": png[:-40]})
