"""The command `sqlstream`: looks at caches and indexes, and shows the product at work.

One file per subcommand group over `output` (tables, JSON) and `options` (what every command takes); `main` joins them.

Promises:
- Exit codes: 0 ok, 1 a finding (`cache verify`), 2 wrong use or an error of `sqlstream.errors`, told in one line.
- Every command that prints takes `--json`, and then prints one JSON document on standard output and nothing else.
- Starting is cheap: what a command needs is imported when it runs. `cache stats` imports neither torch nor alembic.
- Text from indexes and ledgers is data: control characters in it are shown escaped, so that they cannot drive the terminal.
"""
