"""The helper process: `python -P -m sqlstream.storage.worker.helper SOCKET_FD PARENT_PID`, or a fork of the `starter`.

Does all remote reading and writing of one process under one identity, for all users there (`Users`). Started, fed and ended by
`storage.client`; ends by itself when the socket ends or its reader is gone. Threads: the main one reads messages and
never waits for the network or for the client to read, so the client may always send; one sends; the pools download and answer
calls.
"""

from __future__ import annotations

import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.backends.provider import Providers
from sqlstream.storage.backends.renewal import credential_source
from sqlstream.storage.base.access import OWN
from sqlstream.storage.base.protocols import CALLS_AT_A_TIME, read_ranges, writer_of
from sqlstream.storage.base.urls import redact, redact_text
from sqlstream.storage.protocol.channel import Channel, ChannelClosedError
from sqlstream.storage.protocol.messages import (
    USUAL_TIMING,
    Alive,
    Cancel,
    CheckProviders,
    EndListing,
    EndUser,
    Fetch,
    FetchDone,
    FetchEvent,
    FetchRequest,
    Grant,
    Head,
    LogLine,
    NextPage,
    Put,
    Ranges,
    Reply,
    StartHelper,
    ToHelper,
    ToReader,
)
from sqlstream.storage.worker.outbox import Outbox
from sqlstream.storage.worker.stalls import StallWatch, Wait
from sqlstream.storage.worker.transfer import Transfer
from sqlstream.storage.worker.users import ServedUser, Users
from sqlstream.storage.worker.workers import Job, Workers

_HANG_SECONDS = 60.0  # beyond every timeout: a storage client that takes longer has broken down
_SWITCH_SECONDS = 0.05
"""How long a thread waits for the interpreter before it asks for it; Python's 5 ms. Each downloads, and lets it go by itself at
its next request, read or write: who asks sooner wakes for nothing, and takes it from a thread that the system has stopped."""
_PAGE = 1000  # objects of one page of a listing, as S3 has it

_logger = logging.getLogger(__name__)


class Helper:
    """State of the helper process."""

    def __init__(self, channel: Channel, start: StartHelper) -> None:
        self._channel = channel
        self._waiting_calls: dict[str, tuple[str, float | None]] = {}
        """Host of each call that is under way, and the time when it began, by the monotonic clock; None: it sends."""
        self._stalls = StallWatch(start.timing.stall_seconds)
        self._workers = Workers()
        credentials = credential_source(start.options.storage_options.get("credentials"), start.search_path)
        self._providers = Providers(start.options.providers, start.search_path)
        self._users = Users(start.options, self._workers, self._report, credentials, self._providers)
        # Threads of their own, so that downloads that wait for a grant do not stop them.
        self._calls = ThreadPoolExecutor(CALLS_AT_A_TIME, thread_name_prefix="call")
        self._transfers: dict[str, Transfer] = {}
        self._outbox = Outbox(channel.send, lambda: bool(self._transfers))
        threading.Thread(target=self._send_loop, name="send", daemon=True).start()

    def post(self, message: ToReader) -> None:
        """Send a message soon; never blocks."""
        self._outbox.post(message)

    def handle(self, message: ToHelper, descriptors: list[int]) -> None:
        """Act on one message of the client."""
        match message:
            case Fetch():
                self._fetch(self._users.get(message.options), message.requests, descriptors)
            case Grant():
                if transfer := self._transfers.get(message.ticket):
                    transfer.grant(message.granted_bytes)
            case Cancel():
                _cancel([transfer for ticket in message.tickets if (transfer := self._transfers.get(ticket))])
            case Head():
                self._answer(message.call, message.url, partial(_head, self._users.get(message.options), message))
            case NextPage():
                self._answer(message.call, message.prefix, partial(_next_page, self._users.get(message.options), message))
            case Ranges():
                self._answer(message.call, message.url, partial(_ranges, self._users.get(message.options), message))
            case Put():
                put = partial(_put, self._users.get(message.options), message)
                self._answer(message.call, message.url, put, is_wait=False)
            case CheckProviders():
                self._answer(message.call, "providers", partial(_check, self._providers, message))
            case EndListing():
                self._users.end_listing(message.user, message.listing)
            case EndUser():
                context = self._users.end(message.user)
                _cancel([transfer for transfer in list(self._transfers.values()) if transfer.context is context])
            case StartHelper():
                raise AssertionError("the second StartHelper")

    def look(self) -> None:
        """Give a sign of life if an answer is owed, log silent hosts; end this process if a client hangs beyond timeouts."""
        transfers, calls = list(self._transfers.values()), list(self._waiting_calls.values())
        now = time.monotonic()
        waits = [Wait(place, now - since) for place, since in calls if since is not None]
        for transfer in transfers:
            since, limit = transfer.active_since, transfer.context.request_seconds + _HANG_SECONDS
            if since is None:
                continue
            waits.append(Wait(self._providers.asked(transfer.request.url), now - since))
            if now - since > limit:
                sys.stderr.write(f"sqlstream: {redact(transfer.request.url)} hangs beyond all timeouts\n")
                os._exit(1)
        self._stalls.look(waits)
        if transfers or calls:
            self.post(Alive())

    def _fetch(self, user: ServedUser, requests: Sequence[FetchRequest], descriptors: Sequence[int]) -> None:
        jobs: list[Job] = []
        for request, fd in zip(requests, descriptors, strict=False):
            transfer = Transfer(request, fd, user.context)
            self._transfers[request.ticket] = transfer
            jobs.append(transfer.run)
        self._workers.submit(user.lane, jobs)
        for request in requests[len(descriptors) :]:
            where = redact(request.url)
            error = TransientStorageError(f"{where}: the helper process may not open more files: raise `ulimit -n`", url=where)
            self.post(FetchDone(ticket=request.ticket, error=error))

    def _report(self, event: FetchEvent) -> None:
        if isinstance(event, FetchDone):
            self._transfers.pop(event.ticket, None)
        self.post(event)

    def _answer(self, call: str, url: str, work: Callable[[], Reply], *, is_wait: bool = True) -> None:
        def run() -> None:
            try:
                reply = work()
            except SqlStreamError as error:
                reply = Reply(call=call, error=error)
            except BaseException as error:  # a user's file system may call sys.exit: nothing else would answer
                _logger.exception("unexpected error in the helper process")
                text = f"unexpected {type(error).__name__} in the helper process: see the log"
                reply = Reply(call=call, error=StorageError(text))
            del self._waiting_calls[call]
            self.post(reply)

        self._waiting_calls[call] = (self._providers.asked(url), time.monotonic() if is_wait else None)
        self._calls.submit(run)

    def _send_loop(self) -> None:
        try:
            self._outbox.run()
        except ChannelClosedError:
            os._exit(0)


