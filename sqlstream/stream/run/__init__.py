"""Where a run stands, and which process takes which positions; no sample is touched here."""
