from __future__ import annotations

import base64
import hashlib

import pytest

from sqlstream.errors import ConfigError
from sqlstream.storage.checksum import Checksum, from_etag

DATA = b"some bytes" * 100
CRC32C = "crc32c:e3069283"  # of b"123456789", the check value of the standard


@pytest.mark.parametrize("algorithm", ["md5", "sha1", "sha256"])
def test_digests_are_taken_in_hexadecimal_and_base64(algorithm: str) -> None:
    digest = hashlib.new(algorithm, DATA)
    for text in (digest.hexdigest(), digest.hexdigest().upper(), base64.b64encode(digest.digest()).decode()):
        checksum = Checksum(f"{algorithm}:{text}")
        checksum.update(DATA[:7])
        assert not checksum.is_right
        checksum.restart()
        checksum.update(memoryview(DATA))
        assert checksum.is_right


def test_crc32c_is_the_one_of_the_standard() -> None:
    checksum = Checksum(CRC32C)
    checksum.update(b"123456789")
    assert checksum.is_right


@pytest.mark.parametrize("wrong", ["sha256", "sha256:abc", "crc32:00000000", "md5:" + "z" * 32, "abc", "crc32c:AAA="])
def test_what_is_no_digest_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="hash"):
        Checksum(wrong)


def test_only_etags_that_are_an_md5_are_checksums() -> None:
    md5 = hashlib.md5(DATA).hexdigest()
    checksum = from_etag(f'"{md5}"')
    assert checksum is not None
    checksum.update(DATA)
    assert checksum.is_right
    for etag in (None, "", f'"{md5}-3"', f'W/"{md5}"', '"65a1b2-1b3"'):
        assert from_etag(etag) is None
