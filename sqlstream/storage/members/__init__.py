"""Formats of shards: where their members are, and what values the members' bytes are. Pure: bytes in, places and values out.

Nothing here opens a file or a connection. What a format's own table, checksums and sizes can tell is checked: damage is an
error that names shard and place, never a short listing. A name in an archive is data, never a path.

`source` is what archives are read from: bytes by range. `tar` walks headers; `zip` reads the directory at the end, and turns a
member's record into its content; `mds` reads the tables of MosaicML Streaming; `names` groups members to samples as WebDataset
does; `damage` takes the samples before the damage of a shard; `braces` expands what names shards; `unpack` decompresses shards.
"""
