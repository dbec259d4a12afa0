"""The loader of streams that have batches of their own, with the names of `sds`."""
