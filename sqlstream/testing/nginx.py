"""nginx on 127.0.0.1: a fast server of a directory, as S3, GCS (XML API, anonymous) or plain HTTP, for measuring."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from sqlstream.errors import MissingDependencyError
from sqlstream.testing.ports import free_port

_CONFIG = """
daemon off;
{user}
pid {work}/nginx.pid;
error_log stderr crit;
worker_processes 1;
events {{ worker_connections 1024; }}
http {{
    log_format sent '$body_bytes_sent $uri';
    access_log {log};
    sendfile on;
    tcp_nopush off;  # on, it adds 40 ms to a range at an offset that is not a page's
    tcp_nodelay on;
    keepalive_requests 1000000;
    client_body_temp_path {work}/body;
    proxy_temp_path {work}/proxy;
    fastcgi_temp_path {work}/fastcgi;
    uwsgi_temp_path {work}/uwsgi;
    scgi_temp_path {work}/scgi;
    server {{ listen 127.0.0.1:{port} backlog=1024; root {root}; {late} }}
}}
"""


_LATE = """
    location / {{ auth_basic late; auth_basic_user_file /dev/null; auth_delay {milliseconds}ms; error_page 401 = @late; }}
    location @late {{ auth_basic off; }}
"""
"""Delays answers without a module that Debian lacks: every request is refused, late, and what is refused is served."""


def find_nginx() -> str | None:
    """Return the path of the program, None where it is not installed; Debian keeps it off a user's PATH."""
    return shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


class Nginx:
    """Serves the files below a directory; the first directory of a path is the bucket.

    Args:
        root: The directory to serve; readable by all users.
        latency_seconds: How much later each answer begins.
        log: Where a line for each answer goes: its bytes, and its path.
    """

    def __init__(self, root: Path, *, latency_seconds: float = 0.0, log: Path | None = None) -> None:
        self._root = root
        self._late = _LATE.format(milliseconds=round(1000 * latency_seconds)) if latency_seconds else ""
        self._log = f"{log} sent" if log else "off"
        self._process: subprocess.Popen[bytes] | None = None
        self._work: tempfile.TemporaryDirectory[str] | None = None
        self.url = ""

    @property
    def s3_options(self) -> dict[str, object]:
        """`storage_options` for `s3://` URLs."""
        return {"anon": True, "endpoint_url": self.url, "region": "us-east-1"}

    @property
    def gs_options(self) -> dict[str, object]:
        """`storage_options` for `gs://` URLs."""
        return {"token": "anon", "base_url": self.url}

    def __enter__(self) -> Self:
        """Start it and wait until it answers.

        Raises:
            MissingDependencyError: nginx is not installed.
        """
        program = find_nginx()
        if program is None:
            raise MissingDependencyError("Nginx needs the program nginx: scripts/install_servers.sh installs it")
        self._work = tempfile.TemporaryDirectory()
        port = free_port()
        config = Path(self._work.name) / "nginx.conf"
        user = (
            "user root;" if Path(self._work.name).stat().st_uid == 0 else ""
        )  # else it serves as the user `nobody`, which may not read
        config.write_text(
            _CONFIG.format(user=user, work=self._work.name, port=port, root=self._root, late=self._late, log=self._log)
        )
        self._process = subprocess.Popen([program, "-c", str(config), "-p", self._work.name], process_group=0)
        self.url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.stop()
                    raise RuntimeError("nginx did not start: its error is above") from None
                time.sleep(0.01)
            else:
                return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop it."""
        self.stop()

    def stop(self) -> None:
        """End nginx and wait for it."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._process = None
        if self._work is not None:
            self._work.cleanup()
            self._work = None
