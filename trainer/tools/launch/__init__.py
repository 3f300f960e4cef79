"""Files that start a run elsewhere, written as by hand: a batch script, manifests, a task."""
