"""What people and tools do with a cache directory: look at it, clear it, drop other versions of what a listing names."""
