"""Which process takes which positions, and the position and state of a run; no sample is touched here."""
