"""Lazy indexes of shards: each shard is a chunk, whose table is found when it is first needed, and kept beside the index."""
