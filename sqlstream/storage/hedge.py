"""A second request beside one whose answer does not come; the first answer counts. Off by default: it costs requests."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from sqlstream.storage.base import ObjectStream, Storage
from sqlstream.storage.retry import Tally

_LEAST_SECONDS = 0.02  # no race below: a thread that had to wait for the interpreter is no hanging server
_LEAST_SEEN = 20  # downloads, before a 95th percentile means anything


class Opener:
    """Opens answers, with a race when it is asked for.

    Args:
        factor: Race what takes so many times the usual latency; 0: nothing.
        usual_seconds: The 95th percentile of latencies, and how many it was taken from.
    """

    def __init__(self, factor: float, usual_seconds: Callable[[], tuple[float, int]]) -> None:
        self._factor = factor
        self._usual_seconds = usual_seconds

    def open(self, storage: Storage, url: str, tally: Tally) -> ObjectStream:
        """Return `storage.get(url)`, or that of a second request if its answer comes first."""
        if not self._factor:
            return storage.get(url)
        usual, num_seen = self._usual_seconds()
        if num_seen < _LEAST_SEEN:
            return storage.get(url)
        return first_of(lambda: storage.get(url), max(_LEAST_SECONDS, self._factor * usual), tally)


def first_of(open_stream: Callable[[], ObjectStream], patience_seconds: float, tally: Tally) -> ObjectStream:
    """Return the first answer of one request, or of two when the first keeps silent for `patience_seconds`.

    The error of one counts only when the other has failed too. The late answer is closed unread.
    """
    answers: queue.SimpleQueue[ObjectStream | Exception] = queue.SimpleQueue()
    lock = threading.Lock()
    is_settled = False

    def ask() -> None:
        answer: ObjectStream | Exception
        try:
            answer = open_stream()
        except Exception as error:
            answer = error
        with lock:
            if not is_settled:
                answers.put(answer)
                return
        if not isinstance(answer, Exception):
            answer.close()

    def start() -> None:
        threading.Thread(target=ask, name="hedge", daemon=True).start()

    start()
    num_open = 1
    try:
        answer = answers.get(timeout=patience_seconds)
    except queue.Empty:
        tally.num_requests += 1
        start()
        num_open, answer = 2, answers.get()
    if isinstance(answer, Exception) and num_open == 2:
        answer = answers.get()
    with lock:
        is_settled = True
        late = None if answers.empty() else answers.get()
    if late is not None and not isinstance(late, Exception):
        late.close()
    if isinstance(answer, Exception):
        raise answer
    return answer
