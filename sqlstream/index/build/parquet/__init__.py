"""Parquet files of a lazy index: row groups are its chunks."""
