"""Content of samples that is not in the rows of an index: in Parquet files, and in shards."""
