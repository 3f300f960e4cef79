"""`perdure chaos`: compares a run with injected faults to an undisturbed run."""
