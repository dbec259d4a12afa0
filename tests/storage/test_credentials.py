"""Where credentials come from, seen from the server that they are sent to: real requests, signed by the real clients."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.servers import FaultyHttpServer

DATA = b"data" * 100
_S3_KEYS = {"AccessKeyId": "OF-THE-INSTANCE", "SecretAccessKey": "s", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
_ANSWERS = {
    "/latest/meta-data/iam/security-credentials/": b"role",
    "/latest/meta-data/iam/security-credentials/role": json.dumps({**_S3_KEYS, "Code": "Success"}).encode(),
    "/container": json.dumps({**_S3_KEYS, "AccessKeyId": "OF-THE-CONTAINER"}).encode(),
    "/computeMetadata/v1/instance/service-accounts/default/token": json.dumps(
        {"access_token": "of-the-machine", "expires_in": 3600, "token_type": "Bearer"}
    ).encode(),
}


class _Metadata(BaseHTTPRequestHandler):
    """The service that tells a machine of a cloud who it is; it wants a session first, as Amazon's does."""

    def do_PUT(self) -> None:
        self._answer(b"session")

    def do_GET(self) -> None:
        is_asked_rightly = (
            self.headers.get("X-aws-ec2-metadata-token") == "session"
            or self.headers.get("Metadata-Flavor") == "Google"
            or self.path == "/container"
        )
        self._answer(_ANSWERS[self.path.partition("?")[0]] if is_asked_rightly else b"no")

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class names it so
        """Stay quiet."""


@pytest.fixture
def metadata() -> Iterator[str]:
    """`host:port` of a metadata service."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Metadata) as service:
        threading.Thread(target=service.serve_forever, args=(0.05,), daemon=True).start()
        yield f"127.0.0.1:{service.server_address[1]}"
        service.shutdown()


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing of the user's own."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))


def authorization(server: FaultyHttpServer, url: str, tmp_path: Path, **options: object) -> str | None:
    """Read an object; return who the server was told that we are."""
    server.objects["/bucket/x"] = DATA
    fetcher = Fetcher(StorageOptions(storage_options={"endpoint_url": server.url, **options}, num_retries=0))
    try:
        fetcher.download(url, tmp_path / "x")
    finally:
        fetcher.stop()
    assert (tmp_path / "x").read_bytes() == DATA
    return server.requests("/bucket/x")[-1].headers.get("authorization")


@pytest.mark.parametrize("backend", ["obstore", "fsspec"])
class TestS3:
    @pytest.mark.parametrize("way", ["options", "environment", "default profile", "profile", "AWS_PROFILE"])
    def test_keys_are_found_where_the_tools_of_amazon_look(
        self, server: FaultyHttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, way: str
    ) -> None:
        name = {"default profile": "default"}.get(way, "work")
        if "rofile" in way or way == "AWS_PROFILE":
            (tmp_path / "credentials").write_text(f"[{name}]\naws_access_key_id = THE-KEY\naws_secret_access_key = s\n")
        if way == "AWS_PROFILE":
            monkeypatch.setenv("AWS_PROFILE", name)
        if way == "environment":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "THE-KEY")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        options = {"options": {"key": "THE-KEY", "secret": "s"}, "profile": {"profile": name}}.get(way, {})
        said = authorization(server, "s3://bucket/x", tmp_path, backend=backend, region="us-east-1", **options)
        assert said is not None
        assert "Credential=THE-KEY/" in said

    def test_nothing_is_signed_when_told_so(self, server: FaultyHttpServer, tmp_path: Path, backend: str) -> None:
        assert authorization(server, "s3://bucket/x", tmp_path, backend=backend, region="us-east-1", anon=True) is None

    def test_an_instance_reads_with_its_role(
        self, server: FaultyHttpServer, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
    ) -> None:
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{metadata}")  # as botocore is told
        options = {"metadata_endpoint": f"http://{metadata}"} if backend == "obstore" else {}
        said = authorization(server, "s3://bucket/x", tmp_path, backend=backend, region="us-east-1", **options)
        assert said is not None
        assert "Credential=OF-THE-INSTANCE/" in said

    def test_a_container_reads_with_its_role(
        self, server: FaultyHttpServer, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
    ) -> None:
        (tmp_path / "token").write_text("me")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://{metadata}/container")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        said = authorization(server, "s3://bucket/x", tmp_path, backend=backend, region="us-east-1")
        assert said is not None
        assert "Credential=OF-THE-CONTAINER/" in said


class TestGcs:
    def test_a_machine_of_google_reads_with_its_account(
        self, server: FaultyHttpServer, metadata: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("GCE_METADATA_HOST", metadata)
        assert authorization(server, "gs://bucket/x", tmp_path) == "Bearer of-the-machine"

    def test_a_token_is_sent_and_no_token_is_sent_when_told_so(self, server: FaultyHttpServer, tmp_path: Path) -> None:
        assert authorization(server, "gs://bucket/x", tmp_path, bearer_token="mine") == "Bearer mine"
        assert authorization(server, "gs://bucket/x", tmp_path, token="anon") is None
