"""From a step, or the memory of a dead run, to tensors."""
