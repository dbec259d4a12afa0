"""A second request beside one that hangs, before its answer or in the middle of it; whichever goes on first counts.

Off by default: it costs requests, and a thread for each download.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from sqlstream.errors import ObjectChangedError, StorageError
from sqlstream.storage.base import ObjectInfo, ObjectStream, Storage
from sqlstream.storage.retry import Tally
from sqlstream.storage.urls import redact

_LEAST_SECONDS = 0.02  # no race below: a thread that had to wait for the interpreter is no hanging server
_LEAST_SEEN = 20  # downloads, before a 95th percentile means anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """How downloads of late went."""

    answer_seconds: float
    """95th percentile of the times to an answer."""
    silence_seconds: float
    """95th percentile of the longest silence within a body."""
    num_seen: int


class Opener:
    """Opens answers, with races when they are asked for.

    Args:
        factor: Race what takes so many times the usual time; 0: nothing.
        usual: How downloads of late went.
    """

    def __init__(self, factor: float, usual: Callable[[], Usual]) -> None:
        self._factor = factor
        self._usual = usual

    def open(self, storage: Storage, url: str, tally: Tally, *, start: int = 0, etag: str | None = None) -> ObjectStream:
        """Return `storage.get(…)`; with races, a stream that takes each part from whichever request brings it."""
        if not self._factor:
            return storage.get(url, start=start, etag=etag)
        usual = self._usual()
        if usual.num_seen < _LEAST_SEEN:
            return storage.get(url, start=start, etag=etag)
        return RacedStream(
            lambda start, etag: storage.get(url, start=start, etag=etag),
            start,
            etag,
            tally,
            answer_seconds=max(_LEAST_SECONDS, self._factor * usual.answer_seconds),
            silence_seconds=max(_LEAST_SECONDS, self._factor * usual.silence_seconds),
        )


_Item = ObjectStream | bytes | None  # an open answer, a part of its body, its end
_Items = Generator[_Item, None, None]


class _Reader(threading.Thread):
    """One request, in a thread of its own, which gives an item when it is asked to."""

    def __init__(self, items: _Items, answers: queue.SimpleQueue[tuple[_Reader, _Item | Exception]]) -> None:
        super().__init__(name="hedge", daemon=True)
        self._items = items
        self._answers = answers
        self._wanted = threading.Semaphore(0)
        self._is_left = False
        self.start()

    def ask(self) -> None:
        """Have the next item put into the queue."""
        self._wanted.release()

    def leave(self) -> None:
        """End it as soon as it comes back from the network; what it brings then is dropped."""
        self._is_left = True
        self._wanted.release()

    def run(self) -> None:
        """Give items until there are none, or nobody wants them."""
        while self._wanted.acquire() and not self._is_left:
            try:
                self._answers.put((self, next(self._items)))
            except Exception as error:  # whatever it is: somebody waits for it
                self._answers.put((self, error))
                return
        self._items.close()


class RacedStream:
    """An answer whose hanging parts are asked for a second time.

    The error of one request counts only when the other has failed too.

    Args:
        open_at: Opens the object from an offset on, of a version if that is given.
        start: Where to begin.
        etag: Version that it must be.
        tally: Told of second requests.
        answer_seconds: How long an answer may keep silent before it is raced.
        silence_seconds: How long a body may.
    """

    def __init__(
        self,
        open_at: Callable[[int, str | None], ObjectStream],
        start: int,
        etag: str | None,
        tally: Tally,
        *,
        answer_seconds: float,
        silence_seconds: float,
    ) -> None:
        self._open_at = open_at
        self._tally = tally
        self._silence_seconds = silence_seconds
        self._answers: queue.SimpleQueue[tuple[_Reader, _Item | Exception]] = queue.SimpleQueue()
        self._opened: list[ObjectStream] = []
        self._readers = [_Reader(self._whole(start, etag), self._answers)]
        opened = self._next(answer_seconds, lambda: self._whole(start, etag))
        assert opened is not None
        assert not isinstance(opened, bytes)
        self.info: ObjectInfo = opened.info
        self.start: int = opened.start

    @property
    def num_extra_requests(self) -> int:
        """Requests so far beside those that opened an answer."""
        return sum(stream.num_extra_requests for stream in self._opened)

    def chunks(self) -> Iterator[memoryview]:
        """Yield the bytes in order, each part from the request that brought it first."""
        offset, etag = self.start, self.info.etag
        has_name = bool(etag) and not str(etag).startswith("W/")
        while True:
            can_go_on = has_name or offset == self.start  # else nobody can tell whether the rest is of the same version
            again = (lambda offset=offset: self._rest(offset, etag if has_name else None)) if can_go_on else None
            chunk = self._next(self._silence_seconds, again)
            if chunk is None:
                return
            assert isinstance(chunk, bytes)
            yield memoryview(chunk)
            offset += len(chunk)

    def close(self) -> None:
        """Give the connections back."""
        for reader in self._readers:
            reader.leave()
        self._readers = []

    def _next(self, patience_seconds: float, again: Callable[[], _Items] | None) -> _Item:
        """Return the next item of the request at work, or of a second one if that is faster; go on with the winner."""
        self._readers[0].ask()
        while True:
            may_race = again is not None and len(self._readers) == 1
            try:
                reader, item = self._answers.get(timeout=patience_seconds if may_race else None)
            except queue.Empty:
                assert again is not None
                self._tally.num_requests += 1
                self._readers.append(_Reader(again(), self._answers))
                self._readers[1].ask()
                again = None
                continue
            if reader not in self._readers:
                continue
            if not isinstance(item, Exception):
                for other in self._readers:
                    if other is not reader:
                        other.leave()
                self._readers = [reader]
                return item
            self._readers.remove(reader)
            if not self._readers:
                raise item
            if isinstance(item, StorageError):
                self._tally.count_failed(item)

    def _whole(self, start: int, etag: str | None) -> _Items:
        """Give the open answer, then its body, then the end."""
        stream = self._open_at(start, etag)
        self._opened.append(stream)
        try:
            yield stream
            for chunk in stream.chunks():
                yield bytes(chunk)  # a copy: the stream may use its buffer again before anybody took this
            yield None
        finally:
            stream.close()

    def _rest(self, offset: int, etag: str | None) -> _Items:
        """Give the body from `offset` on, of the version that the first answer was, then the end."""
        items = self._whole(offset, etag)
        try:
            stream = next(items)
            assert stream is not None
            assert not isinstance(stream, bytes)
            if (stream.info.size_bytes, stream.info.etag) != (self.info.size_bytes, self.info.etag):
                where = redact(self.info.url)
                raise ObjectChangedError(f"{where} changed while it was read: read it again", url=where)
            num_before = offset - stream.start  # a server that ignores ranges sends it from the start
            for chunk in items:
                assert chunk is None or isinstance(chunk, bytes)
                if chunk is None or num_before < len(chunk):
                    yield chunk if chunk is None else chunk[num_before:]
                num_before = max(0, num_before - len(chunk or b""))
        finally:
            items.close()
