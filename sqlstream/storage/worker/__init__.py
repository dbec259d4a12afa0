"""The helper process: threads that download, each transfer from an open answer to the caller's descriptor."""
