"""Azurite, Microsoft's emulator of Azure's blobs, and just enough of the signatures of its API to fill it."""

from __future__ import annotations

import base64
import datetime
import hashlib
import hmac
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Mapping
from types import TracebackType
from typing import Self
from urllib.parse import quote, urlencode

from sqlstream.testing.ports import free_port

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # every emulator's
_VERSION = "2021-08-06"


def find_azurite() -> str | None:
    """Return the path of the program, None where it is not installed."""
    return shutil.which("azurite-blob")


def signed(text: str) -> str:
    return base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()


class Azurite:
    """One emulator with its blobs in memory."""

    def __init__(self) -> None:
        self._containers: set[str] = set()
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint_url = ""

    def __enter__(self) -> Self:
        program = find_azurite()
        assert program is not None
        port = free_port()
        command = [
            program,
            "--silent",
            "--inMemoryPersistence",
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "--blobPort",
            str(port),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.endpoint_url = f"http://127.0.0.1:{port}/{ACCOUNT}"
        deadline = time.monotonic() + 300
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
            except OSError:
                assert self._process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def put(self, path: str, data: bytes, *, is_public: bool = False) -> None:
        """Store `data` at `"container/name"`, making the container if needed."""
        container, _, name = path.partition("/")
        if container not in self._containers:
            access = {"x-ms-blob-public-access": "blob"} if is_public else {}
            self._send(container, b"", access, query="restype=container")
            self._containers.add(container)
        self._send(f"{container}/{quote(name)}", data, {"x-ms-blob-type": "BlockBlob"})

    def sas_token(self) -> str:
        """Return a shared access signature that may read and list."""
        expiry = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
        fields = {"sp": "rl", "ss": "b", "srt": "sco", "se": expiry, "spr": "https,http", "sv": _VERSION}
        text = "\n".join([ACCOUNT, "rl", "b", "sco", "", expiry, "", "https,http", _VERSION, "", ""])
        return urlencode({**fields, "sig": signed(text)})

    def _send(self, path: str, data: bytes, headers: Mapping[str, str], query: str = "") -> None:
        date = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        own = {"x-ms-date": date, "x-ms-version": _VERSION, **headers}
        canonical = "".join(f"{name}:{value}\n" for name, value in sorted(own.items()))
        resource = f"/{ACCOUNT}/{ACCOUNT}/{path}" + (f"\n{query.replace('=', ':')}" if query else "")
        text = f"PUT\n\n\n{len(data) or ''}\n\napplication/octet-stream\n\n\n\n\n\n\n{canonical}{resource}"
        own |= {"Authorization": f"SharedKey {ACCOUNT}:{signed(text)}", "Content-Type": "application/octet-stream"}
        request = urllib.request.Request(f"{self.endpoint_url}/{path}?{query}", data=data, headers=own, method="PUT")
        urllib.request.urlopen(request).close()
