"""What happened to a run, and what follows from it."""
