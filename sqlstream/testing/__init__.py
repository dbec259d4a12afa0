"""The public test kit: what it takes to test code over a cache, and what this package's own tests are made of.

- `servers`: `LocalS3`, an S3 that behaves, and `FaultyHttpServer`, an HTTP server that misbehaves on cue; both count requests.
- `storage.ScriptedFetcher`: a storage with scripted faults, in the calling thread, without any process or network;
  `storage.MemoryStore`: objects in memory, to read and to write.
- `faults.SideEffects`: a disk that fails, or a process that dies, at its n-th side effect;
  `system_calls.sqlite_system_calls`: the same for SQLite's own calls on the ledger.
- `clock.MockClock`: a clock for whatever in the cache reads the time.
- `reference.ReferenceLedger`: the account, kept naively, to compare with.
- `invariants.check_invariants`: the promises L1 to L7 of a cache directory, checked from outside, also while it is in use.
- `disk.DiskWatch`: what is really on the disk, without asking the ledger.

    with FaultyHttpServer({"/x": b"data"}) as server, Cache(directory, limit=4096) as cache, DiskWatch(directory) as watch:
        with cache.pinned(f"{server.url}/x") as path:
            assert path.read_bytes() == b"data"
    assert watch.highest_bytes <= 4096
    check_invariants(directory, at_rest=True)

Beside the tower: it imports the floors below `stream`; of the package itself only the demo imports it. The modules are not
imported here, so that `sqlstream demo` starts a server without loading the rest.
"""
