"""Columns and values of an index: what SQLite stores of each Arrow type, and how it comes back."""
