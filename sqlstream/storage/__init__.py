"""Reads objects by URL from any store; a helper process does the reading.

    reading process                                helper process (no torch)
    Fetchers ─ HelperClient ── HelperProcess ══ socketpair ══ Helper ── Transfer ── with_retries ── Resolver ── Storage
      submit, grant, cancel      receiver thread     messages,   Users    pwrite up to the grant    obstore | urllib3 | fsspec
      head, list, download       Outstanding         descriptors Workers  resumes, checks digests
      get_ranges                                                 Outbox

`Helpers` gives the fetchers of one server and identity one client; `ReadOptions` say with each request how its fetcher reads.

`client`, `protocol`, `worker` and `backends` are the columns of the drawing; `members` reads formats of shards, from bytes;
`base` is below all of them.

Pure planners in `base`: `coalesce` (which ranges become one request), `concurrency` (how many downloads at a time), `retry`
(what is tried again, and when), `access` (what an index may name), `settings`; in `client`: `outstanding` (which requests are
sent again after a helper died).

Invariants: no byte is written past the grant or after FetchDone; a FetchDone without error means the whole object, its length
checked, of one version; each request ends with exactly one FetchDone; a request that kills helpers fails alone; no storage
client is ever imported in the reading process; no URL is shown with its credentials or its query.
"""
