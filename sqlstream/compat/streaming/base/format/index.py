"""What users import from `streaming.base.format.index`."""

__all__ = ["get_index_basename"]


def get_index_basename() -> str:
    """Return the name of the index beside shards."""
    return "index.json"
