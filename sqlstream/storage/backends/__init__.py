"""Storage backends: each reads one family of URLs. They run in the helper process and do not know each other."""
