"""Runs the migrations in one transaction, on the connection that `sqlstream.cache.ledger.schema` gives."""

from __future__ import annotations

from alembic import context


def run() -> None:
    """Run the migrations that are due."""
    connection = context.config.attributes["connection"]
    context.configure(connection=connection, transactional_ddl=True)
    with context.begin_transaction():
        context.run_migrations(connection=connection.connection.driver_connection)


run()
