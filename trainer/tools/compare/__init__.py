"""`perdure compare`: every strategy, run and profiled."""
