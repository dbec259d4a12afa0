"""The messages between the reading process and its helper: plain values, pickled.

They are named tuples: Python pickles those in C, and a frozen dataclass with slots field by field in Python, which was a
quarter of the helper's time in the interpreter (m). It also makes their classes in a seventh of the time (m), at each start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from sqlstream.config import StorageOptions
from sqlstream.errors import SqlStreamError
from sqlstream.storage.base.access import OWN, Access
from sqlstream.storage.base.protocols import ObjectInfo, Unpack, ZipRecord


class ReadOptions(NamedTuple):
    """How one user of a helper reads; goes with each of its requests."""

    user: str
    """The user's name, unique within the process."""
    num_retries: int
    connect_timeout_seconds: float
    read_timeout_seconds: float
    total_timeout_seconds: float
    num_threads: int | Literal["auto"]
    """Downloads of this user at a time; "auto": it shares those of the helper with the others."""
    checks_etag: bool
    """Compare the MD5 of the bytes with an ETag that has the form of one."""
    num_processes: int = 1
    """Processes of this node that read, the user's one included: with "auto" they share the node's downloads."""


class FetchRequest(NamedTuple):
    """Download one object into an open file."""

    ticket: str
    """The caller's name for this download, unique among those that are outstanding in this process."""
    url: str
    fd: int
    """Descriptor open for writing; the helper gets a duplicate. The caller keeps its own open until FetchDone."""
    granted_bytes: int
    """The helper writes no byte at or past this offset until it is granted more."""
    expected_bytes: int | None = None
    """Size that the object (or its part) must have; None: any."""
    span: tuple[int, int] | None = None
    """The part of the object to download, half open; the file holds it from offset 0. None: the whole object."""
    whole_bytes: int | None = None
    """Size that the whole object must have, where `span` is a part of it; None: any."""
    expected_etag: str | None = None
    """ETag that the object must have; None: any."""
    unpack: Unpack | ZipRecord | None = None
    """How the bytes of the file are made of the object's, or of its part's; None: they are these."""
    access: Access = OWN
    """The addresses that connections may lead to, and the use of credentials."""


class FetchDone(NamedTuple):
    """The end of a download, good or bad; the helper has closed its descriptor before this is sent."""

    ticket: str
    size_bytes: int = 0
    """Bytes of the object. The file holds it from offset 0; the caller cuts what lies behind (a preallocated tail)."""
    etag: str | None = None
    is_private: bool = False
    """True: it came from this machine or a private network; known for http(s) only."""
    seconds: float = 0.0
    """Duration of the download, without its time in the queue."""
    num_requests: int = 0
    """Number of requests: exact with obstore and urllib3, at least this many with fsspec."""
    num_retries: int = 0
    downloaded_bytes: int = 0
    """Bytes that came over the network, those of failed tries included."""
    pause_seconds: float = 0.0
    """Time between tries."""
    host: str = ""
    """Target of the requests: `scheme://authority`, without credentials; `file` for local files."""
    error: SqlStreamError | None = None
    """A StorageError (context `errno` when the local write failed, e.g. ENOSPC), ConfigError or MissingDependencyError."""


class GrantNeeded(NamedTuple):
    """The object does not fit its grant; the helper waits for `grant()` or `cancel()` with the answer open."""

    ticket: str
    size_bytes: int | None
    """Whole size, when the server said it; None: grant another step."""


FetchEvent = FetchDone | GrantNeeded


@dataclass(frozen=True, slots=True, kw_only=True)
class HelperTiming:
    """Times after which a helper gives a sign of life, is idle, or hangs; the same value on both sides."""

    look_seconds: float = 2.0
    """Interval between signs of life of a helper that owes answers, and the step in which the reading process counts silence.
    Steps, not time: a job that was stopped as a whole (SIGSTOP, a suspended machine) must not find its helper overdue."""
    max_silent_looks: int = 15
    """Silent steps after which a helper that owes answers hangs."""
    max_silent_looks_at_stop: int = 3
    """The same while one of several users waits for it to give up downloads, at its close."""
    max_silent_looks_at_start: int = 60
    """The same before its first message: its imports may come from a cold network disk."""
    max_idle_looks: int = 15
    """Silent steps after which a helper that owes nothing is ended: 30 s give back its 40 MB; the next starts in 0.15 s (m)."""
    stall_seconds: float = 10.0
    """Silence of a host after which it is logged; a listing or a cold object takes less."""


USUAL_TIMING = HelperTiming()


class StartHelper(NamedTuple):
    """First message to the helper."""

    options: StorageOptions
    """The server and who asks it; how each user reads comes with its requests."""
    timing: HelperTiming = USUAL_TIMING
    search_path: tuple[str, ...] = ()
    """Where the reading process looks for modules, if the options name a function of one."""


class Fetch(NamedTuple):
    """Requests of one user, whose descriptors come with the same frame in the same order."""

    options: ReadOptions
    requests: tuple[FetchRequest, ...]


class Grant(NamedTuple):
    """The download may write up to here."""

    ticket: str
    granted_bytes: int


class Cancel(NamedTuple):
    """Give these downloads up."""

    tickets: tuple[str, ...]


class Head(NamedTuple):
    """Ask for one ObjectInfo."""

    call: str
    options: ReadOptions
    url: str
    access: Access = OWN


class NextPage(NamedTuple):
    """Ask for the next objects of a listing; the first time opens it."""

    call: str
    options: ReadOptions
    listing: str
    prefix: str
    is_first: bool


class Ranges(NamedTuple):
    """Ask for parts of one object; the answer comes by message, so they are small."""

    call: str
    options: ReadOptions
    url: str
    ranges: tuple[tuple[int, int], ...]
    size_bytes: int | None = None
    """Size that the object must have; None: any."""
    access: Access = OWN


class CheckProviders(NamedTuple):
    """Import the functions that `StorageOptions.providers` names."""

    call: str


class EndListing(NamedTuple):
    """The listing is not read on."""

    user: str
    listing: str


class EndUser(NamedTuple):
    """Give up what this user has under way, and forget it."""

    user: str


class Put(NamedTuple):
    """Store a local file as an object, whole or not at all; what is there is replaced."""

    call: str
    options: ReadOptions
    url: str
    path: str
    """Of the file; it does not change until the answer."""


ToHelper = StartHelper | Fetch | Grant | Cancel | Head | NextPage | Ranges | Put | CheckProviders | EndListing | EndUser


class Reply(NamedTuple):
    """The answer to a call: an object (Head), objects, none at the end (NextPage), bytes (Ranges), nothing; or an error."""

    call: str
    objects: tuple[ObjectInfo, ...] = ()
    parts: tuple[bytes, ...] = ()
    error: SqlStreamError | None = None


class LogLine(NamedTuple):
    """A record of the helper's log: our own from INFO on, of others warnings."""

    name: str
    level: int
    text: str
    """Redacted, with its traceback if it had one."""


class ForkHelper(NamedTuple):
    """A request to the starter: one datagram.

    With it come the helper's end of its channel, a pidfd of the reader, the reader's standard error, and its working directory.
    """

    reader: int
    """Process id."""


NUM_FORK_DESCRIPTORS = 4
"""Of a ForkHelper."""


class Started(NamedTuple):
    """The first frame of a helper that another process forked for the reader: alone, with a pidfd of the helper."""

    pid: int


class Alive(NamedTuple):
    """The first message of a helper, and from then on a sign every few seconds while it has something to do."""


ToReader = FetchDone | GrantNeeded | Reply | LogLine | Alive
