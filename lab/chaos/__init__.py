"""`perdure chaos`: a run with faults, held against one without."""
