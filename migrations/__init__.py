"""Alembic scripts of the cache ledger; shipped inside the wheel as `sqlstream.migrations`."""
