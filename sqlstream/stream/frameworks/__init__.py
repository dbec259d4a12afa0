"""Loaders and frameworks of others: how each of them treats a dataset, and what is done or said about it."""
