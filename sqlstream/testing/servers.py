"""Servers on 127.0.0.1 for tests, the demo and bug reports: an S3 that behaves, and an HTTP server that misbehaves on cue.

Both count requests exactly, so that a test can say "requested once" instead of measuring time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from sqlstream.errors import MissingDependencyError
from sqlstream.testing.faulty import Fault, FaultyAnswer, FaultyHttpServer, Request

__all__ = ["Fault", "FaultyAnswer", "FaultyHttpServer", "LocalS3", "Request"]

_COUNTS_PATH = "/_sqlstream/requests"
_PUT_MANY_PATH = "/_sqlstream/put_many"


class LocalS3:
    """An S3-compatible server (moto) in a process of its own, on a free port of 127.0.0.1.

    Example:
        with LocalS3() as s3:
            url = s3.put("bucket/a/photo.jpg", data)
            dataset = StreamingDataset(..., storage_options=s3.storage_options)
            assert s3.num_gets(url) == 1
    """

    def __init__(self) -> None:
        self.endpoint_url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._client: Any = None
        self._buckets: set[str] = set()

    @property
    def storage_options(self) -> dict[str, str]:
        """`storage_options` for a dataset that reads from here; moto takes any key."""
        return {"key": "testing", "secret": "testing", "endpoint_url": self.endpoint_url}

    def __enter__(self) -> Self:
        """Start the server and wait until it answers.

        Raises:
            MissingDependencyError: moto is not installed.
        """
        try:
            import boto3
            import moto.server  # noqa: F401
        except ImportError as error:
            raise MissingDependencyError("LocalS3 needs moto: pip install 'sqlstream-data[demo]'") from error
        command = [sys.executable, "-m", "sqlstream.testing.servers"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.stop()
            raise RuntimeError("the local S3 server did not start: its error is above")
        self.endpoint_url = f"http://127.0.0.1:{int(line)}"
        self._client = boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id="testing",
            aws_secret_access_key="testing",  # noqa: S106 - moto takes any
            region_name="us-east-1",
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Stop the server; its objects are gone."""
        self.stop()

    def stop(self) -> None:
        """End the server process and wait for it."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def put(self, path: str, data: bytes) -> str:
        """Store `data` at `"bucket/key"`, making the bucket (at least 3 characters) if needed; return its `s3://` URL."""
        bucket, _, key = path.partition("/")
        if bucket not in self._buckets:
            self._client.create_bucket(Bucket=bucket)
            self._buckets.add(bucket)
        self._client.put_object(Bucket=bucket, Key=key, Body=data)
        return f"s3://{path}"

    def put_many(self, prefix: str, names: Iterable[str]) -> list[str]:
        """Store empty objects below `"bucket/prefix/"`, inside the server: a thousandth of the time of as many PUTs."""
        names = list(names)
        self.put(f"{prefix}{names[0]}", b"")
        body = json.dumps([f"{prefix}{name}" for name in names]).encode()
        with urllib.request.urlopen(self.endpoint_url + _PUT_MANY_PATH, data=body):  # noqa: S310 - our own server
            return [f"s3://{prefix}{name}" for name in names]

    def delete(self, url: str) -> None:
        """Remove the object at an `s3://` URL."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        self._client.delete_object(Bucket=bucket, Key=key)

    def requests(self) -> list[Request]:
        """Return every request so far, in the order of arrival."""
        with urllib.request.urlopen(self.endpoint_url + _COUNTS_PATH) as answer:  # noqa: S310 - our own server
            return [Request(**record) for record in json.load(answer)]

    def num_gets(self, url: str) -> int:
        """Return how often the object at an `s3://` URL was asked for with GET."""
        path = "/" + url.removeprefix("s3://")
        return sum(1 for request in self.requests() if (request.method, request.path) == ("GET", path))

    def gets_by_url(self) -> dict[str, int]:
        """Return the number of GETs of every object that was asked for, by its `s3://` URL."""
        counts: dict[str, int] = {}
        for request in self.requests():
            if request.method == "GET" and request.path.count("/") > 1:
                url = "s3:/" + request.path
                counts[url] = counts.get(url, 0) + 1
        return counts


def serve_moto() -> None:
    """Serve moto's S3 on a free port until standard input ends; print the port. The program of `LocalS3`."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from moto.s3.models import s3_backends
    from werkzeug.serving import WSGIRequestHandler, make_server

    application = DomainDispatcherApplication(create_backend_app)
    seen: list[dict[str, str | None]] = []  # list.append is atomic

    def counting(environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"].encode("latin-1").decode("utf-8", "replace")
        if path == _COUNTS_PATH:
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps(seen).encode()]
        if path == _PUT_MANY_PATH:
            for url in json.loads(environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))):
                bucket, _, key = url.partition("/")
                s3_backends["123456789012"]["aws"].put_object(bucket, key, b"")
            start_response("200 OK", [("Content-Length", "0")])
            return [b""]
        seen.append({"method": environ["REQUEST_METHOD"], "path": path, "range": environ.get("HTTP_RANGE")})
        return application(environ, start_response)

    class QuietHandler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002 - the base class names it so
            """Stay quiet."""

    server = make_server("127.0.0.1", 0, counting, threaded=True, request_handler=QuietHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    sys.stdin.read()  # ends with our owner, whatever it died of


if __name__ == "__main__":
    serve_moto()
