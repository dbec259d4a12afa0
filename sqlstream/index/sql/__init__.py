"""Users' SQL: checked as a syntax tree, translated for SQLite, and run with limits on time and memory."""
