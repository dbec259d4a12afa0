"""Commands whose output is an object: how they run, how each failure reads, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.errors import AccessDeniedError, ConfigError, FetchCancelledError, StorageError
from sqlstream.storage.backends.command import MAX_COMMANDS, words_of
from sqlstream.storage.base.access import ALLOWED_COMMAND, OWN_ROWS, Origin, Rules
from sqlstream.storage.fetcher import Fetcher
from tests.storage.downloads import Downloads, granted

ALLOWED = granted(1 << 40)._replace(access=ALLOWED_COMMAND)


def printed(command: str, folder: Path, **options: object) -> bytes:
    """What a command prints, downloaded by a helper that ends."""
    fetcher = Fetcher(StorageOptions(storage_options=options))
    try:
        info = fetcher.download(f"pipe:{command}", folder / "printed", access=ALLOWED_COMMAND)
        assert info.size_bytes == (folder / "printed").stat().st_size
        return (folder / "printed").read_bytes()
    finally:
        fetcher.stop()


def error_of(command: str, folder: Path, **options: object) -> str:
    with pytest.raises(StorageError) as caught:
        printed(command, folder, **options)
    assert not (folder / "printed").exists(), "a failed download leaves no file"
    return str(caught.value)


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that is dead and not reaped by init does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(*pids: int) -> None:
    pause = threading.Event()
    for _ in range(30_000):
        if not any(map(is_alive, pids)):
            return
        pause.wait(0.01)
    raise AssertionError(f"of {pids} some live on")


def wait_for_pids(path: Path, number: int) -> list[int]:
    """The process ids that a command has written into a file, each with a line end."""
    pause = threading.Event()
    for _ in range(30_000):
        if path.exists() and (text := path.read_text()).count("\n") == number:
            return list(map(int, text.split()))
        pause.wait(0.01)
    raise AssertionError(f"{path} was not written")


@pytest.fixture
def sleeping(tmp_path: Path) -> Iterator[str]:
    """A command of a shell and of two programs that it starts, all of which print nothing and wait."""
    note = f">> {tmp_path}/pids"
    yield f"echo $$ {note}; sleep 1000 & echo $! {note}; sleep 1000 | cat & echo $! {note}; wait"
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        assert not is_alive(pid)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("zstd -dcq a.tar.zst", ["zstd", "-dcq", "a.tar.zst"]),
        ("aws s3 cp --no-sign-request 's3://b/a b.tar' -", ["aws", "s3", "cp", "--no-sign-request", "s3://b/a b.tar", "-"]),
        ("curl -s 'https://host/x.tar?a=1&b=2'", ["curl", "-s", "https://host/x.tar?a=1&b=2"]),
        ('cat "it\'s here.tar"', ["cat", "it's here.tar"]),
        ("cat x.tar | head", None),
        ("cat x.tar > y", None),
        ("cat $HOME/x.tar", None),
        ('cat "$HOME/x.tar"', None),
        ("cat *.tar", None),
        ("cat ~/x.tar", None),
        ("cat a\\ b.tar", None),
        ("LANG=C cat x.tar", None),
        ("cat x.tar; cat y.tar", None),
        ("""cat "a'b" | tee "d'e" """, None),
        ("(cat x.tar)", None),
        ("cat 'x.tar", None),
        ("cat x.tar\ncat y.tar", None),
        ("cat `ls`", None),
    ],
)
def test_a_command_is_run_without_a_shell_where_its_words_parse_as_one(command: str, words: list[str] | None) -> None:
    assert words_of(command) == words


def test_a_program_is_the_one_of_its_words_and_a_pipeline_is_run_by_the_shell(tmp_path: Path) -> None:
    show = tmp_path / "show"
    show.write_text(
        f"#!{sys.executable}\nimport os, sys\nprint(open(f'/proc/{{os.getppid()}}/comm').read().strip(), sys.argv[1:])\n"
    )
    show.chmod(0o755)
    parent, _, arguments = printed(f"{show} 'a  b' c", tmp_path).decode().strip().partition(" ")
    assert arguments == "['a  b', 'c']"
    assert parent != "sh"
    assert printed(f"{show} 'a  b' | cat", tmp_path).startswith(b"sh "), "a shell starts it"
    (tmp_path / "x").write_bytes(bytes(range(256)) * 10_000)
    assert printed(f"cat {tmp_path}/x | head -c 1000000", tmp_path) == (tmp_path / "x").read_bytes()[:1_000_000]


def test_a_command_that_fails_is_an_error_with_its_text_its_status_and_the_end_of_what_it_said(tmp_path: Path) -> None:
    message = error_of("printf part; printf '%5000d' 7 >&2; echo the reason >&2; exit 3", tmp_path)
    assert "pipe:printf part" in message
    assert "the command ended with status 3; it said: " in message
    assert message.endswith("the reason")
    assert len(message) < 3000, "the end of a long text"


def test_a_command_that_is_killed_is_an_error_with_the_signal(tmp_path: Path) -> None:
    assert "the command was killed by SIGKILL; it said: nothing" in error_of("printf part; kill -KILL $$", tmp_path)


def test_a_command_that_prints_nothing_is_an_error(tmp_path: Path) -> None:
    message = error_of("cat no-such-file.tar | head", tmp_path)
    assert "the command printed nothing; it said: " in message, "a shell has the status of the last program"
    assert "no-such-file.tar" in message.partition("it said")[2]
    assert "the command printed nothing; it said: nothing" in error_of("true", tmp_path)


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    for command in ("no-such-program x.tar", f"{tmp_path}/no-such-program", "echo x | no-such-program"):
        assert "no-such-program: not found" in error_of(command, tmp_path).partition("ended with status 127; it said: ")[2]
    (tmp_path / "no-program").write_text("#!/no/such/interpreter")
    (tmp_path / "no-program").chmod(0o755)
    assert "the command cannot be run: No such file" in error_of(f"{tmp_path}/no-program", tmp_path)


def test_a_silent_command_is_ended_with_all_that_it_started(tmp_path: Path, sleeping: str) -> None:
    message = error_of(f"echo first; {sleeping}", tmp_path, read_timeout=1.0)
    assert "the command printed nothing for " in message
    assert "storage_options['read_timeout']" in message


def test_a_command_that_drips_is_ended_after_its_whole_time(tmp_path: Path) -> None:
    message = error_of(f"echo $$ > {tmp_path}/pid; while :; do echo x; sleep 0.05; done", tmp_path, timeout=1.0)
    assert "the command took longer than " in message
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_a_command_that_has_closed_its_output_may_still_fail(tmp_path: Path) -> None:
    assert "ended with status 5" in error_of("echo all; exec >&-; sleep 0.7; exit 5", tmp_path)


def test_secrets_are_in_no_error(tmp_path: Path) -> None:
    said = "no rights on https://me:hidden2@host/x?sig=hidden3"
    options = "-H 'X-Key: hidden4' --password hidden5 -u me:hidden6 https://me:hidden7@host/y"
    command = f"AWS_SECRET_ACCESS_KEY=hidden1 sh -c 'echo {said} >&2; exit 1' {options}"
    message = error_of(command, tmp_path)
    assert "status 1" in message
    assert "hidden" not in message


def test_what_ran_is_not_left_as_a_zombie(fetcher: Fetcher, tmp_path: Path) -> None:
    for command in ("echo all | cat", "exit 3", "no-such-program"):
        with contextlib.suppress(StorageError):
            fetcher.download(f"pipe:{command}", tmp_path / "x", access=ALLOWED_COMMAND)
    helper = fetcher.helper_pid
    children = [path.read_text().split() for path in Path(f"/proc/{helper}/task").glob("*/children")]
    assert [pid for pids in children for pid in pids] == []


@pytest.mark.parametrize("end", ["kill", "stop"])
def test_what_runs_ends_with_the_helper(end: str, tmp_path: Path, sleeping: str) -> None:
    fetcher = Fetcher(StorageOptions())
    downloads = Downloads(fetcher, tmp_path)
    downloads.submit(f"pipe:{sleeping}", like=ALLOWED)
    pids = wait_for_pids(tmp_path / "pids", 3)
    if end == "kill":
        helper = fetcher.helper_pid
        assert helper is not None
        os.kill(helper, signal.SIGKILL)
        (tmp_path / "pids").rename(tmp_path / "first")
        pids += wait_for_pids(tmp_path / "pids", 3)  # what was open is asked again of the next helper
        wait_until_gone(*pids[:3])
    fetcher.stop()
    (done,) = downloads.wait_done()
    assert isinstance(done.error, FetchCancelledError)
    wait_until_gone(*pids)


def test_a_download_that_is_cancelled_ends_its_command_and_the_helper_goes_on(
    fetcher: Fetcher, tmp_path: Path, sleeping: str
) -> None:
    downloads = Downloads(fetcher, tmp_path)
    downloads.submit(f"pipe:{sleeping}", like=ALLOWED)
    pids = wait_for_pids(tmp_path / "pids", 3)
    helper = fetcher.helper_pid
    fetcher.cancel(["0"])
    wait_until_gone(*pids)
    downloads.submit("pipe:echo next", like=ALLOWED)
    assert downloads.wait_done("1")[0].error is None
    assert fetcher.helper_pid == helper


def test_more_commands_than_run_at_a_time_all_come(tmp_path: Path) -> None:
    fetcher = Fetcher(StorageOptions(num_threads=2 * MAX_COMMANDS))
    try:
        downloads = Downloads(fetcher, tmp_path)
        downloads.submit(*(f"pipe:echo {number}" for number in range(3 * MAX_COMMANDS)), like=ALLOWED)
        assert [done.error for done in downloads.wait_done()] == [None] * (3 * MAX_COMMANDS)
        assert downloads.read("40") == b"40\n"
    finally:
        fetcher.stop()


def test_output_waits_for_room_as_any_download_of_unknown_length(fetcher: Fetcher, tmp_path: Path) -> None:
    downloads = Downloads(fetcher, tmp_path)
    downloads.submit("pipe:head -c 3000000 /dev/zero", like=ALLOWED._replace(granted_bytes=1 << 20))
    (grant,) = downloads.wait_grants(1)
    assert grant.size_bytes is None
    assert os.stat(tmp_path / "0").st_size <= 1 << 20, "no byte is written past the grant"
    fetcher.grant("0", 1 << 30)
    (done,) = downloads.wait_done()
    assert (done.error, done.size_bytes, done.downloaded_bytes) == (None, 3_000_000, 3_000_000)


def test_the_version_of_an_output_is_its_content(fetcher: Fetcher, tmp_path: Path) -> None:
    first = fetcher.download("pipe:echo one", tmp_path / "a", access=ALLOWED_COMMAND)
    assert fetcher.download("pipe:printf 'one\\n'", tmp_path / "b", access=ALLOWED_COMMAND).version == first.version
    downloads = Downloads(fetcher, tmp_path)
    downloads.submit("pipe:echo two", like=ALLOWED._replace(expected_etag=first.version))
    (done,) = downloads.wait_done()
    assert "it changed since it was indexed" in str(done.error)


def test_nothing_runs_without_leave(fetcher: Fetcher, tmp_path: Path) -> None:
    command = f"pipe:touch {tmp_path}/ran"
    with pytest.raises(AccessDeniedError, match="allow_pipes"):
        fetcher.download(command, tmp_path / "x")
    with pytest.raises(AccessDeniedError, match="allow_pipes"):
        fetcher.get_ranges(command, [(0, 1)])
    assert not (tmp_path / "ran").exists()


def test_a_command_has_no_parts_and_lists_nothing(fetcher: Fetcher) -> None:
    with pytest.raises(StorageError, match="prints a whole object"):
        fetcher.get_ranges("pipe:echo x", [(0, 1)], access=ALLOWED_COMMAND)
    with pytest.raises((ConfigError, AccessDeniedError)):
        list(fetcher.list("pipe:echo x/"))


@pytest.mark.parametrize("origin", [OWN_ROWS, Origin(is_foreign=True), Origin(is_foreign=True, is_private=True)])
def test_no_row_may_name_a_command_whatever_is_allowed(origin: Origin) -> None:
    rules = Rules(allowed_roots=("pipe:", "/", "pipe://"), credential_hosts=("*",), providers=frozenset(("pipe",)))
    with pytest.raises(AccessDeniedError, match=r"pipe:cat x is a command, named by rows\.csv"):
        rules.judge("pipe:cat x", origin, named_by="rows.csv")


def test_the_shell_that_guards_commands_is_there() -> None:
    assert shutil.which("sh", path="/bin")