def _cancel(transfers: Sequence[Transfer]) -> None:
    for transfer in transfers:
        transfer.cancel()


def _check(providers: Providers, message: CheckProviders) -> Reply:
    providers.check()
    return Reply(call=message.call)


def _head(user: ServedUser, message: Head) -> Reply:
    info = user.call(message.url, message.access, lambda storage: storage.head(message.url))
    return Reply(call=message.call, objects=(info,))


def _ranges(user: ServedUser, message: Ranges) -> Reply:
    parts = user.call(
        message.url, message.access, lambda storage: read_ranges(storage, message.url, message.ranges, message.size_bytes)
    )
    return Reply(call=message.call, parts=tuple(bytes(part) for part in parts))


def _put(user: ServedUser, message: Put) -> Reply:
    user.call(message.url, OWN, lambda storage: writer_of(storage, message.url).put(message.url, Path(message.path)))
    return Reply(call=message.call)


def _next_page(user: ServedUser, message: NextPage) -> Reply:
    if message.is_first:
        listing = user.begin_listing(message.listing, message.prefix)
    elif (known := user.listings.get(message.listing)) is not None:
        listing = known
    else:
        where = redact(message.prefix)
        raise TransientStorageError(f"{where}: its listing was given up in the middle: list again", url=where)
    page = tuple(islice(listing, _PAGE))  # one page at a time is asked for, so no two threads are here
    if not page:
        user.listings.pop(message.listing, None)
    return Reply(call=message.call, objects=page)


class _LogForwarder(logging.Handler):
    """Sends what is logged here to the reading process, with every URL redacted: our own from INFO on, of others warnings."""

    def __init__(self, helper: Helper) -> None:
        super().__init__()
        self._helper = helper

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = redact_text(self.format(record))
        except Exception:
            self.handleError(record)
            return
        self._helper.post(LogLine(name=record.name, level=record.levelno, text=text))


def serve(channel: Channel, has_reader: Callable[[], bool]) -> None:
    """Serve the client until it is gone, and end this process.

    Args:
        channel: To the client.
        has_reader: Returns False once the client's process is gone: a copy of its end of the channel may live on, in a process
            that was forked without Python's hooks.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's; our end is the end of the socket
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(_SWITCH_SECONDS)
    helper: Helper | None = None
    alive_at = 0.0
    look_seconds = USUAL_TIMING.look_seconds
    while has_reader():
        if helper is not None and time.monotonic() - alive_at >= look_seconds:
            alive_at = time.monotonic()
            helper.look()
        try:
            messages, descriptors = channel.receive(look_seconds)
        except TimeoutError:
            continue
        except ChannelClosedError:
            break
        for message in messages:
            if helper is None:
                assert isinstance(message, StartHelper)
                helper = Helper(channel, message)
                look_seconds = message.timing.look_seconds
                helper.post(Alive())
                logging.getLogger().addHandler(_LogForwarder(helper))
                logging.getLogger("sqlstream").setLevel(logging.INFO)
            else:
                helper.handle(message, descriptors)
    os._exit(0)  # without waiting for threads that may be in the network


def has_ended(process: int) -> bool:
    """Return whether the process that a pidfd stands for is gone."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(0))


def main() -> None:
    """Serve the process that started this one."""
    descriptor, parent_pid = int(sys.argv[1]), int(sys.argv[2])
    serve(Channel(socket.socket(fileno=descriptor)), lambda: os.getppid() == parent_pid)


if __name__ == "__main__":
    main()
