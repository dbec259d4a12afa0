"""Which headers and options are credentials, and to which places they belong. Pure.

The one table of them: what is sent to whom (`access`, `resolve`) and what takes part in an object's identity both go by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from sqlstream.storage.base.addresses import origin_of, server_of
from sqlstream.storage.base.urls import scheme

CREDENTIAL_HEADERS = frozenset(
    "authorization proxy-authorization cookie cookie2 x-api-key api-key apikey x-auth-token x-access-token x-csrf-token "
    "x-amz-security-token x-amz-date x-goog-api-key x-goog-iam-authorization-token x-ms-authorization-auxiliary "
    "ocp-apim-subscription-key private-token job-token deploy-token x-github-token x-vault-token x-goog-user-project "
    "x-amz-request-payer x-amz-server-side-encryption-customer-key x-amz-server-side-encryption-customer-key-md5 "
    "x-goog-encryption-key x-goog-encryption-key-sha256 x-ms-encryption-key x-ms-encryption-key-sha256".split()
)
"""Lower-case names of headers that say who asks or who pays; ask `is_credential_header`, which knows the like of them, too."""

CREDENTIAL_OPTIONS = frozenset(
    # of obstore, and of s3fs, gcsfs and adlfs (see `settings`)
    "access_key_id secret_access_key session_token aws_access_key_id aws_secret_access_key aws_session_token key secret token "
    "username password role_arn role_session_name sts_endpoint web_identity_token_file metadata_endpoint imdsv1_fallback "
    "request_payer requester_pays sse_customer_key_base64 service_account service_account_key bearer_token "
    "application_credentials account_key client_id client_secret tenant_id authority_host sas_key sas_token msi_endpoint "
    "object_id msi_resource_id federated_token_file use_azure_cli credential_type connection_string credential "
    # of other file systems
    "user login passwd passphrase pkey key_filename private_key client_keys auth auth_kwargs cert kerberos kerb_ticket "
    "kerb_kwargs cookies creds credentials refresh_token access_token api_key oauth".split()
)
"""Names of `storage_options` that say who asks or who pays; ask `is_credential_option`, which knows the like of them, too.

`headers` is not among them, since its parts are judged one by one; `profile` neither, since it may name an endpoint as well."""

_ALIKE = re.compile(
    r"auth|token|secret|cookie|passw|passphrase|credential|signature|session|api[-_]?key|private[-_]?key", re.IGNORECASE
)
_PLAIN = frozenset("credential_hosts skip_signature".split())
_FAMILIES = {"s3a": "s3", "gcs": "gs", "abfss": "abfs"}


def is_credential_header(name: str) -> bool:
    """Return whether a header of this name says who asks, so that it must not be stored, logged, or sent to strangers.

    Example:
        >>> [is_credential_header(name) for name in ("Authorization", "X-Acme-Token", "Accept", "User-Agent")]
        [True, True, False, False]
    """
    return name.strip().lower() in CREDENTIAL_HEADERS or _ALIKE.search(name) is not None


def is_credential_option(name: str) -> bool:
    """Return whether an option of this name says who asks.

    Example:
        >>> [is_credential_option(name) for name in ("secret", "ftp_password", "endpoint_url", "region")]
        [True, True, False, False]
    """
    return name not in _PLAIN and (name in CREDENTIAL_OPTIONS or _ALIKE.search(name) is not None)


def without_credentials(options: Mapping[str, object]) -> dict[str, object]:
    """Return `storage_options` for places that credentials do not belong to: none of them, and no header at all."""
    return {
        name: without_credentials(value) if isinstance(value, Mapping) else value
        for name, value in options.items()
        if name != "headers" and not is_credential_option(name)
    }


def place_of(url: str) -> str:
    """Return what credentials belong to: `scheme://host:port`, a bucket, a container, a repository; `''` if that is not clear.

    Example:
        >>> place_of("https://me@API.example.org/x"), place_of("s3a://bucket/key"), place_of("hf://datasets/a/b@main/x.csv")
        ('https://api.example.org:443', 's3://bucket', 'hf://datasets/a/b')
    """
    kind = scheme(url)
    if kind == "pipe":  # a command has credentials of its own
        return ""
    kind, rest = _FAMILIES.get(kind, kind), url.partition("://")[2]
    if kind == "hf":
        return f"hf://{'/'.join(rest.split('/')[:3]).partition('@')[0]}"
    if kind in ("s3", "gs", "az", "abfs"):
        bucket = rest.partition("/")[0]
        bucket = bucket if kind == "abfs" else bucket.rpartition("@")[2]
        return f"{kind}://{bucket}" if origin_of(url).endswith(bucket) else ""
    server = server_of(origin_of(url))
    if server is None or not server.host:
        return ""
    return f"{kind}://{server.host}" + ("" if server.port is None else f":{server.port}")


def belongs_to(place: str, listed: Iterable[str]) -> bool:
    """Return whether a place is one of those that the user listed in `credential_hosts`.

    Args:
        place: As `place_of` gives it.
        listed: Hosts or buckets (`api.example.org`, `api.example.org:8443`, `my-bucket`), in any scheme; or URLs of them
            (`https://api.example.org`, `s3://my-bucket`), which hold for that scheme. `*` stands for anything within one.

    Example:
        >>> belongs_to("https://a.example.org:443", ["*.example.org"]), belongs_to("http://a.example.org:80", ["https://a.example.org"])
        (True, False)
    """
    names = {place.partition("://")[2]}
    names.add(re.sub(r":\d+$", "", place.partition("://")[2]))
    for entry in listed if place else ():
        if "://" in entry:
            if fnmatchcase(place, place_of(entry)):
                return True
            continue
        written = entry.rstrip("/").replace("[", "").replace("]", "")  # places have addresses of IPv6 without brackets
        if any(fnmatchcase(name, form) for name in names for form in (written, written.lower())):
            return True
    return False
