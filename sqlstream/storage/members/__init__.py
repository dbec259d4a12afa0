"""Formats of shards: where their members are, and what values the members' bytes are. Pure: bytes in, places and values out.

Nothing here opens a file or a connection. What a format's own table, checksums and sizes can tell is checked: damage is an
error that names shard and place, never a short listing.
"""
