"""Words of a query are a signature only where their scheme is there as a whole."""

from __future__ import annotations

import pytest

from sqlstream.storage.base.signatures import SCHEMES, SignatureScheme, without_signature

DATES = {"sv": "2024-11-04", "se": "2026-01-01T00%3A00%3A00Z", "sig": "bVNlY3JldA%3D%3D"}
KEPT = {"si", "ss", "srt"}


def pieces(scheme: SignatureScheme, *, seed: str) -> list[str]:
    words = sorted(scheme.mandatory) + sorted(scheme.optional)
    return [f"{word}={DATES.get(word, f'{word}-{seed}')}" for word in words]


def telling(scheme: SignatureScheme) -> frozenset[str]:
    """Return the mandatory words without which what is left is not whole by another scheme of the same vendor either."""
    words = scheme.mandatory | scheme.optional
    others = [other.mandatory for other in SCHEMES if other is not scheme and other.mandatory <= words]
    return frozenset(word for word in scheme.mandatory if all(word in other for other in others))


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.name)
class TestEachScheme:
    def test_a_whole_signature_is_dropped_and_the_rest_kept_byte_for_byte(self, scheme: SignatureScheme) -> None:
        signed = "&".join(["id=caf%E9%2f", *pieces(scheme, seed="1"), "b=a+b%20c", "flag"])
        kept = [f"{word}={word}-1" for word in sorted(scheme.mandatory & KEPT)]
        assert without_signature(signed) == "&".join(["id=caf%E9%2f", *kept, "b=a+b%20c", "flag"])

    def test_without_any_one_mandatory_word_nothing_is_dropped(self, scheme: SignatureScheme) -> None:
        for word in telling(scheme):
            query = "&".join(piece for piece in pieces(scheme, seed="1") if not piece.startswith(f"{word}="))
            assert without_signature(query) == query

    def test_a_word_that_is_there_twice_is_no_signature(self, scheme: SignatureScheme) -> None:
        for word in telling(scheme):
            query = "&".join([*pieces(scheme, seed="1"), f"{word}=again"])
            assert without_signature(query) == query

    def test_case_counts_where_the_vendor_says_so(self, scheme: SignatureScheme) -> None:
        query = "&".join(pieces(scheme, seed="1")).swapcase()
        assert (without_signature(query) == "") is scheme.any_case


@pytest.mark.parametrize(
    "query",
    [
        "id=1&sr=44100",
        "st=0&se=10&sp=1&sv=2&sig=3&sr=4",  # an ordinary query: no version of a service, no time
        "sig=abcdefgh",
        "expires=1",
        "Expires=1&Signature=abc",
        "Policy=a&Signature=b",
        "AWSAccessKeyId=a&Expires=1",
        "sv=2024-11-04&se=2026-01-01&sp=r&sig=abcdefgh",  # neither sr nor ss: no SAS
        "X-Amz-Signature=1&X-Amz-Date=2",
        "",
        "&&",
    ],
)
def test_an_ordinary_query_is_kept(query: str) -> None:
    assert without_signature(query) == query


def test_the_words_of_one_scheme_do_not_drop_those_of_another() -> None:
    signed = "&".join(["sr=16000", "Policy=free", *pieces(SCHEMES[0], seed="1")])
    assert without_signature(signed) == "sr=16000&Policy=free"
