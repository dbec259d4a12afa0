"""Objects keep the keys that a cache of an earlier version has them under."""

from __future__ import annotations

from pathlib import Path

from tests.pins import keys
from tests.pins.pinned import pinned


def test_objects_keep_the_keys_of_earlier_versions(tmp_path: Path) -> None:
    found, before = keys.compute(tmp_path), pinned("keys")
    assert len(before["urls"]) >= 180
    for kind in ("urls", "versions", "spans", "extensions"):
        changed = {name: key for name, key in before[kind].items() if found[kind].get(name) != key}
        assert changed == {}, f"{kind} have other keys: a cache that is there would be cold"


def test_different_objects_of_the_pinned_ones_have_different_keys() -> None:
    before = pinned("keys")["urls"]
    signed = {url for url in before if url in keys.SIGNED}
    plain = [key for url, key in before.items() if url not in signed]
    assert len(set(plain)) == len(plain)
    assert len({before[url] for url in signed}) == len(signed)
