"""The global generators while transforms run: their numbers depend on (seed, epoch, position) alone."""
