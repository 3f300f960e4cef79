"""Runs on several local nodes: kills nodes, partitions them, and compares the run with an
undisturbed one. Within the product, only `perdure chaos` imports this package."""
