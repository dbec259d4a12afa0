"""ZIP archives: the directory at the end, the entries in it, and the content of their members."""
