"""A real PostgreSQL for a test module: its own cluster in a temporary directory, on 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sqlstream.testing.ports import free_port


def find_binaries() -> Path | None:
    """Return the directory of initdb and postgres; Debian keeps them off the PATH."""
    if (found := shutil.which("initdb")) is not None:
        return Path(found).parent
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return versions[-1].parent if versions else None


@contextlib.contextmanager
def running(binaries: Path) -> Iterator[str]:
    """Yield the URL of a database; user and password are `me` and `geheim`."""
    user = _unprivileged()
    root = Path(tempfile.mkdtemp(prefix="sqlstream-postgres-"))
    try:
        (root / "password").write_text("geheim")
        if user is not None:
            for path in (root, root / "password"):
                shutil.chown(path, user)
        data, port = root / "data", free_port()

        def call(program: str, *arguments: str) -> None:
            command = [str(binaries / program), "-D", str(data), *arguments]
            subprocess.run(
                command,
                user=user,
                check=True,
                capture_output=True,
                cwd=root,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8"},
            )

        call("initdb", "-U", "me", f"--pwfile={root / 'password'}", "--auth=scram-sha-256", "--no-sync", "-E", "UTF8")
        settings = f"-F -c listen_addresses=127.0.0.1 -c port={port} -c unix_socket_directories= -c max_connections=10"
        call("pg_ctl", "-w", "-l", str(root / "log"), "-o", settings, "start")
        try:
            yield f"postgresql://me:geheim@127.0.0.1:{port}/postgres"
        finally:
            call("pg_ctl", "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(root)


def _unprivileged() -> str | None:
    """Return whom to run it as: PostgreSQL refuses root."""
    if os.geteuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return "postgres" if "postgres" in names else "nobody"
