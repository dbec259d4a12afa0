"""One file for each format, and what they share: encoders of values, hashes and compression of whole files."""
