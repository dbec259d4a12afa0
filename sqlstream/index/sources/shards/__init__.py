"""Shards as sources: one object with many samples, each of parts that stay where they are."""
