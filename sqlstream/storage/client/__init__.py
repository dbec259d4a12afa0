"""The reading process's side of the helper process: requests that are out, and the thread that hears the answers."""
