"""MDS, the shard format of MosaicML Streaming, and its split forms: their index, the tables of shards, and values."""
