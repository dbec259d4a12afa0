"""Several datasets as one: the dataset, its streams, and what each process needs to make their samples."""
