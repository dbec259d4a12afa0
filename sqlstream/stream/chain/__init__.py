"""Runs transforms on a sample, with random numbers that depend on (seed, epoch, position) alone."""
