"""Signed URLs: which words of a query are a signature. Pure.

A word counts as a signature only where its scheme is recognised as a whole: `?sr=16000` is a sample rate, and `sr` of a shared
access signature only beside `sv`, `sig` and what else Azure requires. The rest of a query is kept byte for byte.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureScheme:
    """One vendor's way to sign a URL."""

    name: str
    source: str
    """The vendor's document."""
    mandatory: frozenset[str]
    """Words that must all be there, each once; in lower case where `any_case`."""
    optional: frozenset[str] = frozenset()
    """Words that go with them."""
    values: tuple[tuple[str, re.Pattern[str]], ...] = ()
    """Patterns of the values of some mandatory words, which alone are too short to recognise."""
    any_case: bool = False
    """True: the words are written in any case; False: exactly so."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_DATE = re.compile(r"\d{4}-\d{2}-\d{2}.*", re.DOTALL)  # a service version, or the start of an ISO 8601 time
_SOME = re.compile(r".{6,}", re.DOTALL)
_SAS_WORDS = "st spr skoid sktid skt ske sks skv skdutid sduoid saoid suoid scid"
# Not dropped: si, sip, sdd, ses, ss, srt. They stay the same when a URL is signed again, and have always been in the key.

SCHEMES = (
    SignatureScheme(
        name="AWS Signature Version 4",
        source="Amazon S3 API Reference, 'Authenticating Requests: Using Query Parameters (AWS Signature Version 4)'",
        mandatory=_words("x-amz-algorithm x-amz-credential x-amz-date x-amz-expires x-amz-signedheaders x-amz-signature"),
        optional=_words("x-amz-security-token x-amz-region-set"),
        any_case=True,
    ),
    SignatureScheme(
        name="AWS Signature Version 2",
        source="Amazon S3 User Guide, 'Signing and authenticating REST requests'",
        mandatory=_words("AWSAccessKeyId Signature Expires"),
        optional=_words("x-amz-security-token"),
    ),
    SignatureScheme(
        name="Google Cloud Storage V4",
        source="Cloud Storage documentation, 'Signed URLs', 'Canonical query string'",
        mandatory=_words("x-goog-algorithm x-goog-credential x-goog-date x-goog-expires x-goog-signedheaders x-goog-signature"),
        any_case=True,
    ),
    SignatureScheme(
        name="Google Cloud Storage V2",
        source="Cloud Storage documentation, 'V2 signing process'",
        mandatory=_words("GoogleAccessId Signature Expires"),
    ),
    SignatureScheme(
        name="Azure shared access signature of a service or a user delegation",
        source="Azure Storage REST API, 'Create a service SAS' and 'Create a user delegation SAS'",
        mandatory=_words("sv sr sig se sp"),
        optional=_words(_SAS_WORDS),
        values=(("sv", _DATE), ("se", _DATE), ("sig", _SOME)),
    ),
    SignatureScheme(
        name="Azure shared access signature with a stored access policy",
        source="Azure Storage REST API, 'Define a stored access policy'",
        mandatory=_words("sv sr sig si"),
        optional=_words(f"se sp {_SAS_WORDS}"),
        values=(("sv", _DATE), ("sig", _SOME)),
    ),
    SignatureScheme(
        name="Azure shared access signature of an account",
        source="Azure Storage REST API, 'Create an account SAS'",
        mandatory=_words("sv ss srt sp se sig"),
        optional=_words(_SAS_WORDS),
        values=(("sv", _DATE), ("se", _DATE), ("sig", _SOME)),
    ),
    SignatureScheme(
        name="CloudFront, custom policy",
        source="Amazon CloudFront Developer Guide, 'Create a signed URL using a custom policy'",
        mandatory=_words("Policy Signature Key-Pair-Id"),
        optional=_words("Expires Hash-Algorithm"),  # Hugging Face writes both: so before the canned one
    ),
    SignatureScheme(
        name="CloudFront, canned policy",
        source="Amazon CloudFront Developer Guide, 'Create a signed URL using a canned policy'",
        mandatory=_words("Expires Signature Key-Pair-Id"),
        optional=_words("Hash-Algorithm"),
    ),
    SignatureScheme(
        name="Google Cloud CDN",
        source="Cloud CDN documentation, 'Use signed URLs'",
        mandatory=_words("Expires KeyName Signature"),
        optional=_words("URLPrefix"),
    ),
    SignatureScheme(
        name="Alibaba Cloud OSS V1",
        source="Alibaba Cloud OSS documentation, 'Include a V1 signature in a URL'",
        mandatory=_words("OSSAccessKeyId Expires Signature"),
        optional=_words("security-token"),
    ),
    SignatureScheme(
        name="Alibaba Cloud OSS V4",
        source="Alibaba Cloud OSS documentation, 'Include a V4 signature in a URL'",
        mandatory=_words("x-oss-signature-version x-oss-credential x-oss-date x-oss-expires x-oss-signature"),
        optional=_words("x-oss-additional-headers x-oss-security-token"),
        any_case=True,
    ),
    SignatureScheme(
        name="Tencent COS",
        source="Tencent Cloud COS documentation, 'Request signature'",
        mandatory=_words("q-sign-algorithm q-ak q-sign-time q-key-time q-header-list q-url-param-list q-signature"),
        optional=_words("x-cos-security-token"),
    ),
    SignatureScheme(
        name="OpenStack Swift TempURL",
        source="OpenStack Swift documentation, 'TempURL'",
        mandatory=_words("temp_url_sig temp_url_expires"),
        optional=_words("temp_url_prefix temp_url_ip_range"),
    ),
)
"""The signatures that are recognised; of several, the first one."""

_KEPT = _words("si ss srt")
"""Mandatory words that are kept nevertheless; see `_SAS_WORDS`."""


def scheme_of(query: str) -> SignatureScheme | None:
    """Return the scheme that a query is signed by; None where no scheme is there as a whole, or a word of it is there twice.

    Example:
        >>> scheme_of("sr=16000") is None
        True
        >>> scheme_of("GoogleAccessId=me&Expires=1&Signature=abc").name
        'Google Cloud Storage V2'
    """
    if "sig" not in query.lower():  # a word of every scheme
        return None
    pairs = [piece.partition("=") for piece in query.split("&")]
    values = {name: value for name, _, value in pairs}
    lower = {name.lower(): value for name, _, value in pairs}
    repeated: set[str] = set()
    if len(lower) < len(pairs):
        counts = Counter(name.lower() for name, _, _ in pairs)
        repeated = {name for name, count in counts.items() if count > 1}
    for scheme in SCHEMES:
        words = lower if scheme.any_case else values
        if not scheme.mandatory <= words.keys():
            continue
        if repeated and repeated & {word.lower() for word in scheme.mandatory | scheme.optional}:
            continue
        if all(pattern.fullmatch(words[word]) for word, pattern in scheme.values):
            return scheme
    return None


def without_signature(query: str) -> str:
    """Return a query without the words of its signature; what is left is spelled as it was.

    Example:
        >>> without_signature("id=caf%E9&GoogleAccessId=me&Expires=1&Signature=abc&x=a%20b")
        'id=caf%E9&x=a%20b'
    """
    scheme = scheme_of(query)
    if scheme is None:
        return query
    dropped = (scheme.mandatory | scheme.optional) - _KEPT
    pieces = []
    for piece in query.split("&"):
        name = piece.partition("=")[0]
        if (name.lower() if scheme.any_case else name) not in dropped:
            pieces.append(piece)
    return "&".join(pieces)
