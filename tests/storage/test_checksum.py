from __future__ import annotations

import hashlib

from sqlstream.storage.base.checksum import EtagDigest

DATA = b"some bytes" * 100


def test_only_etags_that_are_an_md5_are_digests() -> None:
    md5 = hashlib.md5(DATA).hexdigest()
    digest = EtagDigest.of(f'"{md5}"')
    assert digest is not None
    digest.update(DATA[:7])
    assert digest.found != digest.expected
    digest.update(memoryview(DATA)[7:])
    assert digest.found == digest.expected
    for etag in (None, "", f'"{md5}-3"', f'W/"{md5}"', '"65a1b2-1b3"'):
        assert EtagDigest.of(etag) is None
