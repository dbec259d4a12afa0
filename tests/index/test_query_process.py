"""Limits on time and memory hold whatever a query calls."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from itertools import chain
from pathlib import Path
from typing import ClassVar

import pytest

from sqlstream.errors import QueryError
from sqlstream.index.file.index import Index
from sqlstream.index.file.workplace import workplace
from sqlstream.index.sql.query_process import QueryLimits
from sqlstream.index.sql.sandbox import Sandbox, SharedProcess, run_query
from tests.index.sources import build, write_csv
from tests.processes import answer_of_forked_child

MIB = 1 << 20
ROWS = 300
SLOW = "SELECT sum(instr(wide, substr(wide, 1, 1400000) || 'y')) FROM dataframe"
"""One call of it takes minutes: SQLite compares the second text at each character of the first."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("queries")


@pytest.fixture(scope="module")
def index(place: Path) -> Index:
    return build(place, write_csv(place / "t.csv", "index,n\n" + "".join(f"k{at},{at}\n" for at in range(ROWS))))


@pytest.fixture(scope="module")
def wide(place: Path) -> Index:
    rows = "".join(f"k{at},{'x' * 3 * MIB}\n" for at in range(12))
    return build(place, write_csv(place / "wide.csv", "index,wide\n" + rows))


def is_gone(pid: int) -> bool:
    """Return True once the process is reaped, by us or by init."""
    for _ in range(500):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        with contextlib.suppress(FileNotFoundError), open(f"/proc/{pid}/stat") as file:
            if file.read().rpartition(")")[2].split()[0] == "Z":
                return True
        time.sleep(0.02)
    return False


# -- where a query runs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "is_here"),
    [
        ("SELECT * FROM dataframe WHERE n > 6 AND index LIKE 'k%' OR n IN (1, 2, 3)", True),
        ("SELECT row, (1 + 3 * (n > 6) + hash(index, 1) % 2) AS weight FROM (SELECT * FROM dataframe WHERE n / 2 > 3)", True),
        ("SELECT * FROM dataframe WHERE contains(index, 'k') AND length(lower(index)) = 2", True),
        ("SELECT * FROM dataframe WHERE regexp_matches(index, 'k')", False),
        ("SELECT * FROM dataframe WHERE replace(index, 'k', 'kk') = 'kk1'", False),
        ("SELECT * FROM dataframe WHERE instr(index, 'k')", False),
        ("SELECT * FROM dataframe WHERE trim(index, 'k') = '1'", False),
        ("SELECT * FROM dataframe WHERE hex(index) > '1'", False),
        ("SELECT * FROM dataframe WHERE index || n = 'k11'", False),
        ("SELECT * FROM dataframe ORDER BY n", False),
        ("SELECT count(*) FROM dataframe", False),
        ("SELECT * FROM dataframe a, dataframe b", False),
        ("SELECT * FROM dataframe WHERE n = (SELECT max(n) FROM dataframe)", False),
        ("SELECT sum(n) OVER () FROM dataframe", False),
    ],
)
def test_what_judges_rows_with_bounded_functions_runs_here_and_the_rest_apart(query: str, is_here: bool, index: Index) -> None:
    with contextlib.closing(Sandbox(index, query)) as sandbox:
        sandbox.start()
        assert (sandbox.process_id is None) is is_here


def test_a_query_apart_gives_the_rows_and_errors_that_it_gives_here(index: Index) -> None:
    assert run_query(index, "SELECT * FROM dataframe ORDER BY n DESC LIMIT 2") == (
        ["row", "index", "n"],
        [(299, "k299", 299), (298, "k298", 298)],
    )
    assert run_query(index, "SELECT n AS a, n AS a FROM dataframe WHERE 0 ORDER BY n") == (["a", "a"], [])
    with pytest.raises(QueryError, match=r"concat_ws|date_part says .*'century'.*its columns: row, index, n"):
        run_query(index, "SELECT date_part('century', concat('2024-01-0', n)) FROM dataframe ORDER BY n")
    with pytest.raises(QueryError, match=r"median says"):
        run_query(index, "SELECT median(index) FROM dataframe")


# -- time -------------------------------------------------------------------------------------------------------------


def test_a_call_that_takes_minutes_ends_with_the_budget(wide: Index) -> None:
    with pytest.raises(QueryError, match=r"did not end within 0\.3 seconds"):
        run_query(wide, SLOW, budget_seconds=0.3)


def test_ctrl_c_ends_a_call_that_takes_minutes(wide: Index) -> None:
    sandbox = Sandbox(wide, SLOW)
    sandbox.start()
    assert sandbox.process_id is not None
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), contextlib.closing(sandbox):
        list(sandbox.run(sandbox.statement, 10)[1])
    timer.join()
    assert is_gone(sandbox.process_id)


