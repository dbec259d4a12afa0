"""Functions of the user that serve a scheme: what they give, raise and lead to, and how their objects come into a cache."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import fsspec
import pytest

from sqlstream import StreamingDataset
from sqlstream.cache import Cache
from sqlstream.cache.model.refs import ObjectRef
from sqlstream.config import StorageOptions
from sqlstream.errors import (
    AccessDeniedError,
    CacheFullError,
    ConfigError,
    FetchCancelledError,
    ObjectNotFoundError,
    StorageError,
    TransientStorageError,
)
from sqlstream.storage.backends.provider import ProvidedStorage, Providers
from sqlstream.storage.backends.resolve import Resolver
from sqlstream.storage.base.access import OWN, OWN_ROWS, Access, Onward, Origin, Rules
from sqlstream.storage.base.identity import Identity
from sqlstream.storage.base.protocols import Storage, writer_of
from sqlstream.storage.fetcher import Fetcher
from sqlstream.storage.worker.stalls import StallWatch, Wait
from sqlstream.testing.servers import Fault, FaultyAnswer, FaultyHttpServer
from tests.storage import provided
from tests.storage.downloads import Downloads, granted
from tests.storage.provided import LARGE_BYTES, PLACE, num_noted, wait_noted

URL = "asset://photos/a.jpg?key=hidden"
WHERE = "asset://photos/a.jpg"
NAME = r"providers\['asset'\]='tests\.storage\.provided:answer'"
FOREIGN = Origin(is_foreign=True)
Answers = Callable[[object], Storage]


@pytest.fixture(autouse=True)
def _place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PLACE, str(tmp_path))


def storage(access: Access = OWN, function: str = "answer") -> Storage:
    """What reads a scheme with a function of the tests, in this process."""
    options = StorageOptions(providers={"asset": f"tests.storage.provided:{function}"})
    return Resolver(options, None, Providers(options.providers)).storage(URL, access)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """Sets what the function returns, or raises; gives the storage."""

    def answering(given: object) -> Storage:
        def answer(url: str) -> object:
            assert url == URL
            if isinstance(given, BaseException):
                raise given
            return given

        monkeypatch.setattr(provided, "ANSWER", answer)
        return storage()

    return answering


def read(reader: Storage) -> bytes:
    with contextlib.closing(reader.get(URL)) as stream:
        return b"".join(stream.chunks())


class File(io.BytesIO):
    """A file that fails, or gives something else than bytes, when it is read for the second time."""

    def __init__(self, then: object = b"") -> None:
        super().__init__()
        self.answers = [b"12", then]

    def read(self, size: int | None = -1) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


# -- what a function gives ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (b"123", 3),
        (bytearray(b"123"), 3),
        (memoryview(b"1-2-3")[::2], 3),
        (b"", 0),
        (io.BytesIO(b"123"), None),
        (io.BufferedReader(io.BytesIO(b"123")), None),
    ],
)
def test_bytes_and_files_are_the_object(given: Any, size: int | None, answering: Answers) -> None:
    reader = answering(given)
    with contextlib.closing(reader.get(URL)) as stream:
        assert stream.info.size_bytes == size
        assert b"".join(stream.chunks()) == (b"123" if size != 0 else b"")


@pytest.mark.parametrize("as_text", [str, lambda path: path, lambda path: path.as_uri()])
def test_a_path_or_url_is_read_by_what_reads_it_without_providers(
    as_text: Callable[[Path], object], answering: Answers, tmp_path: Path
) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    reader = answering(as_text(tmp_path / "x"))
    assert read(reader) == b"12345"
    assert reader.head(URL).size_bytes == 5
    assert reader.head(URL).url == URL
    assert reader.get_range(URL, 1, 3).data == b"23"


def test_content_has_a_version_that_is_made_of_all_of_it(answering: Answers) -> None:
    one, same, two = (answering(content).head(URL) for content in (b"12", io.BytesIO(b"12"), b"13"))
    assert one == same
    assert (one.size_bytes, one.etag is None) == (2, False)
    assert one.etag != two.etag


@pytest.mark.parametrize("given", [b"123", io.BytesIO(b"123")])
def test_a_part_of_what_a_function_gives_is_refused(given: Any, answering: Answers) -> None:
    with pytest.raises(StorageError, match=f"^{WHERE}: {NAME} gives whole objects.*lazy.*have it return a URL"):
        answering(given).get_range(URL, 0, 2)
    assert getattr(given, "closed", True)


def test_a_provider_cannot_list() -> None:
    with pytest.raises(ConfigError, match="cannot list objects: name them in a table"):
        next(storage().list("asset://photos/"))


def test_a_provider_cannot_be_written_to() -> None:
    with pytest.raises(ConfigError, match=f"^{WHERE} can only be read: write to an object store"):
        writer_of(storage(), URL)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, "returned a NoneType: return bytes, a file .* FileNotFoundError"),
        ({"url": "x"}, "returned a dict"),
        ("a.jpg", "returned the text 'a.jpg', which is no URL and no absolute path"),
        (io.StringIO("text"), "gave a str: open it in binary mode"),
        (File(None), "gave a NoneType"),
        ("asset://photos/b.jpg", "asset://photos/b.jpg has the scheme of a provider"),
    ],
)
def test_what_is_no_content_and_no_url_is_refused(given: object, said: str, answering: Answers) -> None:
    with pytest.raises(StorageError, match=said) as caught:
        read(answering(given))
    assert caught.match(NAME)
    assert not isinstance(caught.value, TransientStorageError)
    assert caught.value.context["url"] == WHERE


def test_a_coroutine_is_refused_without_a_warning(answering: Answers) -> None:
    async def late() -> bytes:
        return b""

    with pytest.raises(StorageError, match="returned a coroutine"):
        read(answering(late()))


# -- what it raises -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("late"), TransientStorageError),
        (ConnectionResetError("late"), TransientStorageError),
        (OSError("late"), TransientStorageError),
        (TransientStorageError("late", url="x", odd=lambda: 0), TransientStorageError),
        (FileNotFoundError("late"), ObjectNotFoundError),
        (ObjectNotFoundError("late"), ObjectNotFoundError),
        (PermissionError("late"), AccessDeniedError),
        (StorageError("late"), StorageError),
        (ValueError("late"), StorageError),
        (SystemExit("late"), StorageError),
        (KeyboardInterrupt("late"), StorageError),
    ],
)
def test_an_error_is_ours_with_names_of_provider_and_object(
    error: BaseException, kind: type[StorageError], answering: Answers
) -> None:
    for given in (error, File(error)) if isinstance(error, Exception) else (error,):
        with pytest.raises(StorageError, match=f"^{WHERE}: {NAME} raised {type(error).__name__}: late") as caught:
            read(answering(given))
        assert type(caught.value) is kind
        assert caught.value.context == {"url": WHERE}
        pickle.dumps(caught.value)


@pytest.mark.parametrize(
    ("status", "kind"), [(404, ObjectNotFoundError), (403, AccessDeniedError), (503, TransientStorageError)]
)
def test_the_status_of_an_answer_says_what_an_error_is(status: int, kind: type[StorageError]) -> None:
    with FaultyHttpServer({"/a": b"1"}) as server:
        server.script("/a", always=FaultyAnswer(fault=Fault.STATUS, status=status))
        reader = storage(function="web")
        with pytest.raises(kind, match=rf"provided:web'.*{status}") as caught:
            reader.get(f"{server.url.replace('http', 'asset')}/a")
    assert type(caught.value) is kind


def test_an_answer_that_breaks_off_is_tried_again() -> None:
    with FaultyHttpServer({"/a": b"1" * 1000}) as server:
        server.script("/a", always=FaultyAnswer(fault=Fault.TRUNCATE, after_bytes=100))
        stream = storage(function="web").get(f"{server.url.replace('http', 'asset')}/a")
        with contextlib.closing(stream), pytest.raises(TransientStorageError, match="lacks 900 bytes"):
            list(stream.chunks())


def test_secrets_in_what_it_raises_are_not_shown(answering: Answers) -> None:
    with pytest.raises(StorageError) as caught:
        read(answering(ValueError("https://me:hidden@h/x?sig=hidden and password=hidden")))
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize("then", [b"", OSError("broken"), "text"])
def test_a_file_is_closed_in_all_cases(then: object, answering: Answers) -> None:
    file = File(then)
    with contextlib.suppress(StorageError):
        read(answering(file))
    assert file.closed


def test_an_error_beyond_the_url_that_it_returned_names_both(answering: Answers, tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=rf"gone.*\({NAME} returned it for {WHERE}\)") as caught:
        read(answering(tmp_path / "gone"))
    assert caught.value.context["url"] == WHERE


# -- whose word it is -----------------------------------------------------------------------------------------------------


class Followed:
    """Notes what is read for a URL that a provider returned, and reads nothing."""

    def __init__(self) -> None:
        self.read: list[tuple[str, Access]] = []

    @contextlib.contextmanager
    def __call__(self, url: str, access: Access) -> Iterator[Storage]:
        self.read.append((url, access))
        if self.read:
            raise ObjectNotFoundError("nothing is read here")
        yield cast(Storage, None)


def led_to(target: str, rules: Rules, origin: Origin, monkeypatch: pytest.MonkeyPatch) -> tuple[str, Access]:
    """Where a row is led by a function that returns `target`, and with which access."""
    monkeypatch.setattr(provided, "ANSWER", lambda url: target)
    followed, access = Followed(), rules.judge(URL, origin, named_by="s3://bucket/index.parquet").access
    providers = Providers({"asset": "tests.storage.provided:answer"})
    provider = providers.of(URL)
    assert provider is not None
    with pytest.raises(ObjectNotFoundError):
        ProvidedStorage(provider, access, followed, 60).get(URL)
    return followed.read[0]


RULES = Rules(providers=frozenset(["asset"]), places=frozenset(["s3://bucket"]), credential_hosts=("api.example.org",))


@pytest.mark.parametrize(
    ("target", "access"),
    [
        ("s3://bucket/x", Access()),
        ("s3://other/x", Access(is_signed=False)),
        ("https://api.example.org/x", Access(is_judged=True)),
        ("https://h.example.org/x", Access(is_judged=True, is_signed=False)),
    ],
)
def test_where_a_foreign_row_is_led_is_read_as_if_the_row_named_it(
    target: str, access: Access, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert led_to(target, RULES, FOREIGN, monkeypatch) == (target, access)


@pytest.mark.parametrize(
    "target", ["/etc/passwd", "file:///etc/passwd", "http://169.254.169.254/x", "memory://x", "s3://b/../x"]
)
def test_a_foreign_row_is_not_led_to_what_it_may_not_name(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AccessDeniedError, match=f"is named by a provider, for {WHERE}, but .*allowed_roots.*returned it for"):
        led_to(target, RULES, FOREIGN, monkeypatch)


def test_rows_of_the_user_are_led_anywhere_and_credentials_go_where_he_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert led_to("/etc/passwd", RULES, OWN_ROWS, monkeypatch) == ("/etc/passwd", OWN)
    assert led_to("s3://other/x", RULES, OWN_ROWS, monkeypatch) == ("s3://other/x", Access(is_signed=False))
    assert led_to("s3://other/x", Rules(providers=frozenset(["asset"])), OWN_ROWS, monkeypatch) == ("s3://other/x", OWN)


def test_a_foreign_row_may_name_the_scheme_of_a_provider_and_no_other() -> None:
    access = RULES.judge(URL, FOREIGN, named_by="i").access
    assert access.onward == Onward(rules=RULES, origin=FOREIGN)
    assert pickle.loads(pickle.dumps(access)) == access
    for url in ("assets://photos/a.jpg", "asset::file:///etc/passwd", "asset://photos/../a.jpg"):
        with pytest.raises(AccessDeniedError):
            RULES.judge(url, FOREIGN, named_by="i")


# -- which functions and schemes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:get", "no_such_module"),
        ("tests.storage.provided:none", "has no attribute 'none'"),
        ("tests.storage.provided:NO_FUNCTION", "is a int, which cannot be called"),
    ],
)
def test_a_function_that_is_not_there_is_named(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"providers\['asset'\]='{name}'.*{said}"):
        Providers({"asset": name}).check()


def test_the_functions_are_looked_for_when_a_cache_opens(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"__main__:content.*put the function into a module of its own"):
        Cache(tmp_path / "cache", providers={"asset": "__main__:content"})


@pytest.mark.parametrize("name", ["answer", 5, None, provided.answer, "a:b:c"])
def test_what_names_no_function_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"providers\['asset'\]=.* is not 'module:function': give"):
        StorageOptions(providers={"asset": name})


def test_what_is_no_dict_of_schemes_is_refused(tmp_path: Path) -> None:
    for given in ("asset", ["asset"], {5: "a:b"}):
        with pytest.raises(ConfigError, match=r"providers.*give {'asset': 'module:function'}"):
            StreamingDataset([{"index": 1}], tmp_path / "cache", providers=cast(Any, given))


def test_a_scheme_that_is_read_by_other_means_is_refused(tmp_path: Path) -> None:
    for name in [
        *fsspec.available_protocols(),
        "postgresql",
        "postgresql+psycopg",
        "s3a",
        "abfss",
        "ftps",
        "Asset",
        "as:set",
        "",
    ]:
        with pytest.raises(ConfigError, match=r"providers\[.*\].*give another name, such as 'asset'"):
            Cache(tmp_path / "cache", providers={name: "tests.storage.provided:content"})
    assert not (tmp_path / "cache").exists()


# -- which object it is ---------------------------------------------------------------------------------------------------


def key(url: str, function: str = "content", access: Access = OWN, **options: object) -> bytes:
    providers = {"asset": f"tests.storage.provided:{function}"} if function else {}
    return ObjectRef.of(url, identity=Identity(StorageOptions(storage_options=options, providers=providers)), access=access).key


def test_two_functions_of_one_scheme_share_no_entry() -> None:
    assert len({key(URL), key(URL, "other"), key(URL, "")}) == 3
    assert key(URL) == key(URL)
    assert key(URL) != key("asset://photos/a.jpg?key=other")


def test_what_chooses_the_content_of_a_url_that_is_returned_counts() -> None:
    assert key(URL) == key(URL, key="me", secret="s")
    assert len({key(URL), key(URL, endpoint_url="http://h"), key(URL, headers={"Accept": "image/webp"})}) == 3


def test_headers_that_go_to_other_places_make_another_object() -> None:
    there = Access(onward=Onward(rules=Rules(places=frozenset(["https://h:443"])), origin=FOREIGN))
    elsewhere = Access(onward=Onward(rules=Rules(), origin=FOREIGN))
    assert key(URL, access=there) == key(URL, access=elsewhere) == key(URL)
    headers = {"Accept": "image/webp"}
    assert key(URL, access=there, headers=headers) != key(URL, access=elsewhere, headers=headers)


def test_objects_without_a_provider_keep_their_keys() -> None:
    for url in ("s3://b/x", "https://h/x", "hf://datasets/a/b/x", "other://x"):
        assert key(url) == key(url, "")


# -- in a cache -----------------------------------------------------------------------------------------------------------


def test_an_object_is_asked_for_once_and_tried_again(tmp_path: Path) -> None:
    providers = {"asset": "tests.storage.provided:content", "late": "tests.storage.provided:third_time"}
    with Cache(tmp_path / "cache", providers=providers) as cache:
        again = pickle.loads(pickle.dumps(cache))
        assert again.storage_options.providers == providers
        for one in (cache, again):
            with one.pinned("asset://photos/a") as path:
                assert path.read_bytes() == b"content of a"
        with cache.pinned("late://photos/a") as path:
            assert path.read_bytes() == b"at last"
        used = {host.host: (host.requests, host.retries) for host in cache.statistics().hosts}
        again.close()
    assert used == {"asset://": (1, 0), "late://": (3, 2)}
    assert num_noted(tmp_path, "a") == 1


def test_what_is_not_there_is_asked_for_once_and_what_grows_past_the_limit_is_refused(tmp_path: Path) -> None:
    providers = {"asset": "tests.storage.provided:gone", "large": "tests.storage.provided:large"}
    with Cache(tmp_path / "cache", limit=LARGE_BYTES // 2, providers=providers) as cache:
        with pytest.raises(ObjectNotFoundError, match="no such asset"), cache.pinned("asset://x"):
            pass
        with pytest.raises(CacheFullError), cache.pinned("large://x"):
            pass
        wait_noted(tmp_path, "closed", 1)
        statistics = cache.statistics()
        assert (statistics.used_bytes, statistics.filling_bytes) == (0, 0)
        cache.limit_bytes = 2 * LARGE_BYTES
        with cache.pinned("large://x") as path:
            assert path.stat().st_size == LARGE_BYTES
    assert num_noted(tmp_path, "asked") == 1
    assert num_noted(tmp_path, "opened") == num_noted(tmp_path, "closed") == 2


def test_a_download_that_is_cancelled_closes_its_file(tmp_path: Path) -> None:
    fetcher = Fetcher(StorageOptions(providers={"asset": "tests.storage.provided:large"}, num_threads=1))
    try:
        downloads = Downloads(fetcher, tmp_path)
        downloads.submit("asset://x", like=granted(1 << 20))
        downloads.wait_grants(1)
        fetcher.cancel(["0"])
        (done,) = downloads.wait_done()
        assert isinstance(done.error, FetchCancelledError)
        wait_noted(tmp_path, "closed", 1)
        downloads.submit("asset://y")
        assert downloads.wait_done("1")[0].size_bytes == LARGE_BYTES
    finally:
        fetcher.stop()
    assert num_noted(tmp_path, "opened") == 2


def test_a_table_names_objects_of_a_provider(tmp_path: Path) -> None:
    table = "".join(json.dumps({"index": name, "file": f"asset://photos/{name}"}) + "\n" for name in "ab").encode()
    (tmp_path / "own.jsonl").write_bytes(table)
    with FaultyHttpServer({"/foreign.jsonl": table}) as server:
        sources = (tmp_path / "own.jsonl", f"{server.url}/foreign.jsonl", "tables://own.jsonl/own.jsonl", "made://x/t.jsonl")
        for src in sources:
            dataset = StreamingDataset(
                src,
                tmp_path / "cache",
                columns_to_download=["file"],
                on_error="raise",
                providers={
                    "asset": "tests.storage.provided:content",
                    "tables": "tests.storage.provided:beside",
                    "made": "tests.storage.provided:table",
                },
            )
            assert [Path(sample["file"]).read_bytes() for sample in dataset] == [b"content of a", b"content of b"]
            dataset.close()
    assert num_noted(tmp_path, "a") == 1


def test_a_foreign_table_is_not_led_to_a_file_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"mine")
    with FaultyHttpServer({"/foreign.jsonl": b'{"index": 1, "file": "asset://photos/secret"}\n'}) as server:
        dataset = StreamingDataset(
            f"{server.url}/foreign.jsonl",
            tmp_path / "cache",
            columns_to_download=["file"],
            providers={"asset": "tests.storage.provided:beside"},
        )
        with pytest.raises(AccessDeniedError, match="is named by a provider, for asset://photos/secret, but is a local file"):
            dataset[0]
        dataset.close()


def test_a_function_that_hangs_is_said_with_a_cure_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    providers = Providers({"asset": "a:b"})
    StallWatch(10).look([Wait(providers.asked(URL), 12.0), Wait(providers.asked("https://h/x"), 12.0)])
    assert "asset:// has sent nothing for 12 s" in caplog.text
    assert "have it give up after a time" in caplog.records[0].getMessage()
    assert "read_timeout" in caplog.records[1].getMessage()
