"""`perdure launch`: files that start a run elsewhere: a batch script, manifests, a cloud task."""
