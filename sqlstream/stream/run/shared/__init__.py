"""What a trainer and its workers share while a run goes on: tensors, and a text."""
