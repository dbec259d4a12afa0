"""Stages: of one sample at a time, which the engine runs, and of all samples of an iteration."""
