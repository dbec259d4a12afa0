"""Table formats: each gives the columns and rows of one file."""