def test_the_budget_of_duckdb_is_for_the_whole_query(index: Index, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("duckdb")
    query = "SELECT range AS row FROM range(10000000000000)"
    sandbox = Sandbox(index, query, engine="duckdb", scratch=place / "scratch", budget_seconds=0.5)
    with pytest.raises(QueryError, match=r"in DuckDB: it did not end within 0\.5 seconds"), contextlib.closing(sandbox):
        for _ in sandbox.run(query, 8192)[1]:  # each batch is there at once
            pass
    assert sandbox.process_id is not None
    assert is_gone(sandbox.process_id)
    assert not list(place.glob("scratch*"))
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    "query",
    [
        "SELECT length(repeat('x', 4000000000)) AS l FROM dataframe",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n",
        "SELECT list(a.range) FROM range(100000) a, range(100000) b",
        "SELECT levenshtein(repeat('x', 100000), repeat('y', 100000)) AS l",
        "SELECT regexp_replace(repeat('x', 1000000), 'x', repeat('y', 1000000), 'g') FROM dataframe",
    ],
)
def test_no_function_of_duckdb_outlasts_the_budget(query: str, index: Index, place: Path) -> None:
    pytest.importorskip("duckdb")
    sandbox = Sandbox(index, query, engine="duckdb", scratch=place / "scratch", budget_seconds=1)
    with contextlib.closing(sandbox), pytest.raises(QueryError, match=r"did not end within 1 seconds|emory"):
        list(sandbox.run(query, 8192)[1])
    assert sandbox.process_id is not None
    assert is_gone(sandbox.process_id)


def test_nothing_is_left_of_a_query_whose_owner_is_killed(wide: Index, tmp_path: Path) -> None:
    program = f"""
from itertools import chain
from pathlib import Path
from sqlstream.index.sql.sandbox import Sandbox
from sqlstream.index.file.index import Index
sandbox = Sandbox(Index(Path({str(wide.path)!r})), {SLOW!r})
sandbox.start()
print(sandbox.process_id, flush=True)
sandbox.run(sandbox.statement, 1)
"""
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    owner.kill()
    owner.wait()
    owner.stdout.close()
    assert is_gone(pid)


def test_a_query_that_its_owner_forgets_has_no_more_of_the_processor_than_its_time(wide: Index) -> None:
    with contextlib.closing(SharedProcess()) as shared:
        for seconds in (5.0, 9.0):  # the process of the first query runs the second one, too
            sandbox = Sandbox(wide, SLOW, budget_seconds=seconds, shared=shared)
            sandbox.start()
            assert sandbox.process_id is not None
            soft, _ = resource.prlimit(sandbox.process_id, resource.RLIMIT_CPU)
            assert seconds <= soft < seconds + 60
            sandbox.close(is_over=True)


def has_loaded_arrow(sandbox: Sandbox) -> bool:
    return "libarrow" in Path(f"/proc/{sandbox.process_id}/maps").read_text()


def test_arrow_is_loaded_by_a_process_once_a_query_needs_it_and_beside_the_memory_of_the_query(index: Index) -> None:
    limits = QueryLimits(memory_bytes=64 * MIB)  # less than the address space that Arrow takes
    with contextlib.closing(SharedProcess()) as shared:
        seen, processes = [], set()
        for query in (
            "SELECT count(*) FROM dataframe",
            "SELECT count(*) FROM dataframe WHERE regexp_matches(index, '^k1')",
            "SELECT count(*) FROM dataframe WHERE index ILIKE 'K1%'",
        ):
            sandbox = Sandbox(index, query, limits=limits, shared=shared)
            rows = [row for batch in sandbox.run(sandbox.statement, 10)[1] for row in batch]
            processes.add(sandbox.process_id)
            seen.append((rows[0][0], has_loaded_arrow(sandbox)))
            sandbox.close(is_over=True)
    assert len(processes) == 1
    assert seen == [(ROWS, False), (111, True), (111, True)]


# -- memory and disk --------------------------------------------------------------------------------------------------


class LateQuery(str):
    """A query that is sent as its process ends."""

    pids: ClassVar[list[int]] = []

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        while self.pids:
            os.kill(self.pids.pop(), signal.SIGKILL)
        return str, (str(self),)


def test_a_process_that_ends_as_the_next_query_comes_is_replaced(index: Index) -> None:
    text = "SELECT replace(index, 'k', 'b') AS name FROM dataframe"
    with contextlib.closing(SharedProcess()) as shared:
        first = Sandbox(index, text, shared=shared)
        expected = list(chain.from_iterable(first.run(first.statement, 10)[1]))
        assert first.process_id is not None
        LateQuery.pids.append(first.process_id)
        first.close(is_over=True)
        second = Sandbox(index, LateQuery(text), shared=shared)
        assert list(chain.from_iterable(second.run(second.statement, 10)[1])) == expected
        assert not LateQuery.pids


def test_memory_is_bounded_and_the_error_says_how_much(wide: Index) -> None:
    query = "SELECT median(a.wide || b.row) FROM dataframe a, dataframe b"
    sandbox = Sandbox(wide, query, limits=QueryLimits(memory_bytes=64 * MIB))
    with contextlib.closing(sandbox), pytest.raises(QueryError, match="it needs more than 64 MiB of memory"):
        list(sandbox.run(sandbox.statement, 10)[1])


