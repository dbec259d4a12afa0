"""The ledger: one SQLite file for each cache directory, its write lock, its tables and all SQL on them; no file but its own.

`database` opens it, mends it and runs write transactions behind `write_lock`; `ledger` has the statements.
"""
