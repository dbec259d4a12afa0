"""From positions to samples: rows of the next window, their objects, transforms, in order, with the pins given back."""
