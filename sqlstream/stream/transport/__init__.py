"""Transport of batches from worker to trainer: shared memory, and pins that outlive their worker."""
