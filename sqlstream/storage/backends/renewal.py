"""Credentials that end: the user's function is asked for new ones before that, and when a server refuses those in use.

Here for all clients: each is made anew of the options that the function gave. Rejected: the providers of obstore and botocore,
of which each has other fields, and none is asked again after a refusal.
"""

from __future__ import annotations

import datetime
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Generic, TypeVar

from sqlstream.config.storage import copied
from sqlstream.errors import AccessDeniedError, ConfigError, StorageError, TransientStorageError, text_of
from sqlstream.storage.backends.functions import load_function
from sqlstream.storage.base.credentials import is_credential_option
from sqlstream.storage.base.protocols import ObjectInfo, ObjectStream, RangeBytes, Storage, writer_of
from sqlstream.storage.base.service_errors import BAD_CREDENTIALS
from sqlstream.storage.base.urls import redact_text

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

_MOST_EARLY_SECONDS = 300.0  # before their end, as object_store renews; of short ones a tenth of their time
_MOST_RENEWALS = 3  # of one request; more than one, since tokens may be good for few requests and threads share them
_PATIENCE_SECONDS = 30.0  # of a try for the function; arbitrary, a login service answers within a few
_MOST_WAITS = 4  # so many times that, one call of it is waited for at the longest, by all tries together
_SAID_SECONDS = 10.0  # silence of the function that is logged, as that of a host is
_END_OF_DATES = 253_402_300_800  # seconds from 1970 to the year 10000: milliseconds, from 1978 on, are more
_AGAIN_SECONDS = 30.0  # after the function failed while what it gave before is still good; arbitrary


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """What the function gave."""

    number: int
    """Number of the answer."""
    options: Mapping[str, object] = field(repr=False)
    """`storage_options` that are put over those of the user."""
    ends_at: float = math.inf
    """End of the credentials, by the wall clock; infinity: it is not known."""
    renew_at: float = math.inf
    """Time from which on the function is asked again."""


