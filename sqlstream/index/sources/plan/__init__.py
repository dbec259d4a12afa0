"""From what users write as `src` to the parts that make an index."""
