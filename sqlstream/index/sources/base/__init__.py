"""What every source has: columns, batches of rows, and a way to reach its bytes."""
