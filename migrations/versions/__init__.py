"""One file per schema version. Its `upgrade` takes SQLite's own connection: `sqlstream.db` makes a new ledger by them alone."""
