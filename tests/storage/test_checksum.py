from __future__ import annotations

import hashlib

from sqlstream.storage.base.checksum import md5_of


def test_only_etags_that_are_an_md5_are_digests() -> None:
    md5 = hashlib.md5(b"some bytes").hexdigest()
    assert md5_of(f'"{md5}"') == md5_of(md5) == md5
    for etag in (None, "", f'"{md5}-3"', f'W/"{md5}"', '"65a1b2-1b3"'):
        assert md5_of(etag) is None