def test_a_process_that_is_aborted_is_an_error_of_its_query(wide: Index) -> None:
    with contextlib.closing(Sandbox(wide, SLOW)) as sandbox:
        sandbox.start()
        assert sandbox.process_id is not None
        os.kill(sandbox.process_id, signal.SIGABRT)
        with pytest.raises(QueryError, match=r"does not run: it needs more than \d+ MiB of memory .*SIGABRT"):
            sandbox.describe()


@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("SELECT a.* FROM dataframe a, dataframe b, dataframe c", "its result is more than 1 MiB"),
        ("SELECT a.n FROM dataframe a, dataframe b, dataframe c ORDER BY hash(b.row, c.row)", "its temporary files"),
    ],
)
def test_a_result_and_temporary_files_are_bounded(query: str, error: str, index: Index) -> None:
    sandbox = Sandbox(index, query, limits=QueryLimits(result_bytes=MIB))
    with contextlib.closing(sandbox), pytest.raises(QueryError, match=error):
        list(sandbox.run(sandbox.statement, 1000)[1])


def test_batches_are_bounded_by_bytes(wide: Index) -> None:
    for query in ("SELECT wide FROM dataframe", "SELECT wide FROM dataframe ORDER BY row"):
        with contextlib.closing(Sandbox(wide, query)) as sandbox:
            sizes = [sum(len(text) for (text,) in batch) for batch in sandbox.run(sandbox.statement, 8192)[1]]
        assert sum(sizes) == 12 * 3 * MIB
        assert max(sizes) <= 24 * MIB


def test_values_that_grow_are_bounded_by_the_table(index: Index) -> None:
    doubled = "'xxxxxxxxxx'"
    for _ in range(18):
        doubled = f"replace({doubled}, 'x', 'xx')"
    with pytest.raises(QueryError, match="has more than 1 MiB"):
        run_query(index, f"SELECT length({doubled}) FROM dataframe")
    half = doubled.replace("replace(", "", 5).rsplit(", 'x', 'xx')", 5)[0]
    with pytest.raises(QueryError, match=r"regexp_replace says 'the result may have \d+ characters, and 16777216 are"):
        run_query(index, f"SELECT regexp_replace({half}, 'x', {half}, 'g') FROM dataframe")
    query = f"SELECT any_value(n), length(regexp_replace({half}, 'x+', 'y', 'g')) FROM dataframe"
    assert run_query(index, query)[1] == [(0, 1)]


def test_what_a_killed_duckdb_left_is_swept(place: Path) -> None:
    with workplace(place, "00ff") as work:
        left = Path(f"{work.temporary('duckdb')}.d")
        left.mkdir()
        (left / "duckdb_temp_storage_0.tmp").write_bytes(b"x")
    assert not left.exists()


# -- forks ------------------------------------------------------------------------------------------------------------


def test_a_child_forked_within_a_query_never_reads_what_has_the_number_of_its_socket(index: Index) -> None:
    """The child's next pipe gets the number of the closed socket: it read that for ever."""
    with contextlib.closing(Sandbox(index, "SELECT n, 'a' || n FROM dataframe")) as sandbox:
        _, batches = sandbox.run(sandbox.statement, 100)
        found = [*next(batches)]

        def go_on() -> str:
            pipes = [os.pipe() for _ in range(4)]
            try:
                next(batches)
            finally:
                sandbox.close()
                [os.fstat(fd) for fd in chain.from_iterable(pipes)]
            return "it gave rows"

        answer = answer_of_forked_child(go_on)
        found += chain.from_iterable(batches)  # it leaves the query to its parent
    assert "this process was forked while it ran, and its parent goes on with it: run it again" in answer
    assert answer.startswith("QueryError")
    assert len(found) == ROWS


def test_a_child_forked_within_a_query_asks_another_one_in_a_process_of_its_own(index: Index) -> None:
    shared = SharedProcess()
    query = "SELECT * FROM dataframe WHERE index || n = 'k11'"
    with contextlib.closing(Sandbox(index, query, shared=shared)) as sandbox:
        _, batches = sandbox.run(sandbox.statement, 100)

        def ask_again() -> str:
            with contextlib.closing(Sandbox(index, query, shared=shared)) as another:
                return str(len([*another.run(another.statement, 100)[1]]))

        assert (answer_of_forked_child(ask_again), len([*batches])) == ("1", 1)


def test_a_child_forked_within_a_build_leaves_its_files_to_the_parent(place: Path) -> None:
    with workplace(place, "built") as ours:

        def leave() -> str:
            ours_too.__exit__(None, None, None)
            return "left"

        temporary = ours.temporary()
        temporary.write_text("half")
        ours_too = workplace(place, "other")
        other = ours_too.__enter__().temporary()
        other.write_text("half")
        assert answer_of_forked_child(leave) == "left"
        assert (temporary.exists(), other.exists(), (place / "other.lock").exists()) == (True, True, True)
        ours_too.__exit__(None, None, None)
    assert not other.exists()
