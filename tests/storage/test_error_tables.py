"""A new version of a client that raises something new must fail here, not in a training run.

In a process of its own: see spawned.py.
"""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import inspect
import aiohttp, botocore.exceptions, fsspec.exceptions, obstore.exceptions, urllib3.exceptions
from sqlstream.errors import SqlStreamError, StorageError, TransientStorageError
from sqlstream.storage.backends import http as http_backend, obstore as obstore_backend
from sqlstream.storage.backends.fsspec import errors as fsspec_backend

def exceptions(module):
    return [thing for _, thing in inspect.getmembers(module, inspect.isclass) if issubclass(thing, Exception)]

unmapped = [kind for kind in exceptions(obstore.exceptions) if kind not in obstore_backend.ERRORS]
assert not unmapped, unmapped
for kind in exceptions(obstore.exceptions):
    assert isinstance(obstore_backend.map_error(kind("text"), "s3://b/k"), SqlStreamError)

timeout = urllib3.exceptions.ReadTimeoutError(None, "/x?sig=1", "slow")
for error, kind in [(timeout, TransientStorageError), (urllib3.exceptions.SSLError("bad certificate"), StorageError)]:
    wrapped = urllib3.exceptions.MaxRetryError(None, "/x?sig=1", error)
    assert type(http_backend.map_error(wrapped, "https://h/x?sig=1")) is kind

names = set(fsspec_backend.ERRORS) - {"builtins.Exception"}
def covered(kind):
    return any(f"{base.__module__}.{base.__qualname__}" in names for base in kind.__mro__)
clients = [getattr(aiohttp, name) for name in dir(aiohttp) if name.startswith(("Client", "Server")) and name.endswith("Error")]
network = [kind for kind in exceptions(botocore.exceptions) if issubclass(kind, botocore.exceptions.HTTPClientError)]
unmapped = [kind for kind in [*clients, *network, *exceptions(fsspec.exceptions)] if not covered(kind)]
assert not unmapped, unmapped

table = {
    FileNotFoundError("x"): "ObjectNotFoundError", PermissionError("x"): "AccessDeniedError",
    TimeoutError("x"): "TransientStorageError",
    ConnectionResetError("x"): "TransientStorageError",
    ImportError("install hugging"): "MissingDependencyError",
    RuntimeError("https://u:p@h/x?sig=1 broke"): "StorageError",
    botocore.exceptions.ClientError({"ResponseMetadata": {"HTTPStatusCode": 503}}, "GetObject"): "TransientStorageError",
}
for error, name in table.items():
    ours = fsspec_backend.map_error(error, "s3://b/k")
    assert type(ours).__name__ == name, (error, ours)
    assert "sig" not in str(ours) and "s3://b/k" in str(ours)
assert "sqlstream-data[s3]" in str(fsspec_backend.map_error(ImportError("no s3fs"), "s3://b/k"))
assert "pip install huggingface_hub" in str(fsspec_backend.map_error(ImportError("install it"), "hf://datasets/a/b/c.csv"))
"""


def test_every_error_of_the_clients_is_mapped() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
