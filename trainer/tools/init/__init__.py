"""A recipe for a model, data and a machine: planned, commented, and to be changed by hand."""
