"""One file per schema version. Its `upgrade` takes SQLite's own connection: a new ledger is made by them alone (`database`)."""