class _Question:
    """One call of the user's function, and how it ended."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self.is_over = threading.Event()
        self.granted: Granted | None = None
        self.error: ConfigError | TransientStorageError | None = None
        self.is_said = False
        """The log says that it takes long."""

    def wait(self, seconds: float) -> bool:
        """Return whether it is over; wait for that, but no longer than to the deadline of all who wait."""
        return self.is_over.wait(max(0.0, min(seconds, self._deadline - time.monotonic())))


class CredentialSource:
    """Asks the user's function, once at a time, and keeps its last answer; thread safe.

    The function runs in a thread of its own: one that never returns holds up no thread that has credentials, and the others for
    a time.

    Args:
        name: `module:function`, for messages.
        ask: The function.
        clock: Gives the wall time in seconds, which ends of credentials are given in.
        patience_seconds: Longest wait for the function.
    """

    def __init__(
        self,
        name: str,
        ask: Callable[[], object],
        clock: Callable[[], float] = time.time,
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self.name = f"storage_options['credentials']={name!r}"
        """What messages call it."""
        self._ask_user = ask
        self._clock = clock
        self._patience_seconds = patience_seconds
        self._lock = threading.Lock()
        self._granted: Granted | None = None
        self._question: _Question | None = None
        """The one that is under way."""

    def current(self) -> Granted:
        """Return credentials that do not end soon; those that are good while another thread asks for new ones.

        Raises:
            ConfigError: The function gave no options.
            TransientStorageError: It raised, or does not return, and none are left.
        """
        granted, now = self._granted, self._clock()
        if granted is not None and (now < granted.renew_at or (now < granted.ends_at and self._question is not None)):
            return granted
        try:
            return self._asked(granted)
        except TransientStorageError as error:
            return self._kept(granted, error)

    def has_newer(self, granted: Granted) -> bool:
        """Return whether there are newer credentials than these already."""
        return self._granted is not None and self._granted.number > granted.number

    def may_have_ended(self, granted: Granted) -> bool:
        """Return whether credentials are at their end by the clock, or it is not known when that is."""
        return granted.ends_at == math.inf or self._clock() >= granted.ends_at

    def after_refusal(self, refused: Granted) -> Granted | None:
        """Return other credentials than those that a server refused; None: the function gives the same again."""
        granted = self._asked(refused)
        return None if granted.number == refused.number else granted

    def _kept(self, before: Granted | None, error: TransientStorageError) -> Granted:
        """Return the credentials of before for a while after the function failed, as long as they are good."""
        now = self._clock()
        with self._lock:
            if before is None or self._granted is None or now >= self._granted.ends_at:
                raise error
            if self._granted is before:
                _logger.warning("%s; what it gave before ends in %.0f s", error, before.ends_at - now)
                self._granted = replace(before, renew_at=min(now + _AGAIN_SECONDS, before.ends_at))
            return self._granted

    def _asked(self, before: Granted | None) -> Granted:
        """Return what the function gives now, or has given since `before`."""
        with self._lock:
            if self._granted is not None and (before is None or self._granted.number > before.number):
                return self._granted
            if (question := self._question) is None:
                question = self._question = _Question(time.monotonic() + _MOST_WAITS * self._patience_seconds)
                try:
                    threading.Thread(target=self._answer, args=(question,), name="credentials", daemon=True).start()
                except RuntimeError as error:  # no more threads for this user, or container
                    self._question = None
                    raise TransientStorageError(f"{self.name} cannot be asked: {error}") from error
        soon = min(_SAID_SECONDS, self._patience_seconds)
        if not question.wait(soon):
            self._say(question, soon)
        if not question.wait(self._patience_seconds - soon):
            raise TransientStorageError(
                f"{self.name} has not returned for {self._patience_seconds:.0f} s: have it give up after a time, with an error"
            )
        if question.error is not None:
            raise type(question.error)(str(question.error)) from question.error  # of each thread that waits, its own
        assert question.granted is not None, "a question ends with an answer or an error"
        return question.granted

    def _say(self, question: _Question, seconds: float) -> None:
        """Log once that the function takes long: else the hosts that wait for it look silent."""
        with self._lock:
            is_said, question.is_said = question.is_said, True
        if not is_said:
            _logger.warning("%s has not returned for %.0f s: no request is made before it does", self.name, seconds)

    def _answer(self, question: _Question) -> None:
        """Ask the function, and end the question."""
        granted: Granted | None = None
        try:
            granted = self._given()
        except (ConfigError, TransientStorageError) as error:
            question.error = error
        finally:
            with self._lock:
                self._question = None
                if granted is not None:
                    before = self._granted
                    number = 1 if before is None else before.number + (before.options != granted.options)
                    question.granted = self._granted = replace(granted, number=number)
            question.is_over.set()

    def _given(self) -> Granted:
        asked_at = self._clock()
        try:
            given = self._ask_user()
        except ConfigError:
            raise
        except BaseException as error:  # sys.exit, too: nothing but the function can raise in this thread
            text = redact_text(text_of(error))
            raise TransientStorageError(f"{self.name} raised {text}") from error
        if not isinstance(given, Mapping):
            raise ConfigError(f"{self.name} gave a {type(given).__name__}: return a dict of storage_options and expires_at")
        options = {str(key): copied(value) for key, value in given.items() if key != "expires_at"}
        for key in options:
            if key != "headers" and not is_credential_option(key):  # it could lead to another server: then objects are others
                raise ConfigError(f"{self.name} gave {key!r}, which is no credential: give it in storage_options")
        self._check_headers(options.get("headers") or {})
        ends_at = self._seconds(given.get("expires_at"))
        if ends_at <= asked_at:
            text = "%s gave credentials that ended %.0f s ago: check the clock, and that expires_at is a time, not a duration"
            _logger.warning(text, self.name, asked_at - ends_at)
            ends_at = math.inf  # by the server's clock they may be good, and when it refuses them others are asked for
        renew_at = ends_at - min(_MOST_EARLY_SECONDS, (ends_at - asked_at) / 10)
        return Granted(number=0, options=options, ends_at=ends_at, renew_at=renew_at)

    def _check_headers(self, headers: object) -> None:
        """Raise for headers that are no text: the client would send what Python shows of a value, or say where it was given."""
        if not isinstance(headers, Mapping):
            raise ConfigError(f"{self.name} gave headers as a {type(headers).__name__}: return a dict of names and texts")
        for name, value in headers.items():
            if not isinstance(name, str):
                raise ConfigError(f"{self.name} gave a header whose name is a {type(name).__name__}: return names as texts")
            if not isinstance(value, str):
                raise ConfigError(f"{self.name} gave headers[{name!r}] as a {type(value).__name__}: return a text")

    def _seconds(self, end: object) -> float:
        """Return the time that an end of credentials stands for: seconds, a datetime or its text; infinity for None."""
        if end is None:
            return math.inf
        cure = "give seconds since 1970, a datetime or its ISO text"
        try:
            if isinstance(end, str):
                end = datetime.datetime.fromisoformat(end)
            if isinstance(end, datetime.datetime):
                return (end if end.tzinfo else end.replace(tzinfo=datetime.UTC)).timestamp()
            if isinstance(end, int | float) and not isinstance(end, bool) and not math.isnan(end):
                if end < _END_OF_DATES or end == math.inf:
                    return float(end)
                cure = "give seconds (divide milliseconds by 1000), and leave it out where there is no end"
        except (ValueError, OverflowError):
            pass
        raise ConfigError(f"{self.name} gave expires_at={end!r}, which is no time: {cure}")


def credential_source(name: object, search_path: Sequence[str]) -> CredentialSource | None:
    """Return the source that `storage_options['credentials']` names; None where it is left out.

    Args:
        name: `module:function`, imported when it is first asked.
        search_path: Where the reading process looks for modules; looked at behind our own path.
    """
    if name is None:
        return None
    text = str(name)

    def ask() -> object:
        return load_function("storage_options['credentials']", text, search_path)()

    return CredentialSource(text, ask)


class RenewedStorage:
    """A backend with credentials that are renewed: made anew of each, asked again after a refusal that others may mend.

    Args:
        source: Gives credentials.
        backend: Returns the backend with some of them.
    """

    def __init__(self, source: CredentialSource, backend: Callable[[Granted], Storage]) -> None:
        self._source = source
        self._backend = backend

    def head(self, url: str) -> ObjectInfo:
        """Return size and etag of one object."""
        return self._answer(lambda storage: storage.head(url)).result

    def get(self, url: str, *, start: int = 0, stop: int | None = None, etag: str | None = None) -> ObjectStream:
        """Open the object, whole or a range."""
        return _RenewedStream(self._source, self._answer(lambda storage: storage.get(url, start=start, stop=stop, etag=etag)))

    def get_range(self, url: str, start: int, stop: int, *, etag: str | None = None) -> RangeBytes:
        """Return exactly the bytes `[start, stop)`."""
        return self._answer(lambda storage: storage.get_range(url, start, stop, etag=etag)).result

    def put(self, url: str, path: Path) -> None:
        """Store a local file as an object."""
        self._answer(lambda storage: writer_of(storage, url).put(url, path))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield every object below `prefix`; a refusal in the middle can pass, so that the listing goes on."""
        granted = self._source.current()
        try:
            yield from self._backend(granted).list(prefix, after=after)
        except AccessDeniedError as error:
            if _is_renewed(error, self._source, granted):
                raise TransientStorageError(f"{error} (they were renewed)", **error.context) from error
            raise

    def _answer(self, ask: Callable[[Storage], Result]) -> _GrantedAnswer[Result]:
        num_refused = num_renewed = 0
        while True:
            granted = self._source.current()
            try:
                return _GrantedAnswer(result=ask(self._backend(granted)), granted=granted, num_refused=num_refused)
            except AccessDeniedError as error:
                num_refused += 1
                if self._source.has_newer(granted):  # another request has renewed them, which ends by itself
                    continue
                if num_renewed >= _num_renewals(error, self._source, granted) or self._source.after_refusal(granted) is None:
                    raise
                num_renewed += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _GrantedAnswer(Generic[Result]):
    """An answer, with what it took."""

    result: Result
    granted: Granted
    num_refused: int


