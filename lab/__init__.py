"""Experiments with nodes on one machine: start them, kill them, cut them off, and compare the run
with one that nothing happens to. Of the product, only `perdure chaos` imports this package."""
