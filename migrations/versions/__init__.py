"""One file per schema version: plain SQL, so that `sqlstream.db.create_at_head` makes a new ledger without alembic."""
