"""In which region an S3 bucket is: S3 tells anybody, in a header, whatever else it answers."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import urllib3
import urllib3.exceptions

_HEADER = "x-amz-bucket-region"

_logger = logging.getLogger(__name__)


def discover_region(
    bucket: str, pool: urllib3.PoolManager, *, endpoint: str = "https://s3.amazonaws.com", timeout_seconds: float = 10.0
) -> str | None:
    """Return the region of a bucket, None when the server does not say it (then requests will say what is wrong).

    Args:
        bucket: Its name.
        pool: Makes the request.
        endpoint: The S3 that is asked.
        timeout_seconds: For all of it.
    """
    try:
        answer = pool.request(
            "HEAD", f"{endpoint}/{bucket}", timeout=timeout_seconds, redirect=False, retries=urllib3.Retry(1, redirect=0)
        )
    except urllib3.exceptions.HTTPError as error:
        _logger.warning("the region of bucket %s cannot be asked for (%s): set storage_options['region']", bucket, error)
        return None
    headers: Mapping[str, str] = answer.headers
    return headers.get(_HEADER)
