"""The helper process: `python -P -m sqlstream.storage.helper SOCKET_FD PARENT_PID`.

Does all remote reading for one process, its only client. Started, fed and ended by `client.py`; ends by itself when the socket
ends or its parent is another one. Threads: the main one reads messages and never waits for the network or for the client to
read, so the client may always send; one sends; the pools download and answer calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice
from time import sleep

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.base import ObjectInfo, Storage
from sqlstream.storage.channel import Channel, ChannelClosedError
from sqlstream.storage.messages import (
    Cancel,
    EndListing,
    Fetch,
    FetchDone,
    FetchEvent,
    FetchRequest,
    Grant,
    Head,
    LogLine,
    NextPage,
    Reply,
    Start,
    ToHelper,
    ToReader,
)
from sqlstream.storage.resolve import Resolver
from sqlstream.storage.retry import RetryPolicy, Tally, list_with_retries, with_retries
from sqlstream.storage.transfer import Transfer
from sqlstream.storage.urls import redact, redact_text

_PARENT_CHECK_SECONDS = 2.0  # for what hides the end of the socket: a copy of it in a process forked without Python's hooks
_NUM_CALL_THREADS = 4  # head and list have threads of their own: downloads that wait for a grant must not stop them
_BATCH = 256  # messages of one frame at most; arbitrary
_PAGE = 1000  # objects of one page of a listing, as S3 has it

_logger = logging.getLogger(__name__)


class Helper:
    """State of the helper process."""

    def __init__(self, channel: Channel, options: StorageOptions) -> None:
        self._channel = channel
        self._resolver = Resolver(options)
        self._policy = RetryPolicy(num_retries=options.num_retries)
        self._downloads = ThreadPoolExecutor(options.num_threads, thread_name_prefix="download")
        self._calls = ThreadPoolExecutor(_NUM_CALL_THREADS, thread_name_prefix="call")
        self._outgoing: queue.SimpleQueue[ToReader] = queue.SimpleQueue()
        self._transfers: dict[str, Transfer] = {}
        self._listings: dict[str, Iterator[ObjectInfo]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._send_loop, name="send", daemon=True).start()

    def post(self, message: ToReader) -> None:
        """Send a message soon; never blocks."""
        self._outgoing.put(message)

    def handle(self, message: ToHelper, descriptors: list[int]) -> None:
        """Act on one message of the client."""
        match message:
            case Fetch():
                for position, request in enumerate(message.requests):
                    self._fetch(request, descriptors[position] if position < len(descriptors) else None)
            case Grant():
                if transfer := self._transfers.get(message.ticket):
                    transfer.grant(message.granted_bytes)
            case Cancel():
                for ticket in message.tickets:
                    if transfer := self._transfers.get(ticket):
                        transfer.cancel()
            case Head():
                self._answer(message.call, lambda: (self._head(message.url),))
            case NextPage():
                self._answer(message.call, lambda: self._next_page(message))
            case EndListing():
                self._listings.pop(message.listing, None)
            case Start():
                raise AssertionError("the second Start")

    def _fetch(self, request: FetchRequest, fd: int | None) -> None:
        if fd is None:
            where = redact(request.url)
            error = TransientStorageError(f"{where}: the helper process may not open more files: raise `ulimit -n`", url=where)
            self.post(FetchDone(ticket=request.ticket, error=error))
            return
        transfer = Transfer(replace(request, fd=fd), self._report)
        self._transfers[request.ticket] = transfer
        self._downloads.submit(self._logged, lambda: transfer.run(self._resolver, self._policy))

    def _report(self, event: FetchEvent) -> None:
        if isinstance(event, FetchDone):
            self._transfers.pop(event.ticket, None)
        self.post(event)

    def _answer(self, call: str, work: Callable[[], tuple[ObjectInfo, ...]]) -> None:
        def run() -> None:
            try:
                reply = Reply(call=call, objects=work())
            except SqlStreamError as error:
                reply = Reply(call=call, error=error)
            except Exception as error:
                self.post(
                    Reply(
                        call=call, error=StorageError(f"unexpected {type(error).__name__} in the helper process: see the log")
                    )
                )
                raise
            self.post(reply)

        self._calls.submit(self._logged, run)

    def _head(self, url: str) -> ObjectInfo:
        def head(storage: Storage) -> ObjectInfo:
            return storage.head(url)

        candidates, tally = self._resolver.candidates(url), Tally()
        return with_retries(candidates, head, policy=self._policy, tally=tally, wait=sleep)

    def _next_page(self, message: NextPage) -> tuple[ObjectInfo, ...]:
        with self._lock:
            listing = self._listings.get(message.listing)
            if listing is None:
                candidates = self._resolver.candidates(message.prefix)
                listing = list_with_retries(candidates, message.prefix, self._policy, sleep)
                self._listings[message.listing] = listing
        page = tuple(islice(listing, _PAGE))  # one page at a time is asked for, so no two threads are here
        if not page:
            self._listings.pop(message.listing, None)
        return page

    def _logged(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception:
            _logger.exception("unexpected error in the helper process")

    def _send_loop(self) -> None:
        while True:
            batch = [self._outgoing.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < _BATCH:
                    batch.append(self._outgoing.get_nowait())
            try:
                self._channel.send(batch)
            except ChannelClosedError:
                os._exit(0)


class _LogForwarder(logging.Handler):
    """Sends what is logged here to the reading process, with every URL redacted."""

    def __init__(self, helper: Helper) -> None:
        super().__init__(logging.WARNING)
        self._helper = helper

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = redact_text(self.format(record))
        except Exception:
            self.handleError(record)
            return
        self._helper.post(LogLine(name=record.name, level=record.levelno, text=text))


def main() -> None:
    """Serve the client until it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; our end is the end of the socket
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    channel = Channel(socket.socket(fileno=descriptor))
    helper: Helper | None = None
    while os.getppid() == parent_pid:
        try:
            messages, descriptors = channel.receive(_PARENT_CHECK_SECONDS)
        except TimeoutError:
            continue
        except ChannelClosedError:
            break
        for message in messages:
            if helper is None:
                assert isinstance(message, Start)
                helper = Helper(channel, message.options)
                logging.getLogger().addHandler(_LogForwarder(helper))
            else:
                helper.handle(message, descriptors)
    os._exit(0)  # threads may be in the network: nobody waits for them


if __name__ == "__main__":
    main()
