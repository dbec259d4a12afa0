"""Bytes by URL, from anywhere, brought by a helper process.

    reading process                                helper process (no torch)
    Fetcher ── HelperClient ── HelperProcess ══ socketpair ══ Helper ── Transfer ── with_retries ── Resolver ── Storage
      submit, grant, cancel      receiver thread     messages,         pwrite up to the grant        obstore | urllib3 | fsspec
      head, list, download                           descriptors

Invariants: no byte is written past the grant or after FetchDone; a FetchDone without error means the whole object, its length
checked; each request ends with exactly one FetchDone; no storage client is ever imported in the reading process; no URL is
shown with its credentials or its query.
"""