class _RenewedStream:
    """An open answer; a refusal while it is read, as fsspec meets it at a later block, is one that can pass."""

    def __init__(self, source: CredentialSource, answer: _GrantedAnswer[ObjectStream]) -> None:
        self._source, self._answer = source, answer
        self.info, self.start = answer.result.info, answer.result.start

    @property
    def num_extra_requests(self) -> int:
        """Requests beside the one that opened it."""
        return self._answer.result.num_extra_requests + self._answer.num_refused

    def chunks(self) -> Iterator[memoryview]:
        """Yield the object's bytes in order."""
        try:
            yield from self._answer.result.chunks()
        except AccessDeniedError as error:
            if _is_renewed(error, self._source, self._answer.granted):
                raise TransientStorageError(f"{error} (they were renewed)", **error.context) from error
            raise

    def close(self) -> None:
        """Give the connection back."""
        self._answer.result.close()


def _num_renewals(error: StorageError, source: CredentialSource, granted: Granted) -> int:
    """Return how many times other credentials are worth a try after a refusal: none where these are good, and lack a right."""
    status, code = error.context.get("status"), error.context.get("code")
    if status == 401 or code in BAD_CREDENTIALS:
        return _MOST_RENEWALS
    return 1 if status == 403 and source.may_have_ended(granted) else 0


def _is_renewed(error: AccessDeniedError, source: CredentialSource, granted: Granted) -> bool:
    """Return whether there are other credentials now after a refusal in the middle of an answer."""
    return _num_renewals(error, source, granted) > 0 and source.after_refusal(granted) is not None
