"""Bodies that a server coded although `identity` was asked for. Pure.

Only what ends in a way that shows whether it is whole is decoded: gzip (with its checksum) and deflate. Rejected: urllib3's own
decoding, which takes a body that breaks off for the whole, and one whose decoder is not installed as it comes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from sqlstream.errors import StorageError, TransientStorageError
from sqlstream.storage.base.urls import redact

CODINGS = frozenset({"gzip", "x-gzip", "deflate"})
_PIECE_BYTES = 1 << 20  # arbitrary: a bomb unfolds piece by piece, each within the grant


def check_coding(url: str, encoding: str) -> None:
    """Raise for a coding that is not undone here."""
    if encoding and encoding not in CODINGS:
        where = redact(url)
        text = f"{where}: the server sent it with the Content-Encoding {encoding!r}, although 'identity' was asked for"
        raise StorageError(f"{text}: have the server send it as it is", url=where)


def check_uncoded(url: str, encoding: str) -> None:
    """Raise for any coding: where a store does not answer with ranges, it may be a proxy's as well as the object's own."""
    if encoding.strip().lower() not in ("", "identity"):
        where = redact(url)
        text = f"{where}: the server ignores ranges and sent it with the Content-Encoding {encoding!r}"
        raise StorageError(f"{text}: it could be coded on its way; have the server send it as it is", url=where)


def decoded(url: str, encoding: str, chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    """Yield what a coded body stands for, in pieces of at most 1 MiB.

    Args:
        url: Where it comes from.
        encoding: One of `CODINGS`.
        chunks: The body as it is sent.

    Raises:
        TransientStorageError: It is damaged, ends early, or has something behind its end.
    """
    where = redact(url)
    decoder, is_begun, head = None, False, b""
    try:
        for chunk in chunks:
            data = head + bytes(chunk)
            if decoder is None and len(data) < 2:
                head = data
                continue
            head = b""
            while True:
                if decoder is None or (decoder.eof and data and encoding != "deflate"):  # a gzip body may have several members
                    decoder = zlib.decompressobj(_window_bits(encoding, data))
                    is_begun = True
                elif decoder.eof and data:
                    raise TransientStorageError(f"{where}: something follows the end of its {encoding} body", url=where)
                piece = decoder.decompress(data, _PIECE_BYTES)
                if piece:
                    yield memoryview(piece)
                data = decoder.unused_data if decoder.eof else decoder.unconsumed_tail
                if not data and len(piece) < _PIECE_BYTES:
                    break
    except zlib.error as error:
        raise TransientStorageError(f"{where}: its {encoding} body is damaged: {error}", url=where) from error
    if not is_begun or decoder is None or not decoder.eof:
        raise TransientStorageError(f"{where}: its {encoding} body ends early", url=where)


def _window_bits(encoding: str, data: bytes) -> int:
    """Return zlib's word for the container: gzip, zlib, or none, which some servers mean by deflate."""
    if encoding != "deflate":
        return 31
    return 15 if data[0] & 15 == 8 and (data[0] << 8 | data[1]) % 31 == 0 else -15
