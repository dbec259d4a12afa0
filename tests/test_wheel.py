"""The built wheel, installed where nothing else of sqlstream is, opens a cache."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import sqlstream

ROOT = Path(__file__).resolve().parents[1]
USE_A_CACHE = """
import sys, sqlstream, sqlstream.cache.ledger.schema
from sqlstream.cache import Cache
from sqlstream.testing.servers import FaultyHttpServer
with FaultyHttpServer({"/a.txt": b"whole"}) as server, Cache(sys.argv[1], limit="1mb") as cache:
    with cache.pinned(server.url + "/a.txt") as path:
        assert path.read_bytes() == b"whole"
    assert cache.statistics().limit_bytes == 1 << 20
print(sqlstream.__file__)
print(sqlstream.cache.ledger.schema.migrations_directory())
"""


def run(*command: str | Path) -> str:
    """Run a command outside the checkout and without its PYTHONPATH; return its output."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    result = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_the_package_its_types_its_licence_and_every_migration(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "sqlstream").rglob("*.py")}
    migrations = {f"sqlstream/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "migrations").rglob("*.py")}
    assert len(migrations) > 1
    assert names >= package | migrations | {"sqlstream/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests/", "migrations/"))]


def test_wheel_in_an_empty_venv_opens_a_cache_and_its_command_runs(wheel: Path, tmp_path: Path) -> None:
    """The venv's dependencies come from this environment, through a .pth file.

    A path in a .pth file is put on sys.path, but .pth files within it are not read: so the editable install of this
    checkout stays out, and what is imported as sqlstream can only be the wheel's. Installing torch anew would take minutes.
    """
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    package, migrations = run(python, "-c", USE_A_CACHE, tmp_path / "cache").splitlines()
    assert Path(package) == site_packages / "sqlstream" / "__init__.py"
    assert Path(migrations) == site_packages / "sqlstream" / "migrations"

    stats = run(tmp_path / "venv" / "bin" / "sqlstream", "cache", "stats", tmp_path / "cache")
    assert "1.0 MB" in stats


def test_import_notices_the_files_of_the_other_package_of_this_name(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "sqlstream", tmp_path / "sqlstream", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "sqlstream" / "core").mkdir()
    (tmp_path / "sqlstream" / "core" / "query.py").touch()  # as sqlstream 0.6.3 lays it
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import sqlstream"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "pip uninstall sqlstream sqlstream-data; pip install sqlstream-data" in done.stderr


def test_every_text_names_the_distribution_that_is_ours() -> None:
    pages = [
        *ROOT.glob("*.md"),
        *(path for folder in ("docs", "sqlstream") for kind in ("md", "py") for path in (ROOT / folder).rglob(f"*.{kind}")),
    ]
    wrong = {
        path.name for path in pages if re.search(r"pip install (-U )?'?sqlstream(?!-data)\b|\bsqlstream\[", path.read_text())
    }
    assert wrong == set()


def test_tab_completion_shows_the_public_names() -> None:
    assert dir(sqlstream) == sorted(sqlstream.__all__)


def test_another_system_is_refused_with_what_helps() -> None:
    program = "import sys; sys.platform = 'darwin'; import sqlstream"
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert re.search(r"ImportError: sqlstream needs Linux.*this is darwin: use .* WSL2", ran.stderr), ran.stderr
