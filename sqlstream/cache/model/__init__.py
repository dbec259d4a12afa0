"""Values that the parts of a cache exchange: references to objects, rows of the ledger, eviction policies. Pure."""
