"""The command line as a whole: its words, its exit codes, its page in the documentation."""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sqlstream.cache import Cache
from sqlstream.cli.main import build_parser, main
from tests.cli.commands import run, run_python
from tests.index.sources import write_csv
from tests.processes import ROOT

PAGE = (ROOT / "docs" / "cli.md").read_text()


def commands(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Each command that does something, e.g. `cache stats`."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield " ".join(words), parser
    for group in groups:
        for word, subparser in group.choices.items():
            yield from commands(subparser, (*words, word))


COMMANDS = dict(commands(build_parser()))


def documented_options(section: str) -> set[str]:
    """Each option and argument that stands first in a row of a table of the page."""
    return set(re.findall(r"^\| `(--[a-z-]+|[A-Z]+)", section, flags=re.MULTILINE))


def test_the_page_has_a_section_for_each_command_and_no_other() -> None:
    assert set(re.findall(r"^## `sqlstream ([a-z]+(?: [a-z]+)*)", PAGE, flags=re.MULTILINE)) == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_of_a_command_stands_on_the_page_and_no_other(name: str) -> None:
    section = re.split(r"^## ", PAGE.split(f"## `sqlstream {name}", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    actions = [action for action in COMMANDS[name]._actions if not isinstance(action, argparse._HelpAction)]
    own = {action.option_strings[0] if action.option_strings else str(action.metavar) for action in actions}
    everywhere = {"--json", "--traceback"}
    assert own >= everywhere
    assert documented_options(section) == own - everywhere
    assert everywhere <= documented_options(PAGE.split("\n## `sqlstream ", 1)[0])


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_has_a_help_text(name: str) -> None:
    assert [action.dest for action in COMMANDS[name]._actions if not action.help] == []


def test_an_unknown_option_is_named_beside_the_options_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["cache", "clear", "somewhere", "--older", "7d", "--wher", "x"])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "usage: sqlstream cache clear" in error
    assert "--older-than AGE" in error
    assert "sqlstream cache clear: error: unrecognized arguments: --wher x" in error


def test_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"sqlstream {importlib.metadata.version('sqlstream-data')}\n"


@pytest.mark.parametrize(
    "words", [[], ["cache"], ["cache", "stats"], ["cache", "stats", "a", "b"], ["nothing"], ["demo", "--samples", "x"]]
)
def test_wrong_use_exits_with_2_and_says_how(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert "usage: sqlstream" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        *(["index", command, ""] for command in ("info", "query", "explain", "export", "push")),
        *(["shards", command, ""] for command in ("info", "verify", "index")),
        ["index", "measure", "", "cache"],
        ["demo", "--dir", ""],
    ],
    ids=" ".join,
)
def test_an_empty_path_is_neither_the_root_nor_the_working_directory(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        main(words)
    assert exit_info.value.code == 2
    assert "it is empty: give a path" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_error_is_one_line_and_has_its_traceback_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "no\ncache"
    plain = run("cache", "stats", path)
    assert plain.returncode == 2
    assert len(plain.stderr.splitlines()) == 1
    detailed = run("cache", "stats", path, "--traceback")
    assert detailed.returncode == 2
    assert detailed.stderr.startswith("Traceback (most recent call last)")
    assert detailed.stderr.splitlines()[-1] == plain.stderr.splitlines()[-1]


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_help_is_printed_on_terminals_of_any_encoding(encoding: str) -> None:
    script = (
        f"import sys\nfrom sqlstream.cli.main import main\n"
        f"sys.stdout.reconfigure(encoding={encoding!r}, errors='strict')\nmain(['index', 'build', '--help'])"
    )
    result = run_python("-c", script)
    assert (result.returncode, result.stderr) == (0, "")
    assert "SELECT \\u2026 FROM dataframe" in result.stdout


@pytest.mark.parametrize(("words", "code"), [
    ('cache stats "$1" >&-', 0), ('cache stats "$1" --json >&-', 0), ('cache stats "$1/none" --json 2>&-', 2),
])  # fmt: skip
def test_a_stream_that_is_closed_is_no_error_and_no_other_stream(words: str, code: int, tmp_path: Path) -> None:
    with Cache(tmp_path):
        pass
    result = sh(f'"$0" -m sqlstream {words}', tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


def sh(words: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell, in which $0 is Python."""
    shell = "import subprocess, sys; sys.exit(subprocess.run(['sh', '-c', *sys.argv[1:]]).returncode)"
    return run_python("-c", shell, words, sys.executable, *map(str, arguments))


@pytest.mark.parametrize("buffering", ["PYTHONUNBUFFERED=", "PYTHONUNBUFFERED=1"])
@pytest.mark.parametrize("words", ['cache stats "$1"', 'cache stats "$1" --json', 'cache failures "$1"', "doctor --json"])
def test_an_output_that_takes_no_more_is_an_error(words: str, buffering: str, tmp_path: Path) -> None:
    with Cache(tmp_path):
        pass
    result = sh(f'{buffering} "$0" -m sqlstream {words} > /dev/full', tmp_path)
    assert result.returncode == 2
    assert re.fullmatch(r"sqlstream: standard output takes no more \(No space left .*\), and is not whole: .*\n", result.stderr)


def test_words_that_the_locale_cannot_have_are_an_error_with_the_cure(tmp_path: Path) -> None:
    table = write_csv(tmp_path / "t.csv", "index,caption\n1,größe\n")
    assert run("index", "build", table, tmp_path / "cache").returncode == 0
    words = 'LC_ALL=C PYTHONCOERCECLOCALE=0 PYTHONUTF8=%s "$0" -m sqlstream index query "$1" "SELECT * FROM dataframe %s"'
    query = "WHERE caption = 'größe'"
    refused = sh(words % (0, query), tmp_path / "cache")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.endswith("are not in ascii, the encoding of the locale: set PYTHONUTF8=1\n")
    assert sh(words % (1, query), tmp_path / "cache").stdout.splitlines()[1].split() == ["0", "1", "größe"]


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom sqlstream.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = run_python("-c", script)
    packages = set(result.stdout.splitlines()[-1].split())
    assert "sqlstream" in packages
    assert not packages & {"torch", "alembic", "sqlalchemy", "numpy", "pyarrow", "fsspec", "obstore", "PIL", "tqdm", "moto"}


def test_a_tilde_is_the_home_directory_in_each_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "t.csv").write_text("index,text\na,b\n")
    for line in (
        "index build ~/t.csv ~/cache",
        "index export ~/cache ~/rows.parquet",
        "index measure ~/t.csv ~/cache --column n --transform builtins:len --out ~/n.parquet",
        "shards write ~/t.csv ~/tars --format tar --cache ~/cache",
        "shards index ~/tars --wids ~/wids.json",
        "shards info ~/tars",
        "shards verify ~/wids.json",
    ):
        assert main(line.split()) == 0, capsys.readouterr().err
    assert {"rows.parquet", "n.parquet", "wids.json"} <= {path.name for path in (tmp_path / "home").iterdir()}
    assert not list((tmp_path / "work").iterdir())
