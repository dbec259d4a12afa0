"""One index file: written, found by its fingerprint, checked, and read by row."""
