"""Data types by name and by extension."""

from __future__ import annotations

import pytest

from sqlstream.errors import ConfigError
from sqlstream.sample_types import DataSampleType


@pytest.mark.parametrize("name", ["IMAGE", "image", " Image "])
def test_a_type_is_found_by_name_in_any_case(name: str) -> None:
    assert DataSampleType.from_str(name) is DataSampleType.IMAGE


def test_an_unknown_type_says_which_there_are() -> None:
    with pytest.raises(ConfigError, match="image, video, audio"):
        DataSampleType.from_str("picture")


@pytest.mark.parametrize(
    ("extension", "kind"), [("jpg", "image"), ("mp4", "video"), ("mpeg", "video"), ("flac", "audio"), ("pdf", "text")]
)
def test_an_extension_is_of_one_plain_type(extension: str, kind: str) -> None:
    plain = [DataSampleType.VIDEO, DataSampleType.AUDIO, DataSampleType.IMAGE, DataSampleType.TEXT]
    assert [found for found in plain if extension in found.extensions] == [kind]


def test_latents_have_no_extension_of_their_own() -> None:
    plain = (DataSampleType.VIDEO, DataSampleType.AUDIO, DataSampleType.IMAGE, DataSampleType.TEXT)
    assert not any("npz" in kind.extensions for kind in plain)
    assert "npz" in DataSampleType.VIDEO_LATENT.extensions


def test_what_pillow_reads_is_an_image() -> None:
    image = pytest.importorskip("PIL.Image")
    known = {extension.removeprefix(".") for extension in image.registered_extensions()}
    assert known - DataSampleType.IMAGE.extensions <= {"mpeg", "mpg", "pdf", "h5"}
