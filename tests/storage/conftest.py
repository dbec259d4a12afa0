from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from sqlstream.config import StorageOptions
from sqlstream.storage.fetcher import Fetcher
from sqlstream.testing.ports import free_port
from sqlstream.testing.servers import FaultyHttpServer, LocalS3
from tests.storage.azurite import Azurite, find_azurite


@pytest.fixture(scope="session")
def s3() -> Iterator[LocalS3]:
    with LocalS3() as server:
        yield server


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer() as server:
        yield server


@pytest.fixture
def fetcher() -> Iterator[Fetcher]:
    """Anonymous S3 goes to whatever endpoint a test names; no timeout expires unless a test stalls for it."""
    fetcher = Fetcher(StorageOptions(num_threads=4))
    yield fetcher
    fetcher.stop()


@pytest.fixture(scope="session")
def gcs() -> Iterator[str]:
    """Endpoint of a GCS emulator in a process of its own."""
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"  # else gcsfs asks for the bucket's type over gRPC, for minutes
    port = free_port()
    command = [str(Path(sys.executable).with_name("gcp-storage-emulator")), "start", "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen([*command, "--in-memory"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 300
        while True:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
        process.kill()


@pytest.fixture(scope="session")
def azurite() -> Iterator[Azurite]:
    if find_azurite() is None:
        pytest.skip("azurite is not on this machine: scripts/install_servers.sh installs it")
    with Azurite() as server:
        yield server


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Key and certificate for 127.0.0.1 and 8.8.8.8 in one PEM file; the authority that signed it lies beside, as `ca.pem`."""
    directory = tmp_path_factory.mktemp("tls")
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    authority_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))

    def signed(name: str, public_key: ec.EllipticCurvePublicKey, *, is_authority: bool) -> bytes:
        subject, issuer = (x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)]) for text in (name, "test authority"))
        builder = x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number(), now - day, now + day)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
        builder = builder.add_extension(issuer_key, critical=False)  # Python 3.13 asks for it
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        if is_authority:
            signs = ("digital_signature", "key_cert_sign", "crl_sign")
            others = (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "encipher_only",
                "decipher_only",
            )
            usage = x509.KeyUsage(**dict.fromkeys(signs, True), **dict.fromkeys(others, False))
            builder = builder.add_extension(usage, critical=True)
        else:
            addresses = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "8.8.8.8")]
            builder = builder.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
        return builder.sign(authority_key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    (directory / "ca.pem").write_bytes(signed("test authority", authority_key.public_key(), is_authority=True))
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    (directory / "server.pem").write_bytes(secret + signed("server", key.public_key(), is_authority=False))
    return directory / "server.pem"
