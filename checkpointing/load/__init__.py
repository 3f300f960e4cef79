"""Loads tensors from a step in storage, or from the memory of a dead run."""
